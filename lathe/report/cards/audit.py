"""Finds known vulnerabilities in a bill of materials: advisories in OSV format that match a
CycloneDX SBOM, except those that a VEX statement excludes.

`advisories.json` has Triton's, from NVIDIA's bulletins, and `vex.json` (OpenVEX) those that do not
apply to a server set up by Lathe. Both are dated and can be extended.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packageurl import PackageURL
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from rich.table import Table

from lathe.report.cards.bom import ENVIRONMENT_SBOM
from lathe_base.errors import Code, StageError, UserError
from lathe_base.inputs import first_mistake, parse_json, read_text

ADVISORIES, STATEMENTS = (
    Path(__file__).with_name(name) for name in ("advisories.json", "vex.json")
)

_NUMBERS = re.compile(r"\d+(\.\d+)*")
HINT = "give a JSON file in OSV or OpenVEX format"


class Package(BaseModel):
    """The package of an advisory; `purl` has no version."""

    ecosystem: str = ""
    name: str
    purl: str | None = None

    def covers(self, component: PackageURL) -> bool:
        """Whether it is the component's package, in any version."""
        if self.purl is None:
            return (
                # Names of PyPI have several spellings, of which one is canonical.
                self.ecosystem == "PyPI"
                and component.type == "pypi"
                and canonicalize_name(self.name) == canonicalize_name(component.name)
            )
        return _matches_purl(self.purl, component)


class Affected(BaseModel):
    """Affected versions of a package: individual ones, and ranges of ordered events."""

    package: Package | None = None
    versions: list[str] = []
    ranges: list[dict[str, Any]] = []

    def covers(self, component: PackageURL) -> bool:
        """Whether it is the component's package, and its version is one of these."""
        if self.package is None or not self.package.covers(component):
            return False
        version = component.version or ""
        if version in self.versions:
            return True
        parsed = _version(version)
        for version_range in self.ranges:
            if version_range.get("type") == "GIT":  # ranges of commits
                continue
            # OSV's algorithm: the last event at or before the version says whether it is affected.
            is_affected = False
            for event in version_range.get("events", []):
                if "introduced" in event and parsed >= _version(event["introduced"]):
                    is_affected = True
                if "fixed" in event and parsed >= _version(event["fixed"]):
                    is_affected = False
                if "last_affected" in event and parsed > _version(event["last_affected"]):
                    is_affected = False
            if is_affected:
                return True
        return False

    @property
    def fixed(self) -> str:
        """The first versions without the vulnerability."""
        events = [
            event for version_range in self.ranges for event in version_range.get("events", [])
        ]
        return ", ".join(sorted({event["fixed"] for event in events if "fixed" in event}))


class Advisory(BaseModel):
    """A vulnerability in OSV format; only these fields are read."""

    id: str
    modified: str
    aliases: list[str] = []
    summary: str = ""
    withdrawn: str | None = None
    affected: list[Affected] = []
    database_specific: dict[str, Any] = {}


class _Named(BaseModel):
    name: str = ""
    id: str = Field("", alias="@id")


class VexStatement(BaseModel):
    """A VEX statement in OpenVEX format."""

    vulnerability: _Named
    products: list[_Named] = []
    status: Literal["not_affected", "affected", "fixed", "under_investigation"]
    justification: str = ""
    impact_statement: str = ""

    def excuses(self, advisory: Advisory, component: PackageURL) -> bool:
        """Whether it states that the component is not affected by the vulnerability."""
        return (
            self.status in ("not_affected", "fixed")
            and self.vulnerability.name in (advisory.id, *advisory.aliases)
            and any(_matches_purl(product.id, component) for product in self.products)
        )


@dataclass(frozen=True)
class AuditFinding:
    """A vulnerability that a component has, or would have without the statement."""

    component: str
    advisory: Advisory
    statement: VexStatement | None

    @property
    def score(self) -> str:
        """The CVSS base score, if the advisory has one."""
        return str(self.advisory.database_specific.get("score", "unknown"))


def read_advisories(paths: Sequence[Path]) -> list[Advisory]:
    """Advisories in files: one in OSV format, a list of them, or `{"vulns": [...]}`."""
    advisories = []
    for path in (ADVISORIES, *paths):
        values = _read(path)
        # OSV's API returns a list below `vulns`; a single advisory is an object too.
        if isinstance(values, dict):
            values = values.get("vulns", [values])
        advisories += _parsed(TypeAdapter(list[Advisory]), values, path)
    return advisories


