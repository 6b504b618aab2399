"""Repeat the steps behind a folder, and compare what comes out with what they attested.

Files with a model or its data have to be the same to the byte. The metadata of a folder and its
pages have times and paths in them, which nobody can repeat, and are not compared.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

import yaml

from lathe.certify.tensors import first_difference
from lathe.errors import StageError, UserError
from lathe.launch.parent import tied
from lathe.model.folder import WEIGHTS
from lathe.provenance import surroundings
from lathe.provenance.chain import Step, recorded_chain, verify_chain
from lathe.provenance.keys import SIGNING_KEY
from lathe.provenance.statement import Resource, Statement
from lathe.provenance.step import kind_of
from lathe.storage import atomic_file, digest, locked, sha256
from lathe.storage.ownership import in_the_way, require_apart

log = logging.getLogger("lathe")

JOURNAL = "rebuild.json"
LOG = "rebuild.log"
NOT_COMPARED = {".json": ("config.json", "tokenizer.json"), ".html": (), ".md": ()}
"""Endings of files with times or paths in them, and those of them that have none."""

COMMANDS = {
    "prepare": ("prepare", {"tokenizer": "--tokenizer"}),
    "join": ("prepare", {}),  # a data set of shards is the same as one of one piece
    "pretrain": ("pretrain", {"data": "--data", "init": "--init"}),
    "prune": ("prune", {"model": "", "data": "--data"}),
    "analyze": ("analyze", {"model": "", "data": "--data"}),
    "quantize": ("quantize", {"model": "", "data": "--data", "sensitivity": "--sensitivity"}),
    "export": ("export", {"model": "", "data": "--data"}),
}
"""By step: the verb, and the option of each material; those without one come first."""


@dataclass(frozen=True)
class Rebuilt:
    """A step that was repeated.

    Attributes:
        same: names of the files that came out the same to the byte.
        different: names of those that did not.
        detail: the first tensor that differs, and by how much, where the original is at hand.
    """

    step: str
    folder: Path
    same: tuple[str, ...]
    different: tuple[str, ...]
    detail: str = ""


def rebuild(
    folder: Path, output: Path, keys: Sequence[Path] = (), corpus: str | None = None
) -> list[Rebuilt]:
    """Repeat all steps behind an artifact into new folders below `output`, in their order, up to
    the first that comes out different. A rebuild that was killed resumes.

    Args:
        folder: a checkpoint, an export or a token data set with attestations.
        keys: public keys that the attestations are verified with; without any they are believed.
        corpus: where the corpus is now; its recorded place unless given.

    Raises:
        UserError: no attestations, a step that cannot be repeated, or a corpus that is not there.
        StageError: a step fails.
    """
    require_apart(output, folder)
    chain = verify_chain(folder, keys) if keys else recorded_chain(folder)
    if chain is None:
        raise UserError(f"{folder}: no attestations", "give a folder that Lathe has written")
    order = list(_in_order(chain))
    for step in order:
        _require_repeatable(folder, step)
    _warn_of_differences(chain.statement)
    originals = {id(before): _place(m) for s in order for m, before in s.made_by if before}
    originals[id(chain)] = folder
    done: list[Rebuilt] = []
    with locked(output):
        _claim(output, chain)
        folders: dict[int, Path] = {}
        for number, step in enumerate(order, 1):
            folders[id(step)] = output / f"{number}-{step.statement.step}"
            _repeat(step, folders, output, corpus)
            found = _compare(step, folders[id(step)], originals[id(step)])
            done.append(found)
            log.info(
                "%s: %s",
                found.step,
                f"{', '.join(found.different)} differ" if found.different else "the same",
            )
            _write_journal(output, chain, done)
            if found.different:
                break
    return done


def _in_order(chain: Step) -> Iterator[Step]:
    """The steps to repeat, inputs first, each once."""
    seen: set[int] = set()

    def visit(step: Step) -> Iterator[Step]:
        if id(step) in seen:
            return
        seen.add(id(step))
        if step.statement.step != "join":
            for _, before in step.made_by:
                if before:
                    yield from visit(before)
        yield step

    yield from visit(chain)


def _require_repeatable(folder: Path, step: Step) -> None:
    if step.statement.step not in COMMANDS:
        raise UserError(
            f"{folder}: `{step.statement.step}` is not a step that can be repeated",
            f"rebuild the output of {', '.join(COMMANDS)}",
        )
    if not step.statement.recipe:
        raise UserError(f"{folder}: `{step.statement.step}` has no recipe", "attest it again")


def _warn_of_differences(statement: Statement) -> None:
    """Warn of what may change the last bits of a sum."""
    definition, builder = statement.predicate.build_definition, statement.predicate.run_details
    then, now = definition.internal_parameters, surroundings.machine()
    for name in ("cpu", "machine", "python", "gpu"):
        if then.get(name) != now.get(name):
            log.warning(
                "%s was %s, and is %s: bits may differ", name, then.get(name), now.get(name)
            )
    versions = surroundings.builder().version
    for name, version in builder.builder.version.items():
        if versions.get(name) != version:
            log.warning("%s was %s, and is %s: bits may differ", name, version, versions.get(name))


def _claim(output: Path, chain: Step) -> None:
    """Check that the folder is empty, or has an unfinished rebuild of the same."""
    names = sorted(path.name for path in output.iterdir())
    if not names:
        _write_journal(output, chain, [])
        return
    try:
        of = json.loads((output / JOURNAL).read_bytes())["of"]
    except (OSError, ValueError, KeyError, TypeError):
        raise in_the_way(output, names, "an earlier rebuild of Lathe's") from None
    if of != _identity(chain):
        raise UserError(f"{output}: a rebuild of something else", "give another --output")


def _write_journal(output: Path, chain: Step, done: Sequence[Rebuilt]) -> None:
    steps = [{**asdict(found), "folder": found.folder.name} for found in done]
    with atomic_file(output / JOURNAL) as work:
        text = json.dumps({"of": _identity(chain), "steps": steps}, indent=2) + "\n"
        work.write_text(text, encoding="utf-8")


def _identity(chain: Step) -> str:
    return digest(chain.statement.to_json().decode())


def _repeat(step: Step, folders: dict[int, Path], output: Path, corpus: str | None) -> None:
    """Run the step's verb, unless it has been run to its end."""
    target = folders[id(step)]
    if kind_of(target):
        return
    verb, options = COMMANDS[step.statement.step]
    recipe = target.with_suffix(".yaml")
    with atomic_file(recipe) as work:
        work.write_text(yaml.safe_dump(step.statement.recipe), encoding="utf-8")
    first, others = list[str](), ["--recipe", str(recipe), "--output", str(target)]
    for material, before in step.made_by:
        option = options.get(material.name)
        place = folders.get(id(before)) if before else _place(material)
        if material.kind == "corpus":
            others += ["--source", corpus or _corpus(material)]
        elif option == "":
            first.append(str(place))
        elif option:
            others += [option, str(place)]
    log.info("repeating %s", verb)
    _run([verb, *first, *others], step.statement, output / LOG)


