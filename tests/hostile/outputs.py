"""Output folders, combined with everything that may already exist there."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tests.hostile.case import Case, Check
from tests.hostile.commands import COMMANDS, Command
from tests.hostile.paths import LONG, NOT_UTF8, SLOW_TO_SUCCEED, case_needs

IN_PLACE = (
    *("pretrain", "prune", "quantize", "compress"),
    *("import-paddle", "export-paddle", "import-megatron"),
)
"""Verbs that write into an existing folder: with foreign files in it, they may continue or fail."""
MINE = '{"title": "mine", "files": {}}'
Make = Callable[[Path, Command], object]


@dataclass(frozen=True)
class Place:
    """State of the output `path` before the command, created by `make`; the rest as in `Case`."""

    path: str = "out"
    make: Make | None = None
    expect: Literal["refused", "works", "any"] = "refused"
    writes: tuple[str, ...] = ("out",)
    keeps: tuple[str, ...] = ()
    names: str = ""
    status: tuple[int, ...] = (2,)
    as_user: bool = False
    after: Check | None = None


def users_files(box: Path, command: Command) -> None:
    (box / "out" / "sub").mkdir(parents=True)
    (box / "out" / "thesis.txt").write_text("years of work\n")
    (box / "out" / "sub" / "photo.jpg").write_bytes(b"\xff\xd8 a child")
    _metadata(box / "out", command).write_text(MINE)


def users_metadata(box: Path, command: Command) -> None:
    (box / "out").mkdir()
    _metadata(box / "out", command).write_text(MINE)


def _metadata(folder: Path, command: Command) -> Path:
    return folder / (command.metadata if "." in command.metadata else "mine.json")


def thesis(box: Path, command: Command) -> None:
    (box / "out").mkdir()
    (box / "out" / "thesis.txt").write_text("years of work\n")


def earlier(box: Path, command: Command, at: str = "out") -> Path:
    shutil.copytree(box / command.earlier, box / at)
    return box / at


def link_below_a_file(box: Path, command: Command) -> None:
    (box / "plain.txt").write_text("mine\n")
    (box / "out").symlink_to("plain.txt/x")


def earlier_and_notes(box: Path, command: Command) -> None:
    (earlier(box, command) / "notes.txt").write_text("mine\n")


def earlier_and_folder(box: Path, command: Command) -> None:
    (earlier(box, command) / "mine").mkdir()
    (box / "out" / "mine" / "notes.txt").write_text("mine\n")


def earlier_and_edited(box: Path, command: Command) -> None:
    """An earlier output in which the user has edited a file."""
    files = sorted(p for p in earlier(box, command).rglob("*") if p.is_file())
    edited = next(p for p in files if p.name != command.metadata and p.suffix != ".pyc")
    with edited.open("ab") as file:
        file.write(b"and a line of mine\n")


def another_kind(box: Path, command: Command) -> None:
    shutil.copytree(box / _other(command), box / "out")


def _other(command: Command) -> str:
    return "dense-eval" if command.earlier not in ("dense-eval",) else "data"


def killed(box: Path, command: Command) -> None:
    """Leftovers of a killed attempt: its output without metadata files, or a hidden folder."""
    if command.verb in ("pretrain", "prune", "quantize"):
        for name in ("lathe.json", "model.safetensors", "config.json", "tokenizer.json"):
            (earlier(box, command) if name == "lathe.json" else box / "out").joinpath(name).unlink()
    else:
        (box / ".out.x1y2z3w4").mkdir()
        (box / ".out.x1y2z3w4" / "half").write_text("half")


def file(box: Path, command: Command) -> None:
    (box / "out").write_text("years of work\n")


def link(target: str) -> Make:
    return lambda box, command: (box / "out").symlink_to(target)


def link_to_folder(box: Path, command: Command) -> None:
    (box / "big").mkdir()
    link("big")(box, command)


def link_to_earlier(box: Path, command: Command) -> None:
    earlier(box, command, "big")
    link("big")(box, command)


def read_only(box: Path, command: Command) -> None:
    (box / "ro").mkdir(mode=0o555)


def read_only_folder(box: Path, command: Command) -> None:
    (box / "out").mkdir(mode=0o555)


def null(box: Path, command: Command) -> None:
    """A null device in the sandbox, so that the real one is safe."""
    os.mknod(box / "out", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def still_a_link(box: Path) -> str | None:
    return None if (box / "out").is_symlink() else "the link was replaced"


FOLDERS = {
    "users-files-and-a-metadata": Place(make=users_files, names="out"),
    "a-metadata-of-the-users": Place(make=users_metadata, names="out"),
    "users-files": Place(make=thesis, names="out"),
    "earlier-and-notes": Place(make=earlier_and_notes, names="notes.txt", keeps=("out/notes.txt",)),
    "earlier-and-folder": Place(make=earlier_and_folder, names="mine", keeps=("out/mine",)),
    "earlier-and-edited": Place(make=earlier_and_edited, names="out"),
    "another-kind": Place(make=another_kind, names="out"),
    "a-file": Place(make=file, names="out"),
    "below-a-file": Place("out/x/y", file, names="out"),
    "empty": Place(""),
    "here": Place("."),
    "above": Place(".."),
    "long": Place(LONG, names="xxx", status=(1, 2)),
    "below-long": Place(f"{LONG}/out", names="xxx", status=(1, 2)),
    "proc": Place("/proc/self/x", names="/proc/self/x", status=(1, 2)),
    "null": Place(make=null, names="out", status=(1, 2)),
    "fifo": Place(make=lambda box, command: os.mkfifo(box / "out"), names="out"),
    "link-loop": Place(make=link("out"), names="out", status=(1, 2)),
    "link-below-a-file": Place(make=link_below_a_file, names="out", status=(1, 2)),
    "read-only-parent": Place("ro/out", read_only, names="ro", status=(1, 2), as_user=True),
    "read-only": Place(make=read_only_folder, expect="any", status=(1, 2), as_user=True),
    "fresh": Place("a/b/c", expect="works", writes=("a",)),
    "empty-folder": Place(make=lambda box, command: (box / "out").mkdir(), expect="works"),
    "over-earlier": Place(make=earlier, expect="works"),
    "after-a-kill": Place(make=killed, expect="works", writes=("out", ".out.x1y2z3w4")),
    "link-to-folder": Place(
        make=link_to_folder, expect="works", writes=("big",), after=still_a_link
    ),
    "link-to-earlier": Place(
        make=link_to_earlier, expect="works", writes=("big",), after=still_a_link
    ),
    "dangling-link": Place(make=link("big"), expect="works", writes=("big",), after=still_a_link),
    "spaces": Place("two words ", expect="works", writes=("two words ",)),
    "newline": Place("two\nlines", expect="works", writes=("two\nlines",)),
    "unicode": Place("Größe-模型", expect="works", writes=("Größe-模型",)),
    "leading-dash": Place("-rf", expect="works", writes=("-rf",)),
    "not-utf8": Place(NOT_UTF8, expect="any", writes=(NOT_UTF8,)),
}
NAMES = ("spaces", "newline", "unicode", "leading-dash", "below-long")
NAMED = ("prepare", "pretrain", "evaluate", "export")
"""Verbs whose output is tested with unusual names, in place of all others."""
SLOW_ONES = ("fresh", "over-earlier", "link-to-folder")


def cases() -> Iterator[Case]:
    for command in COMMANDS.values():
        if command.output is None or "." in command.written:
            continue
        for name, place in FOLDERS.items():
            yield from _case(command, name, place)
        if command.verb != "bench-serve":
            yield from _nested(command)
            yield from _inside(command)


def _case(command: Command, name: str, place: Place) -> Iterator[Case]:
    if command.verb == "bench-serve" and (place.expect != "refused" or "earlier" in name):
        return  # no server is running
    if command.verb in SLOW_TO_SUCCEED and place.expect != "refused" and name not in SLOW_ONES:
        return
    if name in NAMES and command.verb not in NAMED:
        return
    expect = place.expect
    if command.verb in IN_PLACE and name in ("earlier-and-notes", "earlier-and-folder"):
        expect = "any"
    needed = (
        [command.earlier] if (place.make and "earlier" in name) or name == "after-a-kill" else []
    )
    yield Case(
        command.verb,
        "what is at the output",
        name,
        command.argv(**{"--output": place.path}),
        needs=case_needs(command, *needed, *([_other(command)] if name == "another-kind" else [])),
        make=(partial(_lay_out, place.make, command),) if place.make else (),
        expect=expect,
        status=place.status,
        names=place.names,
        writes=place.writes,
        keeps=place.keeps,
        as_user=place.as_user,
        after=place.after,
    )


def _lay_out(make: Make, command: Command, box: Path) -> None:
    make(box, command)


def _nested(command: Command) -> Iterator[Case]:
    """Outputs that are, contain or are contained in an input."""
    values = {**command.arguments, **command.options}
    for name, kind in command.inputs.items():
        if kind == "recipe" or name not in values:
            continue
        value, equals, weight = values[name].partition("=")
        is_file = "." in value
        options = {
            "is-input": (value, value, ()),
            "in-input": (value, f"{value}/new", ()),
            "holds-input": (f"out/{value}", "out", (partial(_moved, value),)),
        }
        for row, (given, output, make) in options.items():
            if is_file and row == "in-input":
                continue
            yield Case(
                command.verb,
                f"output and {name}",
                row,
                command.argv(**{name: given + equals + weight, "--output": output}),
                needs=case_needs(command),
                make=make,
            )


def _moved(value: str, box: Path) -> None:
    (box / "out").mkdir()
    (box / value).rename(box / "out" / value)


def _inside(command: Command) -> Iterator[Case]:
    """`--output .` with an earlier output as the working directory."""
    values = {**command.arguments, **command.options}
    absolute = {name: f"{{box}}/{values[name]}" for name in command.inputs if name in values}
    for name, make, expect in (
        ("here-in-earlier", earlier, "any"),
        ("here-in-earlier-and-notes", earlier_and_notes, "any"),
        ("here-with-a-metadata", users_files, "refused"),
    ):
        yield Case(
            command.verb,
            "what is at the output",
            name,
            command.argv(**absolute, **{"--output": "."}),
            needs=case_needs(command, command.earlier),
            make=(partial(_lay_out, make, command),),
            expect=expect,  # type: ignore[arg-type]
            writes=("out",),
            keeps=("out/notes.txt",),
            cwd="out",
        )
