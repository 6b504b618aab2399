"""Reads the flags of a training command from a shell script, which is never executed.

Only what can be read without a shell is understood: line continuations, quotes, comments, arrays
and variables that the file assigns plainly. A variable that has several values in the file, as in
the branches of an `if`, or that only a running shell knows, stays as it is written, and is an error
when a flag that matters needs it.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from lathe_base.errors import Code, UserError, printable

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[\d*\])?(\+?)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?\}|([A-Za-z_]\w*))")
QUOTED_OR_COMMENT = re.compile(
    r"""(\\.|"(?:\\.|[^"\\])*"|'[^']*')|(?:^|(?<=[\s;]))\#[^\n]*""", re.MULTILINE | re.DOTALL
)
COMMAND_OUTPUT = (r"\$\(\([^()]*\)\)", r"\$\([^()]*\)", r"`[^`]*`")
UNKNOWN_OUTPUT = "$(command)"
HIDDEN_OUTPUT = "\x01"  # stands for it while parentheses have a meaning
NESTING = {
    **dict.fromkeys(("if", "case", "for", "while", "until"), 1),
    **dict.fromkeys(("fi", "esac", "done"), -1),
}
OPERATORS = ";|&()<>\n"
REDIRECTED = re.compile(r"(?<=\s)\d+(?=[<>])")  # the 2 of `2>&1`, which is no argument
SCRIPT = re.compile(r"pretrain_(\w+)\.py")
MAX_EXPANSIONS = 8
MAX_CHARACTERS = 1 << 18  # of one expansion: variables that double each other would fill the memory
POSITIONAL = re.compile(r"\$(?:[@*\d]|\{[@*\d]\})")


@dataclass
class Variables:
    """Values that a script assigns, by name.

    Attributes:
        pinned: values given on the command line, which win over every other.
        assigned: the different values in the script.
        depth: number of `if`, `case` and loops around the current line.
    """

    pinned: dict[str, str] = field(default_factory=dict)
    assigned: dict[str, list[str]] = field(default_factory=dict)
    depth: int = 0

    def assign(self, name: str, value: str, appends: bool = False) -> None:
        """Record an assignment, `NAME=value`, `NAME+=value` or `NAME="$NAME more"`.

        The latter two change the value; in a branch, which may not be taken, they add another one.
        """
        values = self.assigned.setdefault(name, [])
        self_reference = re.compile(rf"\$(?:{name}\b|\{{{name}\}})")
        if appends or self_reference.search(value):
            before = values or [""]
            if sum(map(len, before)) > MAX_CHARACTERS:
                return
            if appends:
                joined = [f"{old} {value}" for old in before]
            else:  # split and join rather than sub, which reads backslashes in the replacement
                joined = [old.join(self_reference.split(value)) for old in before]
            if self.depth == 0:
                values[:] = joined
                return
            value = joined[-1]
        if value not in values:
            values.append(value)

    def value(self, name: str) -> str | None:
        """The only value of a variable; None if there is none, or several."""
        if name in self.pinned:
            return self.pinned[name]
        values = self.assigned.get(name, [])
        return values[0] if len(values) == 1 else None

    def expand(self, word: str) -> list[str]:
        """A word with the values of its variables; a value may have several words."""
        given = word
        for _ in range(MAX_EXPANSIONS):
            values = [self._replacement(match) for match in VARIABLE.finditer(word)]
            if len(word) + sum(map(len, values)) > MAX_CHARACTERS:
                break
            expanded = VARIABLE.sub(self._replacement, word)
            if expanded == word:
                break
            word = expanded
        return [word] if word == given else word.split()

    def _replacement(self, match: re.Match[str]) -> str:
        value = self.value(match[1] or match[2])
        return match[0] if value is None else value

    def why_unknown(self, text: str) -> str | None:
        """Why a value still has a variable in it; None if it has none."""
        if UNKNOWN_OUTPUT in text:
            return "the value is the output of a command, which is not executed"
        if POSITIONAL.search(text):
            return "the value is an argument of the script"
        variable = VARIABLE.search(text)
        if not variable:
            return "the value cannot be read without a shell" if "$" in text else None
        name = variable[1] or variable[2]
        values = self.assigned.get(name, [])
        if not values:
            return f"${name} is not assigned in the file"
        shown = printable(", ".join(" ".join(value.split()) for value in values), 80)
        return f"${name} has several values in the file: {shown}"


