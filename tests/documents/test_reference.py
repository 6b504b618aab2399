"""The generated pages are up to date with `make reference`."""

import re
import runpy
from pathlib import Path

import pytest

from lathe_base.errors import Code
from lathe_base.parameters import FIELDS
from tests.documents.pages import ROOT
from tests.support import quick_kfp  # noqa: F401


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    written: dict[Path, str] = runpy.run_path(str(ROOT / "docs/reference/generate.py"))["pages"]()
    return written


def test_the_generated_pages_are_up_to_date(pages: dict[Path, str]) -> None:
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `make reference`"


def test_every_component_and_verb_is_there(pages: dict[Path, str]) -> None:
    by_name = {path.name: text for path, text in pages.items() if path.parent.name == "reference"}
    names = ("settings", "generation", "errors", "fleetx", "cli", "components", "pipelines")
    assert set(by_name) == {f"{name}.md" for name in names}
    assert all(f"| `{name}`" in by_name["generation.md"] for name in FIELDS)
    for heading in ("lathe prepare", "lathe release publish", "lathe bench-serve"):
        assert f"\n## {heading}\n" in by_name["cli.md"]
    assert 'judge["judge"]' in by_name["pipelines.md"].partition("\n## full\n")[2]
    rows = re.findall(r"^\| `(\S+)` \| .+ \| (.*) \|$", by_name["errors.md"], re.M)
    assert [code for code, _ in rows] == list(Code)
    assert [code for code, statuses in rows if not statuses] == [], "raised nowhere"
    for folder in (ROOT / "components").glob("*/component.py"):
        assert f"\n## {folder.parent.name}\n" in by_name["components.md"]
