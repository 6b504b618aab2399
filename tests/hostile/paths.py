"""Every input path, combined with every kind of unusual path."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tests.hostile.case import Case
from tests.hostile.commands import COMMANDS, FILES, FOREIGN, GOOD, Command

LONG = "x" * 300
NOT_UTF8 = os.fsdecode(b"caf\xe9")


@dataclass(frozen=True)
class Odd:
    """An unusual path; `make` creates it, called with the path and a valid artifact's."""

    path: str
    make: Callable[[Path, Path], object] | None = None
    expect: Literal["refused", "works", "any"] = "refused"
    names: str = ""
    of: Literal["both", "file", "folder"] = "both"


def copied(path: Path, good: Path) -> None:
    shutil.copytree(good, path) if good.is_dir() else shutil.copy(good, path)


def link_to(target: str) -> Callable[[Path, Path], None]:
    return lambda path, good: path.symlink_to(target)


ODD = {
    "missing": Odd("nope", names="nope"),
    "empty": Odd(""),
    "here": Odd("."),
    "above": Odd(".."),
    "root": Odd("/"),
    "a-file": Odd(
        "afile", lambda p, g: p.write_text("a file of mine\n"), names="afile", of="folder"
    ),
    "a-folder": Odd("afolder", lambda p, g: p.mkdir(), names="afolder", of="file"),
    "empty-folder": Odd("bare", lambda p, g: p.mkdir(), names="bare", of="folder"),
    "empty-file": Odd("zero", lambda p, g: p.touch(), names="zero", of="file"),
    "link": Odd("link", lambda p, g: p.symlink_to(g.name), "works"),
    "dangling-link": Odd("gone", link_to("nowhere"), names="gone"),
    "link-loop": Odd("loop", link_to("loop"), names="loop"),
    "spaces": Odd("two words ", copied, "works"),
    "newline": Odd("two\nlines", copied, "works"),
    "unicode": Odd("Größe-模型", copied, "works"),
    "leading-dash": Odd("-rf", copied, "works"),
    "long": Odd(LONG, names="xxx"),
    "not-utf8": Odd(NOT_UTF8, copied, "any"),
    "below-a-file": Odd("afile/x", lambda p, g: p.parent.write_text("mine\n"), names="afile"),
    "proc": Odd("/proc/self/x", names="/proc/self/x"),
    "null": Odd("/dev/null", names="/dev/null"),
    "fifo": Odd("pipe", lambda p, g: os.mkfifo(p), names="pipe"),
}
# Valid inputs: a corpus may be a folder with texts, a tokenizer the folder that contains it.
MEANT = {("corpus", odd) for odd in ("here", "above", "root")} | {("tokenizer", "here")}
OF_FIRST = ("here", "above", "root", "proc", "spaces", "newline", "unicode", "leading-dash")
OF_FIRST += ("not-utf8", "dangling-link", "link-loop", "below-a-file", "null")
"""Unusual paths that are only tested with a verb's first input."""
SLOW_TO_SUCCEED = ("compress", "deploy")


def cases() -> Iterator[Case]:
    for command in COMMANDS.values():
        for name, kind in command.inputs.items():
            for odd in ODD:
                yield from _case(command, name, kind, odd)
            yield from _wrong_kind(command, name, kind)


def _case(command: Command, name: str, kind: str, odd_name: str) -> Iterator[Case]:
    odd, values = ODD[odd_name], {**command.arguments, **command.options}
    is_file = kind in FILES
    if odd.of not in ("both", "file" if is_file else "folder") or (kind, odd_name) in MEANT:
        return
    if odd.expect != "refused" and command.verb in SLOW_TO_SUCCEED and odd_name != "link":
        return
    is_first = name == next(iter(command.inputs))
    if not is_first and odd_name in OF_FIRST:
        return
    if odd.expect != "refused" and command.verb in ("serve", "bench-serve", "release list"):
        return  # success requires a server
    if kind == "recipe" and not _stands_for_others(command, odd_name):
        return
    good = values.get(name, GOOD[kind]).partition("=")[0]
    make = (partial(_lay_out, odd, good),) if odd.make else ()
    yield Case(
        command.verb,
        f"{name} is an odd path",
        odd_name,
        command.argv(**{name: f"{odd.path}=1" if kind == "part" else odd.path}),
        needs=case_needs(command, good),
        make=make,
        expect=odd.expect,
        names=odd.names,
        writes=(command.written,) if command.written else (),
    )


def _stands_for_others(command: Command, odd_name: str) -> bool:
    """Select few verbs, since all read recipes with the same function; empty recipes are valid."""
    if odd_name == "empty-file":
        return False
    return command.verb in ("recipe", "plan", "pretrain", "gate") or odd_name == "missing"


def _lay_out(odd: Odd, good: str, box: Path) -> None:
    assert odd.make is not None
    odd.make(box / odd.path, box / good)


def _wrong_kind(command: Command, name: str, kind: str) -> Iterator[Case]:
    foreign = FOREIGN[kind]
    yield Case(
        command.verb,
        f"{name} is an odd path",
        "another-kind",
        command.argv(**{name: f"{foreign}=1" if kind == "part" else foreign}),
        needs=case_needs(command, GOOD[kind], foreign),
        names=foreign,
    )


def case_needs(command: Command, *more: str) -> tuple[str, ...]:
    """Artifacts that a case of this command needs, without duplicates."""
    return tuple(dict.fromkeys([*command.world(), *more]))
