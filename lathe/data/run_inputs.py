"""External inputs of a pipeline run, such as `newest:PLACE`, and the identity of their bytes."""

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, StageError, UserError, explain_os_error
from lathe_base.storage import exists, is_remote, list_uris
from lathe_base.storage.objects import MARKER, UNKNOWN, content_id, unknown
from lathe_base.storage.splits import locate

log = logging.getLogger("lathe")

NEWEST, HUB = "newest:", "hf://"

Contents = dict[str, str]
"""`content` by path, address or name."""


@dataclass(frozen=True)
class RunInputs:
    """External inputs of a run's steps, in addition to each other's outputs.

    Attributes:
        corpus: where the text is; of `newest:PLACE`, what is the newest one now.
        text: contents of the corpus and of the tokenizer, which a model may bring.
        weights: contents of the model that the run starts from, and of a teacher.
        scored: contents of that model, a teacher, and what models are measured on.
    """

    corpus: str
    text: Contents = field(default_factory=dict)
    weights: Contents = field(default_factory=dict)
    scored: Contents = field(default_factory=dict)


def look_up(
    recipes: Sequence[Recipe],
    corpus: str = "",
    tokenizer: str = "",
    model: str = "",
    init: str = "",
    cloze: str = "",
) -> RunInputs:
    """Find a run's inputs and identify what is there.

    Args:
        recipes: of the run; the first one's text and tokenizer are taken where none are given.
        model: whose tokenizer is taken where none is given.
        init: weights that training starts from; only its weights are taken.

    Raises:
        UserError: something is missing, or a store does not answer.
    """
    # Every component imports this module, and few need the library of tokenizers.
    from lathe.data.tokenizer import PAIRS

    def contents(locations: Iterable[str]) -> Contents:
        return {location: content(location) for location in dict.fromkeys(locations) if location}

    prepare = recipes[0].Prepare
    corpus = resolve(corpus or prepare.source)
    if not tokenizer and not model and prepare.tokenizer != "train":
        tokenizer = prepare.tokenizer
    # One of GPT-2's two files stands for both.
    path, tokenizer_files = Path(tokenizer), [tokenizer]
    for pair in PAIRS:
        if path.name in pair and path.is_file():
            both = (path.with_name(name) for name in pair)
            tokenizer_files = [str(file) for file in both if file.is_file()]
            break
    teachers = [recipe.Compress.Distill.teacher for recipe in recipes]
    weights = contents([model, init, *(t for t in teachers if t and t != "parent")])
    measured = [cloze, *(recipe.Offline_Eval.eval_path or "" for recipe in recipes)]
    measured += [task.partition("=")[2] for recipe in recipes for task in recipe.Offline_Eval.tasks]
    return RunInputs(
        corpus,
        text=contents([corpus, *tokenizer_files, model]),
        weights=weights,
        scored=weights | contents(measured),
    )


def resolve(source: str) -> str:
    """The newest corpus at `newest:s3://bucket/prefix/` or `newest:FOLDER`; another source is
    returned unchanged.

    It is the most recently changed object or file, or prefix or folder, directly below. A prefix
    counts only if it is complete, that is, has the manifest that `python -m lathe_base.storage put`
    uploads last. Names that begin with a dot are ignored. A split, as in `newest:FOLDER::test`, is
    that of the corpus.

    Raises:
        UserError: nothing is there, or the store does not answer.
    """
    if not source.startswith(NEWEST):
        return source
    location, suffix = locate(source.removeprefix(NEWEST))
    if not location:
        raise UserError(
            f"{source}: needs a location after the colon",
            "write newest:FOLDER or newest:s3://...",
            Code.INVALID_VALUE,
        )
    newest = _newest_below(location) if is_remote(location) else _newest_in(Path(location))
    if newest is None:
        raise UserError(
            f"{source}: no complete corpus there",
            "put a file there, or a folder with `python -m lathe_base.storage put FOLDER "
            f"{location.rstrip('/')}/NAME/`",
            Code.NOT_FOUND,
        )
    log.info("%s is %s", source, newest + suffix)
    return newest + suffix


def _newest_below(prefix: str) -> str | None:
    for uri in reversed(list_uris(prefix)):
        if uri.rstrip("/").rpartition("/")[2].startswith("."):
            continue
        if not uri.endswith("/") or exists(uri + MARKER):
            return uri
        log.warning("skipping %s: without %s it may be incompletely uploaded", uri, MARKER)
    return None


def _newest_in(folder: Path) -> str | None:
    if not folder.is_dir():
        raise UserError(f"{NEWEST}{folder}: no such folder", "check the path", Code.NOT_FOUND)
    # A folder changes with the newest file in it: its own time tells of names that come and go.
    times: dict[Path, int] = {}
    try:
        for path in folder.iterdir():
            if path.name.startswith("."):
                continue
            files = [path] if path.is_file() else (p for p in path.rglob("*") if p.is_file())
            if changed := max((p.stat().st_mtime_ns for p in files), default=0):
                times[path] = changed
    except OSError as error:
        raise explain_os_error(error, folder) from error
    return str(max(times, key=lambda path: (times[path], path.name))) if times else None


def content(source: str) -> str:
    """Like `content_id`, for names of corpora and of models on a hub too."""
    if source == "python":
        return f"python {sys.version}"
    name = source.removeprefix(HUB)
    if name == source:
        return content_id(locate(source).location)
    folder = Path(name.partition(":")[0])
    return content_id(str(folder)) if folder.is_dir() else unknown()


def require_unchanged(contents: Contents) -> None:
    """Check that the contents have not changed since the run began.

    Raises:
        StageError: one has others.
        UserError: one is missing, or a store does not answer.
    """
    for source, seen in contents.items():
        if not seen.startswith(UNKNOWN) and content(source) != seen:
            raise StageError(
                f"{source}: it has changed since this run began; start another run", Code.CHANGED
            )
