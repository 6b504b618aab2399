"""The decorator `attested`: a stage writes an attestation into its output."""

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from lathe_base.artifacts import kinds
from lathe_base.config.settings import Recipe
from lathe_base.errors import UserError
from lathe_base.provenance import bundle, surroundings
from lathe_base.provenance.bundle import (
    BuildDefinition,
    Digests,
    Parameters,
    Predicate,
    Resource,
    Run,
    RunDetails,
    Statement,
    seal,
)
from lathe_base.provenance.keys import load_signer, signing_key
from lathe_base.provenance.signature import Signer, sign
from lathe_base.storage import digest, is_remote, sha256
from lathe_base.storage.failures import shown
from lathe_base.storage.files import files_below
from lathe_base.storage.ownership import ATTESTATION_FILES, SIGNATURE, Kind, listed_files
from lathe_base.storage.splits import locate

KINDS = (
    *(kinds.CHECKPOINT, kinds.EXPORT, kinds.DATA, kinds.EVALUATION, kinds.SENSITIVITY),
    *(kinds.SHARD, kinds.TOKENIZER, kinds.REPOSITORY),
)
CORPORA = (kinds.DATA, kinds.SHARD, kinds.TOKENIZER)
"""Kinds of folders made from a corpus, which their metadata names."""

EMBEDDED = "python"
"""The name of the corpus that ships with Python, which is not a file."""

SIGNED = (kinds.CHECKPOINT, kinds.EXPORT, kinds.REPOSITORY)
"""Kinds of folders with a model, which are also signed as a whole."""

NAMED = {
    "tokenizer": "Prepare.tokenizer",
    "teacher": "Compress.Distill.teacher",
    "eval_path": "Offline_Eval.eval_path",
    "eval_tasks": "Offline_Eval.tasks",
}
"""Inputs that the recipe may name instead of an argument, and their settings. They are strings so
that only stages with such an input depend on the setting."""

WORDS = ("train", "parent")
"""Values of those settings that are not inputs."""

WEIGHTS = "model.safetensors"
VERDICT, FOLDER = "verdict", "folder"
WEIGHT = "weight"
"""Annotation of a data set in a blend: its sampling weight."""

P = ParamSpec("P")
R = TypeVar("R")
Results = Callable[[Path], Mapping[str, Mapping[str, Any]]]


