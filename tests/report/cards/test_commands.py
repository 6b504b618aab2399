"""The commands write what the functions return, and print what they wrote."""

import json
from pathlib import Path

from lathe.report.cards.bom import environment_sbom, model_bom
from lathe.report.cards.evidence import read_evidence
from lathe_base.errors import Code
from tests.report.cards.conftest import Stages
from tests.report.cards.test_bom import validated
from tests.support.command_line import lathe


def test_bom(stages: Stages, tmp_path: Path) -> None:
    model, exported = stages.models["int8"], stages.exported
    done = lathe("bom", str(model), "--export", str(exported), "--output", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bom: b.json\nmodel: gpt\n" in done.stdout
    text = (tmp_path / "b.json").read_text()
    assert text == model_bom(read_evidence(model, exported=exported))
    at = ["--timestamp", "2026-01-31T12:00:00+0000"]
    assert lathe("bom", str(model), *at, "--output", "b.json", cwd=tmp_path).returncode == 0
    assert "timestamp" in validated((tmp_path / "b.json").read_text())["metadata"]


def test_sbom(tmp_path: Path, small_lock: Path) -> None:
    lock = tmp_path / "serve" / "requirements.lock"
    lock.parent.mkdir()
    small_lock.rename(lock)
    done = lathe("sbom", str(lock), "--output", "s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sbom: s.json\nenvironment: lathe-serve\n"
    assert (tmp_path / "s.json").read_text() == environment_sbom(lock, "lathe-serve")


def test_a_file_in_a_checkpoint_and_a_folder_that_is_none_are_refused(
    stages: Stages, tmp_path: Path
) -> None:
    model = str(stages.models["dense"])
    edited = tmp_path / "b.json"
    edited.write_text(json.dumps({"bomFormat": "CycloneDX", "serialNumber": "urn:uuid:mine"}))
    for arguments, code, says in (
        (
            ["card", model, "--output", f"{model}/config.json"],
            Code.CONFLICTING_OPTIONS,
            f"{model}/config.json",
        ),
        (["card", str(tmp_path), "--output", "README.md"], Code.NOT_FOUND, "config.json"),
        (["bom", model, "--output", "b.json"], Code.EXISTS, "b.json"),
        (["sbom", "nowhere.lock"], Code.NOT_FOUND, "nowhere.lock"),
    ):
        done = lathe(*arguments, cwd=tmp_path)
        assert done.returncode == 2 and f"error[{code}]" in done.stderr, done.stderr
        assert says in done.stderr
