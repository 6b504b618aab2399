import pytest

from lathe.data.sources import documents


@pytest.fixture(scope="session")
def prose() -> list[str]:
    """The embedded corpus; reading the standard library takes seconds, so once."""
    return list(documents("python"))
