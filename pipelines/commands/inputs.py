"""Preflight checks of a local run, which report all problems together before any work begins."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from components.step import step_names
from lathe import backends
from lathe.data.chats import chat_reader
from lathe.data.rows import RowText, TextKey
from lathe.data.run_inputs import NEWEST, resolve
from lathe.data.sources import documents
from lathe.data.tokenizer import load_tokenizer
from lathe.evaluate.tasks import CLOZE, task_named
from lathe.model.folder import require_checkpoint
from lathe.release.release import open_releases
from lathe.search.design import parse_goal
from lathe_base.checks import Check
from lathe_base.config.fleetx import location
from lathe_base.config.settings import PrepareSettings, Recipe
from lathe_base.config.settings.placement import OTHER_PODS
from lathe_base.errors import Code, UserError
from lathe_base.storage import exists, is_remote, is_store
from lathe_base.storage.splits import locate
from lathe_serving.environment import find_environment
from pipelines.commands.arguments import TASKS, argument, wrong_names

SERVES = ("qat", "compress", "full")
"""The pipelines that start Triton."""

SEARCHED = "compress", "prune_recipe"
"""The pipeline that searches for widths, and its argument for the recipe that trains them."""

STORE_SECONDS = 10.0
GOAL = ("target", "budget")
RESERVED = {"deployed", "serve"}  # not run folders
RUN_LOG, LOCK, CACHE = "run.log", "run.lock", "cache"
KEY = "signing.pem"


def argument_checks(name: str, arguments: dict[str, Any]) -> Iterator[Check]:
    """Whether the pipeline has these arguments, and they are text; the other checks rely on it."""
    yield Check("arguments", lambda: wrong_names(name, arguments))
    for key, value in arguments.items():
        if isinstance(value, str):
            yield Check(key, partial(check_encoding, key, value), after="arguments")


def input_checks(
    name: str, arguments: dict[str, Any], recipes: Mapping[str, Callable[[], Recipe]]
) -> Iterator[Check]:
    """Whether a local run has what it reads and runs.

    Args:
        recipes: loads the recipes, by argument.
    """

    def paths(load: Callable[[], Recipe]) -> None:
        check_paths(load(), arguments)

    for key, load in recipes.items():
        yield Check(key, load)
        yield Check(f"{key}: paths", partial(paths, load), after=key)
    # What a run has one of, the first recipe decides.
    first = recipes["recipe"]
    yield Check("Launch.steps", lambda: check_steps(first()), after="recipe")
    for key, function in {"model": require_checkpoint, "cloze": CLOZE.check}.items():
        if value := arguments.get(key):
            yield Check(f"{key} {value}", partial(check_location, key, value, function))
    yield Check(TASKS, lambda: check_tasks(first()), after="recipe")
    if arguments.get("chat"):
        yield Check("chat", lambda: check_chat(first().Prepare, arguments), after="recipe")
    else:

        def check_text() -> None:
            settings = first().Prepare
            source = arguments.get("corpus") or settings.source
            check_corpus("corpus", source, TextKey(settings.text_key))

        yield Check("corpus", check_text, after="recipe")
    tokenizer = partial(check_tokenizer, name, arguments)
    yield Check("tokenizer", lambda: tokenizer(first().Prepare), after="recipe")
    yield Check("target", lambda: check_goal(name, arguments))
    if root := arguments.get("production"):
        yield Check("production", lambda: check_releases(root, first()), after="recipe")
    if name in SERVES:
        yield Check("Triton", find_environment)
    if name == SEARCHED[0]:

        def check_search() -> None:
            recipe = recipes[SEARCHED[1]]()
            backends.of(recipe).check_support("compress", recipe, False)

        yield Check("pruning", check_search, after=SEARCHED[1])

    def check_environments() -> None:
        used = set()
        for load in recipes.values():
            with suppress(UserError):  # its own check reports it
                used.add(backends.of(load()))
        for backend in used:
            backend.check_environment()

    yield Check("environments", check_environments)


def run_folder_checks(folder: Path, runs: Path, deployed: Path | None) -> list[Check]:
    """Whether a run may write to its folder and, if it deploys, to the link `deployed`."""
    link = [Check(str(deployed), partial(check_link, deployed))] if deployed else []
    return [
        Check("--name", lambda: check_name(folder, runs)),
        Check(str(folder), lambda: check_folder(folder)),
        *link,
    ]


def check_goal(name: str, arguments: dict[str, Any]) -> None:
    """Check the target and budget of `compress`.

    Raises:
        UserError: one of them is invalid.
    """
    if name == "compress":
        target, budget = (arguments.get(key) or argument(name, key) for key in GOAL)
        parse_goal(target, budget)


def check_paths(recipe: Recipe, arguments: Mapping[str, Any]) -> None:
    """Raise UserError if a recipe names a model or data set that the pipeline would not use: its
    steps pass on what they make, from the model and corpus in its arguments; or if its engine
    cannot use that corpus."""
    for key in ("Compress.pretrained", "Model.pretrained", "Engine.save_load.ckpt_dir"):
        if path := location(recipe, key):
            raise UserError(
                f"{key} is {path}, but a pipeline takes its model from MODEL=",
                f"give MODEL={path}, and set -o {key}=",
                Code.CONFLICTING_OPTIONS,
            )
    data = recipe.Data.Train.dataset.input_dir or recipe.Data.Eval.dataset.input_dir
    if arguments.get("chat") and recipe.Compress.engine == "paddle":
        raise UserError(
            "the Paddle engine cannot count the tokens of conversations that the assistant writes",
            "give no ENGINE=paddle (Compress.engine), or give a CORPUS= instead of CHAT=",
            Code.UNSUPPORTED,
        )
    source = arguments.get("corpus") or arguments.get("chat")
    has_corpus = source or "source" in recipe.Prepare.model_fields_set
    if data and not has_corpus:
        raise UserError(
            f"Data.Train.dataset.input_dir is {data}, but a pipeline prepares data from a corpus",
            "give CORPUS=, or train on the folder with `lathe pretrain`",
            Code.CONFLICTING_OPTIONS,
        )


def check_steps(recipe: Recipe) -> None:
    """Check that the steps named in `Launch.steps` exist.

    Raises:
        UserError: one of them does not.
    """
    known = [*step_names(), *OTHER_PODS]
    for name in recipe.Launch.steps:
        if name not in known:
            raise UserError(
                f"Launch.steps: no step {name!r}",
                f"there are {', '.join(known)}",
                Code.UNKNOWN_NAME,
            )


def check_encoding(key: str, value: str) -> None:
    """Raise UserError if an argument is not valid UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{key} {value!r}: not UTF-8", "rename it", Code.BAD_PATH) from None


