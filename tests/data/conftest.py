import pytest

from tests.support import prose as built_in


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Documents of the built-in corpus."""
    return built_in.prose(tmp_path_factory)