def _run(arguments: list[str], statement: Statement, log_file: Path) -> None:
    threads = statement.predicate.build_definition.internal_parameters.get("threads")
    variables = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    variables.pop(SIGNING_KEY, None)
    with log_file.open("ab") as file:
        command = tied([sys.executable, "-m", "lathe", *arguments])
        code = subprocess.run(command, stdout=file, stderr=file, env=variables).returncode
    if code:
        last = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
        raise StageError(f"`lathe {arguments[0]}` failed: {' '.join(last)}; see {log_file}")


def _compare(step: Step, made: Path, original: Path | None) -> Rebuilt:
    compared = {
        name: expected
        for name, expected in step.statement.products.items()
        if Path(name).name in NOT_COMPARED.get(Path(name).suffix, (Path(name).name,))
    }
    found = {
        name: (made / name).is_file() and sha256(made / name) == expected
        for name, expected in compared.items()
    }
    different = tuple(name for name, is_same in found.items() if not is_same)
    return Rebuilt(
        step=step.statement.step,
        folder=made,
        same=tuple(name for name, is_same in found.items() if is_same),
        different=different,
        detail=_detail(made, original) if WEIGHTS in different else "",
    )


def _detail(made: Path, original: Path | None) -> str:
    if original is None or not (original / WEIGHTS).is_file():
        return "the original is not at hand, so that no tensor can be compared"
    difference = first_difference(original, made)
    if difference is None:
        return f"{original / WEIGHTS} itself is not what was attested"
    if difference.largest is None:
        return f"{difference.tensor} has another shape or type"
    return (
        f"{difference.tensor}: {difference.elements} elements differ, by {difference.largest:.3g} "
        "at most"
    )


def _place(material: Resource) -> Path | None:
    """The local path that a material had."""
    parts = urlparse(material.uri or "")
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _corpus(material: Resource) -> str:
    place = _place(material)
    if place is None:
        return str(material.uri).partition(" ")[0]
    expected = (material.annotations or {}).get("file_sha256")
    if not place.is_file():
        raise UserError(f"{place}: the corpus is not there any more", "say where with --corpus")
    if expected and sha256(place) != expected:
        raise UserError(f"{place}: the corpus has changed", "give the original with --corpus")
    return str(place)