def check_location(key: str, value: str, function: Callable[[Path], object]) -> None:
    """Check a local path with `function`, or that an address in a store exists."""
    if is_remote(value):
        check_address(key, value)
        return
    path = Path(value)
    if not path.exists():
        raise UserError(f"{key}: no such file or folder: {value}", "check the path", Code.NOT_FOUND)
    if not (path.is_file() or path.is_dir()):
        raise UserError(
            f"{key} {value}: neither a file nor a folder", "give one of them", Code.WRONG_KIND
        )
    try:  # the functions do not know which argument they check
        function(path)
    except UserError as error:
        raise UserError(f"{key} {error.what}", error.hint, error.code) from None


def check_tasks(recipe: Recipe) -> None:
    """Check every `TASK=FILE` of `Offline_Eval.tasks`, and the lines of the files as far as that is
    possible without a model."""
    for option in recipe.Offline_Eval.tasks:
        name, _, file = option.partition("=")
        task = task_named(name, f"correct {TASKS}")
        check_location(TASKS, file, task.check)


def check_address(key: str, uri: str) -> None:
    """Check that an address in a store exists; HTTP addresses are checked when they are fetched."""
    if is_store(uri) and not within(STORE_SECONDS, uri, exists, uri):
        raise UserError(f"{key} {uri}: not found", "check the address", Code.NOT_FOUND)


