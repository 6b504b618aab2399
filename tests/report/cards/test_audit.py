"""Audits of an environment for known vulnerabilities: findings, exceptions and invalid input."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from lathe.report.cards.audit import (
    ADVISORIES,
    STATEMENTS,
    AuditFinding,
    find_vulnerabilities,
    read_advisories,
    read_statements,
    require_audited,
    unexcused,
)
from lathe.report.cards.bom import ENVIRONMENT_SBOM, environment_sbom
from lathe_base.errors import Code, StageError
from tests.support.command_line import lathe
from tests.support.errors import raises

ROOT = Path(__file__).parents[3]
LOCK = "torch==2.13.0 --hash=sha256:" + "0" * 64 + "\n"


def sbom(folder: Path, lock: str | Path = LOCK, base: str | None = None) -> Path:
    """Write the bill of materials of a lock file or its text."""
    if isinstance(lock, str):
        (folder / "requirements.lock").write_text(lock.replace(" --", " \\\n    --"))
        lock = folder / "requirements.lock"
    path = folder / ENVIRONMENT_SBOM
    path.write_text(environment_sbom(lock, "an environment", base=base))
    return path


def found(path: Path, *advisories: Path, vex: tuple[Path, ...] = ()) -> dict[str, AuditFinding]:
    findings = find_vulnerabilities(path, read_advisories(advisories), read_statements(vex))
    return {one.advisory.id: one for one in findings}


def osv(path: Path, **affected: Any) -> Path:
    package = {"ecosystem": "PyPI", "name": "Torch"}
    values = {"id": "X-1", "modified": "2026-01-01T00:00:00Z"}
    path.write_text(json.dumps({**values, "affected": [{"package": package, **affected}]}))
    return path


def test_the_triton_of_the_wheel_is_affected_but_for_what_cannot_be_reached(tmp_path: Path) -> None:
    findings = found(sbom(tmp_path, ROOT / "images/serve/requirements.lock"))
    assert all("nvidia-pytriton@0.7.0" in one.component for one in findings.values())
    assert "CVE-2024-53880" not in findings  # affects only 24.11
    left = {one.advisory.id for one in unexcused(findings.values())}
    assert {"CVE-2026-24206", "CVE-2026-24207", "CVE-2025-33201", "CVE-2026-47627"} <= left
    assert findings.keys() - left == {
        *("CVE-2025-23310", "CVE-2025-23311", "CVE-2026-24158"),  # the gateway
        *("CVE-2025-23268", "CVE-2026-24213", "CVE-2026-24214", "CVE-2026-24215"),  # DALI
        *("CVE-2025-23335", "CVE-2025-33238", "CVE-2026-47487"),  # TensorRT, SageMaker, MLflow
    }


@pytest.mark.parametrize(("tag", "count"), [("25.10-py3", 31), ("26.05-py3", 5), ("26.06-py3", 0)])
def test_an_image_is_judged_by_the_release_of_its_base(
    tmp_path: Path, tag: str, count: int
) -> None:
    findings = found(sbom(tmp_path, base=f"nvcr.io/nvidia/tritonserver:{tag}"))
    assert len(findings) == count
    later = [one.advisory.affected[0].fixed for one in findings.values()]
    assert all(Version(fixed) > Version(tag.removesuffix("-py3")) for fixed in later)


def test_every_vulnerability_that_the_docs_name_is_known() -> None:
    named = set(re.findall(r"CVE-\d{4}-\d+", (ROOT / "docs/security.md").read_text()))
    known = {one.id for one in read_advisories([])}
    assert named and named <= known
    assert {one.vulnerability.name for one in read_statements([])} <= known


@pytest.mark.parametrize(
    ("affected", "is_found"),
    [
        ({"versions": ["2.13.0"]}, True),
        ({"versions": ["2.13.1"]}, False),
        ({"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}]}, True),
        ({"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]}, False),
        ({"events": [{"introduced": "2.2"}, {"fixed": "2.13.0"}]}, False),
        ({"events": [{"introduced": "2.2"}, {"fixed": "2.13.1"}]}, True),  # 2.2 is not after 2.13
        ({"events": [{"introduced": "2.2"}, {"last_affected": "2.13.0"}]}, True),
        ({"events": [{"introduced": "2.2"}, {"last_affected": "2.9"}]}, False),
        ({"events": [{"introduced": "0"}, {"fixed": "1.0"}, {"introduced": "2.10"}]}, True),
        ({"events": [{"introduced": "3.0.dev1"}]}, False),
    ],
)
def test_versions_are_compared_as_osv_says(
    tmp_path: Path, affected: dict[str, Any], is_found: bool
) -> None:
    if "events" in affected:
        affected = {"ranges": [{"type": "ECOSYSTEM", **affected}]}
    advisory = osv(tmp_path / "osv.json", **affected)
    assert ("X-1" in found(sbom(tmp_path), advisory)) is is_found


def test_a_statement_of_the_users_excuses_one_package_in_one_version(tmp_path: Path) -> None:
    advisory = osv(tmp_path / "osv.json", versions=["2.13.0"])
    vex = tmp_path / "vex.json"
    for product, status, is_excused in (
        ("pkg:pypi/torch@2.13.0", "not_affected", True),
        ("pkg:pypi/torch", "fixed", True),
        ("pkg:pypi/torch@2.13.1", "not_affected", False),
        ("pkg:pypi/other", "not_affected", False),
        ("pkg:pypi/torch", "under_investigation", False),
    ):
        statement = {"vulnerability": {"name": "X-1"}, "products": [{"@id": product}]}
        vex.write_text(json.dumps({"statements": [{**statement, "status": status}]}))
        one = found(sbom(tmp_path), advisory, vex=(vex,))["X-1"]
        assert (one.statement is not None) is is_excused


def test_the_command_fails_with_a_table_of_what_was_found(tmp_path: Path) -> None:
    path, advisory = sbom(tmp_path), osv(tmp_path / "osv.json", versions=["2.13.0"])
    assert lathe("audit", path.name, cwd=tmp_path).returncode == 0
    run = lathe("audit", path.name, "--advisories", advisory.name, cwd=tmp_path)
    assert run.returncode == 1 and re.search(r"X-1 +.* pypi/torch@2\.13\.0 ", run.stdout)
    assert "affected: 1" in run.stdout and "excused: 0" in run.stdout


def test_invalid_bills_and_advisories_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[{}]")
    with raises(Code.MALFORMED, tmp_path / "a.json", "0.id"):
        read_advisories([tmp_path / "a.json"])
    with raises(Code.WRONG_KIND, ADVISORIES):
        find_vulnerabilities(ADVISORIES, [], [])
    with raises(Code.NOT_FOUND, "sbom.cdx.json"):
        require_audited(tmp_path, [])
    with raises(Code.INVALID_VALUE, "nvcr.io/nvidia/tritonserver"):
        sbom(tmp_path, base="nvcr.io/nvidia/tritonserver")


def test_a_release_with_a_known_vulnerability_is_refused(tmp_path: Path) -> None:
    sbom(tmp_path, ROOT / "images/serve/requirements.lock")
    with raises(Code.GATE, "CVE-2025-23316, CVE-2026-24207", kind=StageError):
        require_audited(tmp_path, [])
    vex = json.loads(STATEMENTS.read_text())
    vex["statements"] = [
        {
            "vulnerability": {"name": advisory.id},
            "products": [{"@id": "pkg:pypi/nvidia-pytriton"}],
            "status": "not_affected",
        }
        for advisory in read_advisories([])
    ]
    (tmp_path / "vex.json").write_text(json.dumps(vex))
    require_audited(tmp_path, [tmp_path / "vex.json"])
