"""Translates the flags of `pretrain_gpt.py` to a recipe."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lathe_base.config.megatron.command import Command, read_command
from lathe_base.config.megatron.flags import CHANGES, REFUSED, TAKEN, WITHOUT_EFFECT
from lathe_base.config.megatron.translate import settings_of
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.config.settings.base import flat
from lathe_base.errors import UserError, printable

BASE = "megatron"
ALWAYS = ("Global.", "Model.hidden_size", "Model.num_", "Optimizer.lr.m", "Distributed.")
"""Keys that a recipe states even if the base has the same value."""


def recipe_from_megatron(sources: Sequence[str], gpus: int | None = None) -> str:
    """The text of a recipe, to save as a file, that trains as the flags do; comments name every
    flag that is not taken.

    Args:
        sources: see `read_command`.
        gpus: number of GPUs, which determines the data-parallel degree; None leaves it to the
            launcher.

    Raises:
        UserError: a flag that changes the numbers and is not supported, one that is missing, a
            value that does not fit, or a `ds_config.json` that contradicts the flags.
    """
    command = read_command(sources)
    _refuse_unsupported(command)
    settings: dict[str, Any] = {}
    comments: dict[str, str] = {}
    for key, value, comment in settings_of(command, gpus):
        settings[key] = value
        if comment:
            comments[key] = comment
    recipe = _checked(settings, command)
    base = flat(load_recipe(BASE).model_dump(mode="json"))
    values = flat(recipe.model_dump(mode="json"))
    shown = {k: v for k, v in settings.items() if k.startswith(ALWAYS) or base[k] != values[k]}
    lines = ["# From the flags of Megatron's pretrain_gpt.py.", *_notes(command)]
    return "\n".join([*lines, f"_base_: {BASE}", *_groups(shown, comments), ""])


def _checked(settings: dict[str, Any], command: Command) -> Recipe:
    """The settings as a recipe.

    Raises:
        UserError: one is out of range.
    """
    try:
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        return load_recipe(BASE, overrides)
    except UserError as error:
        raise UserError(f"{command.source}: {error.what}", "change the flag") from None


def _refuse_unsupported(command: Command) -> None:
    """Raise UserError for a flag that changes the numbers and is not supported."""
    for flag in command.flags:
        if flag not in REFUSED:
            continue
        if flag == "num-experts" and set(command.flags[flag]) <= {"1"}:
            continue
        if flag.endswith("parallel-size") and command.flags[flag] == ["1"]:
            continue
        command.refuse(flag, f"changes the numbers and is not supported: {REFUSED[flag]}",
                       "remove the flag, if the training may differ")  # fmt: skip


def _notes(command: Command) -> Iterator[str]:
    """Yield a comment for the data, and for the flags that are not taken."""
    paths = command.flags.get("data-path", [])
    if len(paths) == 1:
        folder = printable(paths[0].rpartition("/")[0] or ".")
        yield from _wrapped(
            f"--data-path: train with `lathe pretrain --recipe THIS_FILE --data {folder}`; the "
            "folder has the .bin and .idx files and those of the tokenizer."
        )
    elif paths:
        yield "# --data-path: join the weighted data sets with `lathe blend FOLDER=WEIGHT ...`."
    if "load" in command:
        yield from _wrapped(
            "--load: `lathe import-megatron` converts the checkpoint, and `lathe pretrain --init` "
            "starts from its weights."
        )
    for note in command.notes:
        yield from _wrapped(f"{note[:1].upper()}{note[1:]}.")
    others = {**{f"--{f}": CHANGES[f] for f in command.flags if f in CHANGES}}
    silent = [f"--{flag}" for flag in command.flags if flag in WITHOUT_EFFECT]
    known = TAKEN | CHANGES.keys() | WITHOUT_EFFECT | REFUSED.keys()
    for flag in command.flags:
        if flag not in known:
            others[f"--{flag}"] = "unknown to Lathe: check whether it changes the numbers"
    for key, why in (command.deepspeed.not_taken if command.deepspeed else {}).items():
        if why:
            others[f"{key} (DeepSpeed)"] = why
        else:
            silent.append(key)
    for flag, why in others.items():
        yield from _wrapped(f"Not taken: {printable(flag)}: {why}.")
    if silent:
        yield from _wrapped(f"Not taken, without effect on the numbers: {', '.join(silent)}.")


def _wrapped(text: str) -> Iterator[str]:
    line = "#"
    for word in text.split():
        if len(line) + len(word) > 98:
            yield line
            line = "#  "
        line += f" {word}"
    yield line


def _groups(settings: dict[str, Any], comments: dict[str, str]) -> Iterator[str]:
    """Yield the lines of nested YAML groups."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *groups, name = key.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    for group in ("Global", "Engine", "Data", "Model", "Optimizer", "Distributed"):
        if group in tree:
            yield f"\n{group}:"
            yield from _lines(tree[group], comments, f"{group}.", 1)


def _lines(tree: dict[str, Any], comments: dict[str, str], above: str, level: int) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{'  ' * level}{key}:"
            yield from _lines(value, comments, f"{above}{key}.", level + 1)
            continue
        comment = comments.get(f"{above}{key}")
        shown = value if isinstance(value, str) else repr(value).replace("None", "")
        text = f"{'  ' * level}{key}: {shown}".rstrip()
        yield f"{text} # {comment}" if comment else text
