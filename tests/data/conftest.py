import json
from pathlib import Path

import pytest

from lathe.data.sources import documents
from tests.support.once import once


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Documents of the built-in corpus, cached: reading the standard library takes seconds."""

    def write(path: Path) -> None:
        path.write_text(json.dumps(list(documents("python"))))

    texts: list[str] = json.loads(once(tmp_path_factory, "prose.json", write).read_text())
    return texts
