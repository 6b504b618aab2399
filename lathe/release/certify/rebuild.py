"""Repeats the steps behind a folder, and compares the outputs with their attestations.

Files with a model or data have to be identical. The metadata of a folder and its pages are not
compared, because they contain times and paths.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from lathe.model.folder import WEIGHTS
from lathe.release.certify.tensors import first_difference
from lathe_base.errors import Code, StageError, UserError
from lathe_base.provenance import surroundings
from lathe_base.provenance.bundle import Resource, Statement
from lathe_base.provenance.chain import (
    GRAPH,
    Step,
    is_served,
    recorded_chain,
    served_export,
    verify_chain,
)
from lathe_base.provenance.keys import SIGNING_KEY
from lathe_base.provenance.step import NAMED, WEIGHT, folder_kind
from lathe_base.storage import atomic_file, digest, locked, sha256
from lathe_base.storage.ownership import foreign_files_error, require_apart
from lathe_base.storage.splits import locate
from lathe_launch.parent import tied

log = logging.getLogger("lathe")

JOURNAL = "rebuild.json"
LOG = "rebuild.log"
SERVED = ("deploy", "release")
TEACHER = NAMED["teacher"]
COMMANDS: dict[str, tuple[str, dict[str, str]]] = {
    "import": ("import", {"source": "", "base": "--base"}),
    "import-megatron": ("import-megatron", {"source": "", "tokenizer": "--tokenizer"}),
    "import-paddle": ("import-paddle", {"source": "", "tokenizer": "--tokenizer"}),
    "prepare": ("prepare", {"tokenizer": "--tokenizer"}),
    "join": ("prepare", {}),  # a data set of shards is the same as one of one piece
    "blend": ("blend", {"parts": ""}),
    "pretrain": ("pretrain", {"data": "--data", "init": "--init"}),
    "finetune": ("finetune", {"model": "", "data": "--data", "teacher": TEACHER}),
    "prune": ("prune", {"model": "", "data": "--data", "teacher": TEACHER}),
    "analyze": ("analyze", {"model": "", "data": "--data"}),
    "quantize": (
        "quantize",
        {"model": "", "data": "--data", "sensitivity": "--sensitivity", "teacher": TEACHER},
    ),
    "export": ("export", {"model": "", "data": "--data"}),
}
"""Step -> command, and the option or setting for each material; positional ones come first."""

NOT_COMPARED = {".json": ("config.json", "tokenizer.json"), ".html": (), ".md": ()}
"""Suffixes of files that contain times or paths, and exceptions without any."""

CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class Rebuilt:
    """A step that was repeated.

    Attributes:
        same: names of the files that are identical.
        different: names of those that are not.
        detail: the first tensor that differs, and by how much, if the original is available; for
            other files, the first byte.
    """

    step: str
    folder: Path
    same: tuple[str, ...]
    different: tuple[str, ...]
    detail: str = ""


def rebuild(
    folder: Path, output: Path, keys: Sequence[Path] = (), corpora: Sequence[str] = ()
) -> list[Rebuilt]:
    """Repeat all steps behind an artifact, in order, into new folders below `output`, up to the
    first whose output differs. A killed rebuild resumes.

    Args:
        folder: a checkpoint, an export or a token data set with attestations; or a release, whose
            export is then repeated.
        keys: public keys to verify the attestations with; without any they are not verified.
        corpora: new locations of corpora that have moved.

    Raises:
        UserError: no attestations, a step that cannot be repeated, or a missing corpus.
        StageError: a step fails.
    """
    require_apart(output, folder)
    # Without a key the bytes are still compared, with what an attestation says that nobody vouches
    # for.
    chain = verify_chain(folder, keys) if keys else recorded_chain(folder)
    if chain is None:
        raise UserError(
            f"{folder}: no attestations", "give a folder written by Lathe", Code.WRONG_KIND
        )
    original = folder
    if chain.statement.step in SERVED:
        chain, original = _served(folder, chain)
    order = list(_in_order(chain))
    for step in order:
        name = step.statement.step
        if name not in COMMANDS:
            raise UserError(
                f"{folder}: `{name}` is not a repeatable step",
                f"rebuild the output of {', '.join(COMMANDS)}",
                Code.UNSUPPORTED,
            )
        if not step.statement.recipe and name != "blend":
            raise UserError(f"{folder}: `{name}` has no recipe", "attest it again", Code.INCOMPLETE)
    _warn_about_differences(chain.statement)
    # What the chain refers to, where its files are still there: for the detail of a difference.
    originals = {id(before): m.path for s in order for m, before in s.made_by if before}
    originals[id(chain)] = original
    done: list[Rebuilt] = []
    attested = [m for step in order for m, _ in step.made_by if m.kind == "corpus"]
    located = Corpora(attested, corpora)
    with locked(output):
        _claim(output, chain)
        folders: dict[int, Path] = {}
        for number, step in enumerate(order, 1):
            folders[id(step)] = output / f"{number}-{step.statement.step}"
            _repeat(step, folders, output, located)
            comparison = compare(step, folders[id(step)], originals[id(step)])
            done.append(comparison)
            log.info(
                "%s: %s",
                comparison.step,
                f"{', '.join(comparison.different)} differ" if comparison.different else "the same",
            )
            _write_journal(output, chain, done)
            if comparison.different:  # what is made of it would differ too
                break
    return done


class Corpora:
    """The locations of corpora: the attested ones, unless they have moved.

    Args:
        attested: the attested corpora.
        corpora: new locations. A file is matched to a corpus by digest; a single file without a
            match is used for every corpus that is missing.
    """

    def __init__(self, attested: Iterable[Resource], corpora: Sequence[str]) -> None:
        # Folders and addresses have no digest.
        digests = {name: sha256(Path(name)) for name in corpora if Path(name).is_file()}
        self._paths_by_digest = {digest: name for name, digest in digests.items()}
        known = {_file_digest(resource) for resource in attested}
        self._others = [name for name in corpora if digests.get(name) not in known]

    def location(self, corpus: Resource) -> str:
        """The path or address of a corpus.

        Raises:
            UserError: it has changed, or no longer exists.
        """
        expected, recorded = _file_digest(corpus), corpus.path
        if expected in self._paths_by_digest:
            return self._paths_by_digest[expected]
        if len(self._others) == 1:
            return self._others[0]
        if recorded is None:
            return str(corpus.uri).partition(" ")[0]
        if not Path(locate(str(recorded)).location).exists():
            why = f"{recorded}: the corpus no longer exists"
            raise UserError(why, "give its new location with --corpus", Code.NOT_FOUND)
        if expected and sha256(recorded) != expected:
            why = f"{recorded}: the corpus has changed"
            raise UserError(why, "give the original with --corpus", Code.MISMATCH)
        return str(recorded)


def _file_digest(corpus: Resource) -> str | None:
    return (corpus.annotations or {}).get("file_sha256")


def _served(folder: Path, chain: Step) -> tuple[Step, Path]:
    """The export that a release serves, and the location of its files.

    Raises:
        UserError: its graph differs from the one it was made from.
    """
    export = served_export(chain)
    if export is None:
        raise UserError(
            f"{folder}: does not serve a graph written by `lathe export`",
            "give an export",
            Code.WRONG_KIND,
        )
    graph = next(name for name in chain.statement.products if is_served(name))
    return export, (folder / graph).parent


def _in_order(chain: Step) -> Iterator[Step]:
    """The steps to repeat, inputs first, each once."""
    seen: set[int] = set()

    def visit(step: Step) -> Iterator[Step]:
        if id(step) in seen:
            return
        seen.add(id(step))
        if step.statement.step != "join":  # whose shards `prepare` makes in one piece
            for _, before in step.made_by:
                if before:
                    yield from visit(before)
        yield step

    yield from visit(chain)


def _warn_about_differences(statement: Statement) -> None:
    """Warn of differences that may change the last bits of a sum."""
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
    """Check that the folder is empty, or contains an unfinished rebuild of the same artifact."""
    names = sorted(path.name for path in output.iterdir())
    if not names:
        _write_journal(output, chain, [])
        return
    try:
        identity = json.loads((output / JOURNAL).read_bytes())["of"]
    except (OSError, ValueError, KeyError, TypeError):
        raise foreign_files_error(output, names) from None
    if identity != _identity(chain):
        raise UserError(f"{output}: contains another rebuild", "give another --output", Code.EXISTS)


def _write_journal(output: Path, chain: Step, done: Sequence[Rebuilt]) -> None:
    steps = [{**asdict(comparison), "folder": comparison.folder.name} for comparison in done]
    with atomic_file(output / JOURNAL) as work:
        text = json.dumps({"of": _identity(chain), "steps": steps}, indent=2) + "\n"
        work.write_text(text, encoding="utf-8")


def _identity(chain: Step) -> str:
    return digest(chain.statement.to_json().decode())


def _repeat(step: Step, folders: dict[int, Path], output: Path, corpora: Corpora) -> None:
    """Run the step's command, unless it has already finished."""
    target = folders[id(step)]
    if folder_kind(target):
        return

    # The command, from the recipe and the materials of the attestation; what an earlier step of
    # this rebuild has made again replaces the recorded path.
    verb, options = COMMANDS[step.statement.step]
    first, others = list[str](), ["--output", str(target)]
    if step.statement.recipe:
        recipe = target.with_suffix(".yaml")
        with atomic_file(recipe) as work:
            work.write_text(yaml.safe_dump(step.statement.recipe), encoding="utf-8")
        others += ["--recipe", str(recipe)]
    for material, before in step.made_by:
        option = options.get(material.name)
        previous = folders.get(id(before)) if before else material.path
        weight = (material.annotations or {}).get(WEIGHT)
        if material.kind == "corpus":
            others += ["--source", corpora.location(material)]
        elif option == "":
            first.append(str(previous) if weight is None else f"{previous}={weight}")
        elif option == TEACHER:
            others += ["--override", f"{TEACHER}={previous}"]
        elif option:
            others += [option, str(previous)]

    # As many threads as before: sums are divided among them. The key would sign the copies.
    log.info("repeating %s", verb)
    threads = step.statement.predicate.build_definition.internal_parameters.get("threads")
    variables = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    variables.pop(SIGNING_KEY, None)
    log_file = output / LOG
    with log_file.open("ab") as file:
        command = tied([sys.executable, "-m", "lathe", verb, *first, *others])
        code = subprocess.run(command, stdout=file, stderr=file, env=variables).returncode
    if code:
        last = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
        raise StageError(f"`lathe {verb}` failed: {' '.join(last)}; see {log_file}", Code.FAILED)