def read_statements(paths: Sequence[Path]) -> list[VexStatement]:
    """The statements in OpenVEX documents."""
    statements = []
    for path in (STATEMENTS, *paths):
        values = _read(path)
        values = values.get("statements") if isinstance(values, dict) else values
        statements += _parsed(TypeAdapter(list[VexStatement]), values, path)
    return statements


def find_vulnerabilities(
    sbom: Path, advisories: Iterable[Advisory], statements: Sequence[VexStatement]
) -> list[AuditFinding]:
    """The advisories that apply to the components of a bill of materials.

    Args:
        sbom: CycloneDX JSON file, or the folder of a release, which contains one.

    Raises:
        UserError: not a bill of materials.
    """
    path = sbom / ENVIRONMENT_SBOM if sbom.is_dir() else sbom
    hint = "write one with `lathe sbom`; a release has one if it was published with --model"
    if not path.exists():
        raise UserError(f"{path}: no such file", hint, Code.NOT_FOUND)
    values = _read(path, hint)
    if not isinstance(values, dict) or values.get("bomFormat") != "CycloneDX":
        raise UserError(f"{path}: not a bill of materials in CycloneDX JSON", hint, Code.WRONG_KIND)
    components = [
        PackageURL.from_string(purl)
        for component in values.get("components", [])
        if (purl := component.get("purl"))
    ]
    return [
        AuditFinding(
            component.to_string(),
            advisory,
            next((one for one in statements if one.excuses(advisory, component)), None),
        )
        for advisory in advisories
        if advisory.withdrawn is None
        for component in components
        if any(affected.covers(component) for affected in advisory.affected)
    ]


def unexcused(findings: Iterable[AuditFinding]) -> list[AuditFinding]:
    """The vulnerabilities that no statement excludes."""
    return [finding for finding in findings if finding.statement is None]


def audit_table(findings: Iterable[AuditFinding]) -> Table:
    """A table of the findings for a terminal, the most severe first, followed by the excluded ones
    with reasons."""
    table = Table("vulnerability", "score", "component", "fixed in", "what", "state")
    for one in sorted(findings, key=lambda one: (one.statement is not None, _severity(one))):
        state = "affected" if one.statement is None else one.statement.impact_statement
        fixed = next(
            (affected.fixed for affected in one.advisory.affected if affected.fixed), "unknown"
        )
        # Package URLs are long, and the scheme is the same for all.
        name = one.component.removeprefix("pkg:")
        table.add_row(one.advisory.id, one.score, name, fixed, one.advisory.summary, state)
    return table


def require_audited(release: Path, vex: Sequence[Path]) -> None:
    """Check a release for `Production.require: [audit]`.

    Raises:
        UserError: it has no bill of materials of its environment.
        StageError: it has a known vulnerability that no statement excludes.
    """
    vulnerabilities = unexcused(
        find_vulnerabilities(release, read_advisories([]), read_statements(vex))
    )
    if vulnerabilities:
        worst = ", ".join(one.advisory.id for one in sorted(vulnerabilities, key=_severity)[:3])
        raise StageError(
            f"rejected by Production.require (audit): {release / ENVIRONMENT_SBOM} has "
            f"{len(vulnerabilities)} known vulnerabilities, {worst} among them: `lathe audit` "
            "lists all",
            Code.GATE,
        )


def _severity(finding: AuditFinding) -> tuple[float, str]:
    # Without a score, it comes first: it may be the worst.
    score = finding.advisory.database_specific.get("score", 10.0)
    return -float(score), finding.advisory.id


def _matches_purl(purl: str, component: PackageURL) -> bool:
    """Whether a package URL, with or without a version, matches the component."""
    try:
        package = PackageURL.from_string(purl)
    except ValueError:
        return False
    return (package.type, package.namespace, package.name) == (
        component.type,
        component.namespace,
        component.name,
    ) and package.version in (None, component.version)


def _version(text: str) -> Version:
    """A version; if it is not a Python version, its leading numbers: 25.10 for the tag
    `25.10-py3`."""
    try:
        return Version(text)
    except ValueError:
        match = _NUMBERS.match(text)
        return Version(match[0] if match else "0")


def _read(path: Path, hint: str = HINT) -> Any:
    return parse_json(read_text(path, hint), str(path), hint)


def _parsed(kind: TypeAdapter[list[Any]], values: Any, path: Path) -> list[Any]:
    try:
        return kind.validate_python(values)
    except ValidationError as error:
        raise UserError(f"{path}: {first_mistake(error)}", HINT, Code.MALFORMED) from None
