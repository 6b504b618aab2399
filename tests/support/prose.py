"""The built-in corpus, read once for all tests: parsing the standard library takes seconds."""

import json
from pathlib import Path

import pytest

from lathe.data.sources import documents
from tests.support.once import once


def prose(factory: pytest.TempPathFactory) -> list[str]:
    """Its documents."""

    def write(path: Path) -> None:
        path.write_text(json.dumps(list(documents("python"))))

    texts: list[str] = json.loads(once(factory, "prose.json", write).read_text())
    return texts