def compare(step: Step, made: Path, original: Path | None) -> Rebuilt:
    """Compare the files of a step.

    Args:
        made: output of the repeated step.
        original: output of the attested step, if it still exists.
    """
    name, products = step.statement.step, step.statement.products
    is_equal = {
        file: (made / file).is_file() and sha256(made / file) == products[file]
        for file in map(str, products)
        if Path(file).name in NOT_COMPARED.get(Path(file).suffix, (Path(file).name,))
        # What is in a folder of a blend is of a part, and is compared where that is made.
        if name != "blend" or "/" not in file
    }
    different = tuple(file for file, is_same in is_equal.items() if not is_same)
    return Rebuilt(
        step=name,
        folder=made,
        same=tuple(file for file, is_same in is_equal.items() if is_same),
        different=different,
        detail=_detail(different, made, original) if different else "",
    )


def _detail(different: tuple[str, ...], made: Path, original: Path | None) -> str:
    """What differs in the most telling file: the weights or the graph, or else the first."""
    name = next((n for n in (WEIGHTS, GRAPH) if n in different), different[0])
    if original is None or not (original / name).is_file():
        return f"the original {name} is not available for comparison"
    if not (made / name).is_file():
        return f"{name} was not rebuilt"
    if name not in (WEIGHTS, GRAPH):
        # The first byte that differs, or the length of the shorter file.
        at = 0
        with (original / name).open("rb") as one, (made / name).open("rb") as other:
            while (a := one.read(CHUNK)) and a == (b := other.read(CHUNK)):
                at += len(b)
            b = other.read(CHUNK) if not a else b
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if first is None and len(a) == len(b):
            return f"{original / name} itself differs from what was attested"
        return f"{name} differs from byte {at + (min(len(a), len(b)) if first is None else first)}"
    difference = first_difference(original, made, name)
    if difference is None:
        # The recorded file may itself have changed since.
        is_original = sha256(original / name) == sha256(made / name)
        return (
            f"{original / name} itself differs from what was attested"
            if is_original
            else f"all tensors of {name} are the same, but the rest of the file differs"
        )
    if difference.largest is None:
        return f"{difference.tensor} has a different shape or type"
    return (
        f"{difference.tensor}: {difference.elements} elements differ, by {difference.largest:.3g} "
        "at most"
    )