def attested(
    step: str, *inputs: str, below: str = "", results: Results | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a stage write an attestation, signed if there is a key. With several processes only the
    first one does.

    A stage that finds its output and attestation finished leaves both unchanged.

    Args:
        step: the verb.
        inputs: names of the stage's parameters that are inputs (folders, files, lists of them,
            (name, path) or (path, weight) pairs), and keys of `NAMED`.
        below: the attested subfolder of `output`.
        results: figures of the finished output that later checks use, by name.

    Raises:
        TypeError: an input is neither a parameter of the stage nor a key of `NAMED`; it would be
            missing from every attestation.
    """

    def decorate(stage: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(stage)
        unknown = [name for name in inputs if name not in {*signature.parameters, *NAMED}]
        if unknown:
            raise TypeError(
                f"attested({step!r}): {stage.__qualname__} has no parameter {', '.join(unknown)}; "
                f"it has {', '.join(signature.parameters)}"
            )

        @functools.wraps(stage)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if os.environ.get("RANK", "0") != "0":
                return stage(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            recipe, output = bound.arguments.get("recipe"), bound.arguments["output"]
            started = now()

            def look() -> list[tuple[Resource, Path | None]]:
                values = {
                    name: bound.arguments.get(name) or _named(name, recipe) for name in inputs
                }
                return [m for name, value in values.items() for m in materials(name, value)]

            # Before the stage, because it may take days in which the inputs change.
            try:
                inputs_before = look()
            except (OSError, UserError):  # the stage says what is wrong with its input
                inputs_before = None
            result = stage(*args, **kwargs)
            if output is not None:
                path = Path(output) / below if below else Path(output)
                metrics = results(path) if results else {}
                attest(step, recipe, path, inputs_before or look(), metrics, started)
            return result

        return run

    return decorate


def attest(
    step: str,
    recipe: Recipe | None,
    output: Path,
    inputs: Sequence[tuple[Resource, Path | None]],
    figures: Mapping[str, Mapping[str, Any]],
    started: str,
    products: Mapping[str, str] | None = None,
) -> None:
    """Write the attestation of an output, and sign it if there is a key.

    Args:
        recipe: None for a step without one.
        inputs: each with the folder or file whose attestations are copied.
        products: SHA-256 of the output's files by name, for a folder without a metadata file.
    """
    key, products = signing_key(), products or _products(output)
    if products is None:
        return
    # A stage that has found its output finished has made nothing: the attestation of the run that
    # made it stays, and is signed if that run had no key.
    existing = bundle.read(output)
    if existing and existing[0].statement.products == products:
        attestations = existing
        if key and not existing[0].is_signed:
            attestations = [existing[0].signed(load_signer(key)), *existing[1:]]
    else:
        materials = []
        for resource, _ in inputs:
            # A folder that Lathe did not write gets the digest of all files below it only now that
            # the stage has succeeded: stages reject a wrong folder, such as `/`, at once.
            if resource.kind == FOLDER and not resource.digest and (path := resource.path):
                files = ((p, n) for n, p in files_below(path) if p.is_file())
                listed = "".join(f"{sha256(p)}  {n}\n" for p, n in files)
                digests = Digests(sha256=digest(listed))
                resource = resource.model_copy(update={"digest": digests})
            materials.append(resource)
        materials += _corpus(output)
        statement = _statement(step, recipe, products, materials, figures, started)
        sealed = seal(statement, load_signer(key) if key else None, str(output))
        attestations = bundle.merged(sealed, [path for _, path in inputs if path])
    if output.is_file():
        bundle.embed(output, attestations)
    else:
        (output / SIGNATURE).unlink(missing_ok=True)  # it covers the attestations
        bundle.write(output, attestations)
    if key and has_signature(output):
        sign_model(output, Signer(key))


def has_signature(output: Path) -> bool:
    """Whether an output gets a signature of all its files in addition to its attestation: releases
    and folders with a model do; data sets, evaluations and JSON files do not."""
    return not output.is_file() and folder_kind(output) in (*SIGNED, None)


def sign_model(folder: Path, signer: Signer) -> Path:
    """Sign a folder that Lathe wrote, except its logs."""
    known = {*(_products(folder) or {}), *ATTESTATION_FILES}
    logs = [name for name, _ in files_below(folder) if name not in known]
    return sign(folder, signer, logs if folder_kind(folder) else ())


def folder_kind(folder: Path) -> Kind | None:
    """The kind of a folder that Lathe wrote; None for any other."""
    return next((k for k in KINDS if listed_files(folder / k.metadata_file, k)), None)


def _products(output: Path) -> dict[str, str] | None:
    """SHA-256 of an output's files by name; None if it is not a finished output of Lathe."""
    if output.is_file():
        return {_as_text(output.name): digest(bundle.content(output).decode())}
    kind = folder_kind(output)
    if kind is None:
        return None
    metadata = output / kind.metadata_file
    return {**listed_files(metadata, kind), kind.metadata_file: sha256(metadata)}


def _statement(
    step: str,
    recipe: Recipe | None,
    products: Mapping[str, str],
    inputs: Sequence[Resource],
    metrics: Mapping[str, Mapping[str, Any]],
    started: str,
) -> Statement:
    settings: dict[str, Any] = {}
    if recipe is not None:
        settings = recipe.model_dump(mode="json")
        if "Prepare" in settings:  # not in the excerpts of most steps
            source = recipe.Prepare.source
            settings["Prepare"]["source"] = shown(source) if is_remote(source) else _as_text(source)
    return Statement(
        subject=[
            Resource(name=name, digest=Digests(sha256=sha256)) for name, sha256 in products.items()
        ],
        predicate=Predicate(
            build_definition=BuildDefinition(
                external_parameters=Parameters(step=step, recipe=settings),
                internal_parameters=surroundings.machine(),
                resolved_dependencies=[*inputs, *surroundings.dependencies()],
            ),
            run_details=RunDetails(
                builder=surroundings.builder(),
                metadata=Run(
                    invocation_id=surroundings.run(),
                    started_on=started,
                    finished_on=now(),
                ),
                byproducts=[Resource(name=n, annotations=dict(v)) for n, v in metrics.items()],
            ),
        ),
    )


