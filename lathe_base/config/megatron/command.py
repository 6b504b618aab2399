"""The typed flags of `pretrain_gpt.py`, from text, shell scripts and `ds_config.json`."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from lathe_base.config.megatron.deepspeed import DeepSpeed, read_deepspeed
from lathe_base.config.megatron.flags import DEFAULTS, NUMBERS, SIZES, SWITCHES, WORDS
from lathe_base.config.megatron.shell import ASSIGNMENT, POSITIONAL, Variables, read_flags
from lathe_base.errors import UserError, printable
from lathe_base.inputs import read_text

MAX_BYTES = 1 << 20
HINT = "give the flags of pretrain_gpt.py as text, a script that contains them, or ds_config.json"
UNDECIDED = (
    "write the value into the file, give NAME=VALUE before it, or give as text the flags that the "
    "script passes"
)
FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


@dataclass
class Command:
    """Flags without dashes, underscores as dashes, and their values; the last of several counts.

    Attributes:
        source: where the flags are from, for messages.
        notes: what else the recipe's reader has to know.
    """

    source: str = "the flags"
    flags: dict[str, list[str]] = field(default_factory=dict)
    deepspeed: DeepSpeed | None = None
    variables: Variables = field(default_factory=Variables)
    notes: list[str] = field(default_factory=list)

    def __contains__(self, flag: str) -> bool:
        return flag in self.flags

    def refuse(self, flag: str, why: str, hint: str) -> NoReturn:
        """Raise UserError about a flag."""
        given = " ".join([f"--{flag}", *self.flags.get(flag, [])])
        raise UserError(f"{self.source}: {printable(given)}: {why}", hint)

    def word(self, flag: str) -> str | None:
        """The only value of a flag; None if it is not given."""
        values = self.flags.get(flag)
        if values is None:
            return None
        for value in values:
            if why := self.variables.why_unknown(value):
                raise UserError(f"{self.source}: --{flag}: {why}", UNDECIDED)
        if len(values) != 1:
            self.refuse(flag, f"has {len(values)} values", "give one")
        return values[0]

    def size(self, flag: str) -> int | None:
        """A whole number, 0 or more."""
        value = self.word(flag)
        if value is None:
            return None
        if not re.fullmatch(r"\d{1,18}(\.0*)?", value):
            self.refuse(flag, "not a whole number", "give a whole number")
        return int(value.partition(".")[0])

    def number(self, flag: str) -> float | None:
        """A finite number."""
        value = self.word(flag)
        try:
            found = None if value is None else float(value)
        except ValueError:
            self.refuse(flag, "not a number", "give a number")
        if found is not None and not abs(found) < float("inf"):
            self.refuse(flag, "not a finite number", "give a number")
        return found

    def required_size(self, flag: str) -> int:
        """A whole number, or Megatron's default.

        Raises:
            UserError: it is not given and has no default.
        """
        found = self.size(flag)
        return int(self._default(flag)) if found is None else found

    def required_number(self, flag: str) -> float:
        """A number, or Megatron's default; raises as `required_size` does."""
        found = self.number(flag)
        return self._default(flag) if found is None else found

    def _default(self, flag: str) -> float:
        if flag not in DEFAULTS:
            raise UserError(f"{self.source}: no --{flag}", "add it: it has no default")
        return DEFAULTS[flag]

    def check(self) -> None:
        """Raise UserError for a value of the wrong type."""
        for flag in SIZES:
            self.size(flag)
        for flag in NUMBERS:
            self.number(flag)
        for flag, supported in WORDS.items():
            if self.word(flag) not in (None, *supported):
                hint = f"only {' and '.join(supported)} is supported"
                self.refuse(flag, "changes the numbers and is not supported", hint)
        for flag in SWITCHES:
            if self.flags.get(flag):
                self.refuse(flag, "takes no value", "remove the value")


def read_command(sources: Sequence[str]) -> Command:
    """Read flags from texts and files; of a flag that is given twice the last one counts.

    Args:
        sources: flags as text, `NAME=VALUE` for variables of a script that follows, paths of shell
            scripts (never executed) or of a `ds_config.json`.

    Raises:
        UserError: no flags, a word that is no flag, or a file that cannot be read.
    """
    command = Command()
    for given in sources:
        path = Path(given)
        if not _is_file(path):
            _add_text(command, given)
            continue
        text = read_text(path, HINT, MAX_BYTES // 4)
        if text.lstrip().startswith("{"):
            command.deepspeed = read_deepspeed(path)
            continue
        if path.stat().st_size >= MAX_BYTES // 4:
            raise UserError(f"{path}: too long for a script", HINT)
        command.source = str(path)
        _add(command, read_flags(text, str(path), command.variables))
    if not command.flags:
        raise UserError(f"{printable(' '.join(sources), 100)}: no flags and no such file", HINT)
    named = command.flags.get("deepspeed-config", [])
    if command.deepspeed is None and len(named) == 1:
        beside = [Path(command.source).parent / named[0], Path(named[0])]
        path = next((path for path in beside if _is_file(path)), beside[-1])
        if _is_file(path):
            command.deepspeed = read_deepspeed(path)
        else:
            command.notes.append(
                f"{printable(named[0])} does not exist here: clipping, precision, loss scale and "
                "ZeRO stage are those of the flags; name the file too, if it has others"
            )
    command.check()
    return command


def _add_text(command: Command, text: str) -> None:
    found = ASSIGNMENT.fullmatch(text.strip())
    if found and not found[3].startswith("-") and " --" not in text:
        for word in text.split():
            name, _, value = word.partition("=")
            command.variables.pinned[name] = value
        return
    if "--" not in text:
        raise UserError(f"{printable(text, 100)}: no flags and no such file", HINT)
    _add(command, read_flags(text, command.source, command.variables))


def _add(command: Command, words: Sequence[str]) -> None:
    flag = ""
    for word in words:
        if found := FLAG.fullmatch(word):
            flag = found[1].replace("_", "-")
            command.flags[flag] = [] if found[2] is None else [found[2]]
        elif flag:
            command.flags[flag].append(word)
        elif POSITIONAL.fullmatch(word):
            command.notes.append(f"{word}, the arguments of the script, may add flags")
        else:
            if why := command.variables.why_unknown(word):
                raise UserError(f"{command.source}: {why}", UNDECIDED)
            raise UserError(f"{command.source}: {printable(word)} is not a flag", HINT)


def _is_file(path: Path) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:  # a NUL
        return False
