from collections.abc import Iterator

import pytest

from tests.hostile import pool
from tests.hostile.pool import Worker


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Workers with a world of good artifacts."""
    with pool.workers(tmp_path_factory.mktemp("hostile")) as ready:
        yield ready
