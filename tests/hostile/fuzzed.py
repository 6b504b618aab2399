"""Builds cases from the fuzzer's draws, which are plain JSON so that they can be sent and rerun."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from tests.hostile.case import Case
from tests.hostile.commands import COMMANDS, Command
from tests.hostile.damaged_metadata import READ
from tests.hostile.paths import case_needs

Drawn = dict[str, Any]


def case(drawn: Drawn) -> Case:
    """Build a case.

    Args:
        drawn: `metadata` and `changes`, or `verb` with `options`, `settings` and the text of a
            `recipe`.
    """
    if "metadata" in drawn:
        metadata = drawn["metadata"]
        verb, argument = READ[metadata]
        artifact = metadata.split("/")[0]
        command, changes = COMMANDS[verb], {argument: artifact}
        make = (partial(_mutate, metadata, drawn["changes"]),)
    else:
        command, changes, make = COMMANDS[drawn["verb"]], drawn.get("options", {}), ()
        artifact = ""
        if "recipe" in drawn:
            make = (partial(_write, drawn["recipe"]),)
            changes = {("name" if command.verb == "recipe" else "--recipe"): "mine.yaml"}
    first, *rest = command.argv(**changes)
    settings = [part for value in drawn.get("settings", []) for part in ("-o", value)]
    return Case(
        command.verb,
        "fuzzed",
        json.dumps(drawn),
        (first, *settings, *rest),
        needs=case_needs(command, *([artifact] if artifact else [])),
        make=make,
        expect="any",
        status=(1, 2),
        writes=_written(command, changes),
    )


def _written(command: Command, changes: dict[str, str]) -> tuple[str, ...]:
    written = changes.get("--output", command.written)
    return (written.split("/")[0],) if written else ()


def _write(text: str, box: Path) -> None:
    (box / "mine.yaml").write_bytes(text.encode(errors="surrogatepass"))


def _mutate(metadata: str, changes: list[tuple[list[int], str, Any]], box: Path) -> None:
    values: Any = json.loads((box / metadata).read_text())
    for way, how, value in changes:
        values = _changed(values, way, how, value)
    (box / metadata).write_text(json.dumps(values))


def _changed(values: Any, way: list[int], how: str, value: Any) -> Any:
    """Change a nested value; `way` has an index of a key or item per depth, modulo their number."""
    if not way or not isinstance(values, dict | list) or not values:
        return value
    keys = list(values) if isinstance(values, dict) else list(range(len(values)))
    key = keys[way[0] % len(keys)]
    if len(way) == 1 and how == "remove":
        del values[key]
    elif len(way) == 1 and how == "add":
        if isinstance(values, dict):
            values["more"] = value
        else:
            values.append(value)
    else:
        values[key] = _changed(values[key], way[1:], how, value)
    return values