def read_flags(text: str, source: str, variables: Variables) -> list[str]:
    """The words after `pretrain_gpt.py`, or after the first flag if no script is named.

    Raises:
        UserError: quotes that do not end, several different commands, or another script.
    """
    commands = [
        [part for word in command for part in variables.expand(word)]
        for command in _commands(text, source, variables)
    ]
    flags = []
    for command in commands:
        for i, word in enumerate(command):
            if not (script := SCRIPT.fullmatch(PurePath(word).name)):
                continue
            if not script[1].startswith("gpt"):
                what = f"{source}: {printable(word)} trains another kind of model"
                raise UserError(what, "give the flags of pretrain_gpt.py", Code.WRONG_KIND)
            if command[i + 1 :] not in flags:
                flags.append(command[i + 1 :])
    if len(flags) > 1:
        what = f"{source}: contains {len(flags)} different pretrain_gpt.py commands"
        raise UserError(what, "give a file with one of them, or its flags as text", Code.AMBIGUOUS)
    if flags:
        return flags[0]
    words = [word for command in commands for word in command]
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return words[first:]


def _commands(text: str, source: str, variables: Variables) -> Iterator[list[str]]:
    """Yield the words of each command, and record assignments."""
    words: list[str] = []
    array: tuple[str, bool, list[str]] | None = None
    ended = False  # by a redirection: what follows is a file
    for token in _tokens(text, source):
        if array is not None:
            if token == ")":
                variables.assign(array[0], " ".join(array[2]), array[1])
                array = None
            elif token != "\n":
                array[2].append(token)
        elif _is_operator(token):
            opened = ASSIGNMENT.fullmatch(words[-1]) if words and token == "(" else None
            if opened and not opened[3]:
                array = opened[1], bool(opened[2]), []
                words.pop()
            elif "<" in token or ">" in token:
                ended = True
            else:
                yield from _command(words, variables)
                words, ended = [], False
        elif not ended:
            words.append(token)
    yield from _command(words, variables)


def _command(words: Sequence[str], variables: Variables) -> Iterator[list[str]]:
    """The command without the assignments before it, which are recorded."""
    rest = list(words)
    while rest and rest[0] in ("export", "local", "declare", "readonly", "then", "else", "do"):
        rest.pop(0)
    if rest:
        variables.depth = max(0, variables.depth + NESTING.get(rest[0], 0))
    while rest and (assignment := ASSIGNMENT.fullmatch(rest[0])):
        variables.assign(assignment[1], assignment[3], bool(assignment[2]))
        rest.pop(0)
    if rest:
        yield rest


def _tokens(text: str, source: str) -> list[str]:
    """Words and operators; the end of a line is an operator."""
    text = re.sub(r"\\\r?\n", " ", text.replace("\r\n", "\n"))
    text = REDIRECTED.sub("", QUOTED_OR_COMMENT.sub(lambda found: found[1] or "", text))
    for pattern in COMMAND_OUTPUT:
        text = re.sub(pattern, HIDDEN_OUTPUT, text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        what = f"{source}: cannot be read as a shell script: a quote does not end"
        raise UserError(what, "give only the flags, as text or in a file", Code.MALFORMED) from None
    found = []
    for token in tokens:
        # `)` and the end of a line come as one token, which an array must not swallow.
        is_operator = _is_operator(token)
        found += list(token) if is_operator else [token.replace(HIDDEN_OUTPUT, UNKNOWN_OUTPUT)]
    return found


def _is_operator(token: str) -> bool:
    return bool(token) and set(token) <= set(OPERATORS)