def materials(name: str, value: Any) -> Iterator[tuple[Resource, Path | None]]:
    """The materials of a stage's argument, each with the location of its attestations."""
    if isinstance(value, list | tuple):
        for item in value:
            if not isinstance(item, tuple):
                yield from materials(name, item)
                continue
            # A (name, path) or (path, weight) pair.
            path = next(part for part in item if isinstance(part, Path))
            weight = next((part for part in item if isinstance(part, int | float)), None)
            for resource, location in materials(name, path):
                about = {**(resource.annotations or {}), **({WEIGHT: weight} if weight else {})}
                yield resource.model_copy(update={"annotations": about}), location
    elif value and Path(value).exists():
        path = Path(value)
        yield material(name, path), path if path.is_dir() or _is_verdict(path) else None
    elif value and is_remote(str(value)):
        yield Resource(name=name, uri=shown(str(value)), annotations={"kind": "address"}), None


def _named(name: str, recipe: Recipe | None) -> str | list[str] | None:
    """The input with this name in the recipe, or the files of a list of `TASK=FILE`."""
    value = attrgetter(NAMED[name])(recipe) if recipe and name in NAMED else None
    if isinstance(value, list):
        return [entry.partition("=")[2] for entry in value]
    return None if value in WORDS else value


def _corpus(output: Path) -> list[Resource]:
    """The corpus of an output, by the digest of its documents' text, which does not depend on
    compression."""
    kind = folder_kind(output) if output.is_dir() else None
    if kind not in CORPORA:
        return []
    values = json.loads((output / kind.metadata_file).read_bytes())
    if "blend" in values:  # its parts say what they were made from
        return []
    source = str(values.get("source"))
    text = values.get("text_sha256")
    for key in ("made_from", "trained_on"):
        text = text or (values.get(key) or {}).get("text_sha256")
    about: dict[str, Any] = {"kind": "corpus"}
    location, suffix = locate(source)
    if source != EMBEDDED and (path := Path(location)).exists():
        if path.is_file():
            about["file_sha256"] = sha256(path)
        source = path.resolve().as_uri() + suffix
    digests = Digests(sha256=text) if text else None
    return [Resource(name="corpus", uri=_as_text(source), digest=digests, annotations=about)]


def material(name: str, path: Path) -> Resource:
    """An existing file or folder as a material; folders not written by Lathe have no digest yet."""
    content_digest: str | None
    if kind := folder_kind(path) if path.is_dir() else None:
        what, content_digest = kind.name, sha256(path / kind.metadata_file)
    elif _is_verdict(path):
        what, content_digest = VERDICT, digest(bundle.content(path).decode())
    elif path.is_file():
        what, content_digest = "file", sha256(path)
    elif (path / WEIGHTS).is_file():
        what, content_digest = "model", sha256(path / WEIGHTS)
    else:
        what, content_digest = FOLDER, None
    known = Digests(sha256=content_digest) if content_digest else None
    about = {"kind": what}
    return Resource(name=name, digest=known, uri=path.resolve().as_uri(), annotations=about)


def _is_verdict(path: Path) -> bool:
    # A verdict has some kilobytes; other inputs, such as a corpus, are not read for this.
    if not path.is_file() or path.stat().st_size > 1 << 24:
        return False
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError):
        return False
    return isinstance(values, dict) and isinstance(values.get(bundle.EMBEDDED), list)


def _as_text(name: str) -> str:
    """A path, even if it is not UTF-8, as text for JSON."""
    return name.encode("utf-8", "backslashreplace").decode()


def now() -> str:
    """The time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
