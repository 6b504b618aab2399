"""Outputs that are single files, combined with everything that may already exist there."""

import os
import shutil
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.hostile.case import Case
from tests.hostile.commands import COMMANDS, Command
from tests.hostile.outputs import Place
from tests.hostile.paths import LONG, NOT_UTF8, case_needs

PAGE = "<html><body>my own page</body></html>\n"
JSON = '{"verdict": "mine", "title": "thesis"}\n'


def users_file(box: Path, command: Command) -> None:
    (box / command.written).write_text(PAGE if command.written.endswith("html") else JSON)


def empty_file(box: Path, command: Command) -> None:
    (box / command.written).touch()


def earlier(box: Path, command: Command) -> None:
    shutil.copy(box / command.earlier, box / command.written)


def other_earlier(box: Path, command: Command) -> None:
    other = "gate.json" if command.verb == "report" else "report.html"
    shutil.copy(box / other, box / command.written)


def folder(box: Path, command: Command) -> None:
    (box / command.written).mkdir()
    (box / command.written / "thesis.txt").write_text("years of work\n")


def link_to_users_file(box: Path, command: Command) -> None:
    (box / "mine").write_text("years of work\n")
    (box / command.written).symlink_to("mine")


def null(box: Path, command: Command) -> None:
    os.mknod(box / command.written, stat.S_IFCHR | 0o666, os.makedev(1, 3))


def fifo(box: Path, command: Command) -> None:
    os.mkfifo(box / command.written)


def link_loop(box: Path, command: Command) -> None:
    (box / command.written).symlink_to(command.written)


def a_file(box: Path, command: Command) -> None:
    (box / "afile").write_text("mine\n")


def read_only(box: Path, command: Command) -> None:
    (box / "ro").mkdir(mode=0o555)


PLACES = {
    "users-file": Place("", users_file, names="{out}"),
    "users-empty-file": Place("", empty_file, "any"),
    "over-earlier": Place("", earlier, "works"),
    "another-kind": Place("", other_earlier, names="{out}"),
    "a-folder": Place("", folder, names="{out}"),
    "link-to-users-file": Place("", link_to_users_file, names="{out}"),
    "null": Place("", null, names="{out}", status=(1, 2)),
    "fifo": Place("", fifo, names="{out}"),
    "link-loop": Place("", link_loop, names="{out}", status=(1, 2)),
    "empty": Place("{empty}"),
    "here": Place("."),
    "above": Place(".."),
    "below-a-file": Place("afile/x.json", a_file, names="afile", status=(1, 2)),
    "long": Place(LONG, names="xxx", status=(1, 2)),
    "proc": Place("/proc/self/x", names="/proc/self/x", status=(1, 2)),
    "read-only-parent": Place("ro/x.json", read_only, names="ro", status=(1, 2), as_user=True),
    "fresh": Place("a/b/c.x", expect="works", writes=("a",)),
    "spaces": Place("two words ", expect="works", writes=("two words ",)),
    "newline": Place("two\nlines", expect="works", writes=("two\nlines",)),
    "unicode": Place("Größe-模型", expect="works", writes=("Größe-模型",)),
    "not-utf8": Place(NOT_UTF8, expect="any", writes=(NOT_UTF8,)),
    "in-an-input": Place("{input}/new.json", names="{input}"),
    "a-file-of-an-input": Place("{input}/{file}", names="{input}"),
    "an-input": Place("{input}", names="{input}"),
    "a-recipe": Place("small.yaml", names="small.yaml"),
}
OF = {
    "gate": {"{input}": "dense-eval", "{file}": "metrics.json"},
    "report": {"{input}": "dense", "{file}": "model.safetensors"},
}


def cases() -> Iterator[Case]:
    for verb, words in OF.items():
        command = COMMANDS[verb]
        given = words | {"{out}": command.written, "{empty}": ""}
        for name, place in PLACES.items():
            path = _filled(place.path, given) if place.path else command.written
            needed = ("gate.json", "report.html") if place.make in (earlier, other_earlier) else ()
            yield Case(
                verb,
                "what is at the output file",
                name,
                command.argv(**{"--output": path}),
                needs=case_needs(command, *needed),
                make=(partial(_lay_out, place, command),) if place.make else (),
                expect=place.expect,
                status=place.status,
                names=_filled(place.names, given),
                writes=(command.written,) if place.writes == ("out",) else place.writes,
                as_user=place.as_user,
            )


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def _lay_out(place: Place, command: Command, box: Path) -> None:
    assert place.make is not None
    place.make(box, command)
