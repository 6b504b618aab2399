"""The attested steps behind a run's outputs, verified for its page."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lathe_base.errors import UserError
from lathe_base.provenance import bundle
from lathe_base.provenance.chain import SHORT, Step, recorded_chain, verify_chain
from lathe_base.provenance.keys import public_path, signing_key, trusted_keys
from lathe_base.provenance.statement import Resource


@dataclass(frozen=True)
class Line:
    """A step, or an external material, in the lineage.

    Attributes:
        depth: distance from the root, in steps.
        seconds: duration of the step; None for materials, and for steps shown before.
    """

    depth: int
    name: str
    digest: str
    finished: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Chain:
    """The lineage of a folder.

    Attributes:
        problem: why it is not verified; None if it is.
        command: verifies it again.
    """

    lines: list[Line]
    problem: str | None
    command: str


def chain_of(folder: Path) -> Chain | None:
    """The chain behind a folder, verified with the public key of the run's signing key, or else
    with the trusted keys; None without attestations."""
    step, problem = recorded_chain(folder, allows_gaps=True), None
    if step is None:
        return None
    key = signing_key()
    own = public_path(key) if key else None
    public = [own] if own and own.is_file() else trusted_keys()
    if not bundle.read(folder)[0].is_signed:
        problem = "the steps are not signed"
    elif not public:
        problem = "no public key is available to verify them"
    else:
        try:
            step = verify_chain(folder, public)
        except UserError as error:
            problem = error.what
    command = f"lathe verify {folder} --key {public[0] if public else 'PUBLIC.pub'} --chain"
    return Chain(list(_lines(step, "", 0, set())), problem, command)


def _lines(step: Step, role: str, depth: int, shown: set[int]) -> Iterator[Line]:
    statement = step.statement
    digest = list(statement.products.values())[-1][:SHORT]
    name = f"{role}: {statement.step}" if role else statement.step
    if id(step) in shown:
        yield Line(depth, f"{name} (see above)", digest)
        return
    shown.add(id(step))
    times = statement.predicate.run_details.metadata
    started, finished = map(datetime.fromisoformat, (times.started_on, times.finished_on))
    seconds = (finished - started).total_seconds()
    yield Line(depth, name, digest, f"{finished:%Y-%m-%d %H:%M:%S} UTC", seconds)
    for material, before in step.made_by:
        if before:
            yield from _lines(before, material.name, depth + 1, shown)
        else:
            yield Line(depth + 1, _named(material), (material.sha256 or "")[:SHORT])


def _named(material: Resource) -> str:
    place = (material.uri or "").rpartition("/")[2] or material.uri or ""
    return f"{material.name}: {place}"
