"""The generated pages are what `make reference` would write now."""

import runpy
from pathlib import Path

import pytest

from tests.documents.pages import ROOT

PAGES: dict[Path, str] = runpy.run_path(str(ROOT / "docs/reference/generate.py"))["pages"]()


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_a_generated_page_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "run `make reference`"


def test_every_component_and_verb_is_there() -> None:
    by_name = {path.name: text for path, text in PAGES.items() if path.parent.name == "reference"}
    assert set(by_name) == {"settings.md", "cli.md", "components.md", "pipelines.md"}
    for heading in ("lathe prepare", "lathe release publish", "lathe bench-serve"):
        assert f"\n## {heading}\n" in by_name["cli.md"]
    assert 'judge["judge"]' in by_name["pipelines.md"].partition("\n## full\n")[2]
    for folder in (ROOT / "components").glob("*/component.py"):
        assert f"\n## {folder.parent.name}\n" in by_name["components.md"]
