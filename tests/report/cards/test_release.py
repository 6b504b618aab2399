"""The documents of a release are complete, and never replace a user's files."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lathe.evaluate.comparison import Check
from lathe.report.cards.release import SERVE_LOCK, write_release_documents
from lathe_base.errors import Code
from tests.report.cards.conftest import Stages
from tests.report.cards.test_bom import validated
from tests.report.cards.test_card import parsed
from tests.support.errors import raises


def write(stages: Stages, folder: Path, lock: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    model, evaluation = stages.models["int8"], stages.evaluations["int8"]
    return write_release_documents(
        folder, model, stages.exported, evaluation, stages.verdict, stages.data, lock=lock
    )


def test_a_checkout_has_the_lock_file_of_the_serving_environment() -> None:
    assert SERVE_LOCK.is_file()


def test_they_are_written_again_the_same(stages: Stages, tmp_path: Path, small_lock: Path) -> None:
    names = ["README.md", "bom.cdx.json", "quality.svg", "sbom.cdx.json"]
    assert write(stages, tmp_path / "a", small_lock) == names
    before = {name: (tmp_path / "a" / name).read_bytes() for name in names}
    write(stages, tmp_path / "a", small_lock)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert parsed((tmp_path / "a" / "README.md").read_text()).eval_results
    for name in ("bom.cdx.json", "sbom.cdx.json"):
        validated((tmp_path / "a" / name).read_text())
    exported = json.loads((stages.exported / "export.json").read_text())
    assert exported["sha256"] in before["bom.cdx.json"].decode()


def test_no_bill_of_the_environment_without_the_lock_file(stages: Stages, tmp_path: Path) -> None:
    assert write(stages, tmp_path / "a", tmp_path / "none")[-1] == "quality.svg"


def test_the_picture_has_every_check_beside_its_margin(
    stages: Stages, tmp_path: Path, small_lock: Path
) -> None:
    write(stages, tmp_path / "a", small_lock)
    card = (tmp_path / "a" / "README.md").read_text()
    assert (
        "](quality.svg)"
        in card.partition("## Evaluation results")[2].partition("## Training and compression")[0]
    )
    drawn = ElementTree.parse(tmp_path / "a" / "quality.svg")
    texts = {"".join(element.itertext()).strip() for element in drawn.iter()}
    checks = [Check(**check) for check in json.loads(stages.verdict.read_text())["checks"]]
    assert checks
    for check in checks:
        assert {check.measure, check.formatted()["change"]} <= texts


@pytest.mark.parametrize("name", ["README.md", "bom.cdx.json", "quality.svg", "sbom.cdx.json"])
def test_a_file_of_somebody_elses_stays(
    stages: Stages, tmp_path: Path, small_lock: Path, name: str
) -> None:
    (tmp_path / "a").mkdir()
    mine = tmp_path / "a" / name
    mine.write_text('{"bomFormat": "CycloneDX", "serialNumber": "urn:uuid:mine"}\n')
    with raises(Code.EXISTS, mine):
        write(stages, tmp_path / "a", small_lock)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [name]