def check_chat(settings: PrepareSettings, arguments: Mapping[str, Any]) -> None:
    """Check the first of local conversations with the template of a local model."""
    tokenizer = arguments.get("tokenizer") or arguments["model"]  # with the chat template
    if is_remote(tokenizer):
        check_address("model", tokenizer)
        return
    settings = settings.model_copy(update={"chat": True})
    reader = chat_reader(settings, tokenizer, load_tokenizer(Path(tokenizer)))
    assert reader
    check_corpus("chat", arguments["chat"], reader)


def check_corpus(key: str, source: str, text: RowText) -> None:
    """Check the first document of a local corpus."""
    # Only the newest of several corpora is used, and only that is checked.
    location = source.removeprefix(NEWEST)
    if location != source:
        source = (
            within(STORE_SECONDS, location, resolve, source)
            if is_remote(location)
            else resolve(source)
        )
    # The standard library's text needs no check; a Hub data set would have to be downloaded.
    if source == "python" or source.startswith("hf://"):
        return
    location, suffix = locate(source)
    check_location(key, location, lambda path: next(documents(f"{path}{suffix}", text)))


def check_tokenizer(name: str, arguments: Mapping[str, Any], settings: PrepareSettings) -> None:
    """Check that a tokenizer can be loaded, the recipe's unless an argument replaces it."""
    # A pipeline that starts from a model takes the model's.
    source = arguments.get("tokenizer")
    if not source and argument(name, "tokenizer") is not None:
        source = settings.tokenizer
    if source and source != "train":
        check_location("tokenizer", source, load_tokenizer)


def check_releases(root: str, recipe: Recipe) -> None:
    """Check that the address of the releases is in a store that responds."""
    production = recipe.Production.model_copy(update={"releases": root})
    releases = open_releases(recipe.model_copy(update={"Production": production}))
    within(STORE_SECONDS, releases.root, releases.pointer)


def within(seconds: float, uri: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with a time limit.

    Raises:
        UserError: it did not return in time; the function's own exceptions pass through.
    """
    result: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def call() -> None:
        try:
            result.put((function(*arguments), None))
        except BaseException as error:
            result.put((None, error))

    Thread(target=call, daemon=True).start()  # if it hangs, it ends with this process
    try:
        value, error = result.get(timeout=seconds)
    except Empty:
        raise UserError(
            f"{uri}: no answer within {seconds:g} s",
            "check the network and AWS_ENDPOINT_URL",
            Code.TIMEOUT,
        ) from None
    if error:
        raise error
    return value


def check_name(folder: Path, runs: Path) -> None:
    """Check that a run folder is directly below run/ and does not have a reserved name."""
    is_own = folder.name not in ("..", *RESERVED) and folder.name.isprintable()
    if folder.parent != runs or not is_own:
        raise UserError(
            f"--name: {str(folder)!r} is not a valid run folder",
            "give a single word, such as --name first",
            Code.INVALID_VALUE,
        )


def check_folder(folder: Path) -> None:
    """Check that the run folder does not exist yet or was written by a run."""
    hint = "give another --name"
    if not folder.is_dir():
        for path in (folder, *folder.parents):
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise UserError(
                    f"{path}: not a folder", "move it away, or give another --name", Code.WRONG_KIND
                )
        return
    names = sorted(path.name for path in folder.iterdir())
    if RUN_LOG not in names and names not in ([], [LOCK]):
        raise UserError(
            f"{folder}: not a run folder: it contains {', '.join(names[:3])}", hint, Code.EXISTS
        )

    def is_lock(path: Path) -> bool:  # the number of a process
        return path.is_file() and re.fullmatch(rb"\d*\n?", path.read_bytes()) is not None

    # A link, or something of another kind, is the user's: a run would write into it.
    for name, is_right in ((RUN_LOG, Path.is_file), (LOCK, is_lock), (CACHE, Path.is_dir)):
        path = folder / name
        if path.is_symlink() or (path.exists() and not is_right(path)):
            raise UserError(f"{path}: not written by a run", hint, Code.EXISTS)


def check_link(deployed: Path) -> None:
    """Check that `deployed` does not exist or is a link made by an earlier run."""
    if deployed.exists() and not deployed.is_symlink():
        raise UserError(
            f"{deployed}: not a link created by a run",
            "move it away: the run creates its own there",
            Code.EXISTS,
        )
