from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile import pool
from tests.hostile.pool import Worker
from tests.support.once import once


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Workers that share a world of valid artifacts."""
    with pool.workers(once(tmp_path_factory, "hostile", make_world)) as ready:
        yield ready


def make_world(folder: Path) -> None:
    folder.mkdir()
    with pool.workers(folder, number=1):
        """The first worker builds the world."""
