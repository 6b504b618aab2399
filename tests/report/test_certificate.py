"""The page of a resume certificate, and the certificate's section in a report."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lathe.cli import app
from lathe.report.training import certificate_page, read_certificate
from lathe_base.errors import Code
from tests.support.errors import raises

CERTIFICATE: dict[str, Any] = {
    "certifies": "killed and resumed training produces the same model as uninterrupted training",
    "passed": True,
    "difference": None,
    "steps": 40,
    "processes": 2,
    "seed": 0,
    "kills": [
        {"planned": {"kind": "all ranks"}, "step": 9, "saved_step": 8, "unfinished": []},
        {
            "planned": {"kind": "during a save"},
            "step": 24,
            "saved_step": 16,
            "unfinished": ["step_00000024.partial"],
        },
    ],
    "uninterrupted": {"file": "a" * 64, "tensors": {}},
    "resumed": {"file": "a" * 64, "tensors": {}},
    "machine": "Linux",
    "versions": {"lathe": "1"},
}


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps(CERTIFICATE | changes))
    return path


def test_a_page_says_whether_it_passed_and_shows_every_kill(tmp_path: Path) -> None:
    certificate_page(write(tmp_path / "certificate.json"), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "resumes bit for bit" in page and "Killed 2 times" in page
    assert "step_00000024.partial" in page and "a" * 64 in page
    assert "2 kills, at the steps 9, 24" in page


def test_a_difference_is_named(tmp_path: Path) -> None:
    difference = {"tensor": "h.0.attn.c_attn.weight", "largest": 0.25, "elements": 3}
    path = write(tmp_path / "certificate.json", passed=False, difference=difference)
    certificate_page(path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "produces a different model" in page and "h.0.attn.c_attn.weight" in page
    assert "by up to 0.25" in page


def test_a_run_without_kills_proves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "certificate.json", passed=False, kills=[])
    certificate_page(path, tmp_path / "page.html")
    assert "never killed" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("text", ["{}", "[1]", "no JSON"])
def test_another_file_is_not_a_certificate(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with raises(Code.MALFORMED, tmp_path / "other.json"):
        read_certificate(tmp_path / "other.json")


def test_a_report_shows_it(small_dense: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "certificate.json")
    page = tmp_path / "report.html"
    given = [str(small_dense), "--certificate", str(path), "--output", str(page)]
    result = CliRunner().invoke(app, ["report", *given])
    assert result.exit_code == 0, result.output
    assert "resumes bit for bit" in page.read_text()
