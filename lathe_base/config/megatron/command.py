"""The typed flags of `pretrain_gpt.py`, from text, shell scripts and `ds_config.json`.

A script is never executed. Only what can be read without a shell is understood: line continuations,
quotes, comments, arrays and variables that the file assigns plainly. A variable that has several
values in the file, as in the branches of an `if`, or that only a running shell knows, stays as it
is written, and is an error when a flag that matters needs it.
"""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NoReturn

from lathe_base.config.megatron.flags import DEFAULTS, NUMBERS, SIZES, SWITCHES, WORDS
from lathe_base.config.text import Mistake, parse
from lathe_base.errors import Code, UserError, printable
from lathe_base.inputs import read_text

# --- a shell script ---
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
        original = word
        # A value may have variables itself, and the same one again: so rounds and length are
        # limited, and what is not expanded by then counts as unknown.
        for _ in range(MAX_EXPANSIONS):
            values = [self._replacement(match) for match in VARIABLE.finditer(word)]
            if len(word) + sum(map(len, values)) > MAX_CHARACTERS:
                break
            expanded = VARIABLE.sub(self._replacement, word)
            if expanded == word:
                break
            word = expanded
        return [word] if word == original else word.split()

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
    # No script is named: the text is the flags alone, perhaps after the name of another program.
    words = [word for command in commands for word in command]
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return words[first:]


def _commands(text: str, source: str, variables: Variables) -> Iterator[list[str]]:
    """Yield the words of each command, and record assignments."""
    words: list[str] = []
    array: tuple[str, bool, list[str]] | None = None
    ended = False  # by a redirection: what follows is a file
    # A word that ends in `=`, followed by a parenthesis, begins an array: NAME=( WORD ... ).
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
    # Join continued lines; remove comments, and the number before a redirection, which is not an
    # argument. The output of a command becomes one word, whatever is in its parentheses.
    text = re.sub(r"\\\r?\n", " ", text.replace("\r\n", "\n"))
    text = REDIRECTED.sub("", QUOTED_OR_COMMENT.sub(lambda match: match[1] or "", text))
    for pattern in COMMAND_OUTPUT:
        text = re.sub(pattern, HIDDEN_OUTPUT, text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        what = f"{source}: cannot be read as a shell script: a quote does not end"
        raise UserError(what, "give only the flags, as text or in a file", Code.MALFORMED) from None
    split = []
    for token in tokens:
        # `)` and the end of a line come as one token, which an array must not swallow.
        is_operator = _is_operator(token)
        split += list(token) if is_operator else [token.replace(HIDDEN_OUTPUT, UNKNOWN_OUTPUT)]
    return split


def _is_operator(token: str) -> bool:
    return bool(token) and set(token) <= set(OPERATORS)


# --- ds_config.json ---
MAX_NUMBER = 2**63
DEEPSPEED_HINT = "give the JSON file of --deepspeed_config"
REFUSED = {
    "curriculum_learning": "sequences that grow during training are not supported",
    "data_efficiency": "data that changes with the step is not supported",
    "compression_training": "compress with lathe prune and lathe quantize instead",
    "quantize_training": "quantize with lathe quantize instead",
    "progressive_layer_drop": "dropping layers is not supported",
    "sparse_attention": "sparse attention is not supported",
    "amp": "Apex's mixed precision is not supported: use fp16 or bf16",
}
OVERRIDDEN = {
    "optimizer": "Megatron passes its own optimizer",
    "scheduler": "Megatron passes its own schedule",
}
TAKEN = frozenset(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        *("gradient_clipping", "fp16", "bf16", "bfloat16", "zero_optimization"),
    )
)
WITHOUT_EFFECT = frozenset(
    (
        *("steps_per_print", "wall_clock_breakdown", "prescale_gradients", "dump_state"),
        *("gradient_predivide_factor", "activation_checkpointing", "comms_logger", "aio"),
        *("flops_profiler", "tensorboard", "wandb", "csv_monitor", "memory_breakdown"),
        *("communication_data_type", "zero_allow_untested_optimizer", "checkpoint"),
        *("zero_force_ds_cpu_optimizer", "sparse_gradients", "elasticity", "autotuning"),
        *("monitor_config", "disable_allgather", "fp32_allreduce", "pipeline"),
    )
)
"""Keys of a DeepSpeed configuration."""


@dataclass(frozen=True)
class DeepSpeed:
    """The settings of a `ds_config.json` that matter to a recipe; None: not stated.

    Attributes:
        file: its path, for messages.
        clip: maximum gradient norm; 0 does not clip, which is DeepSpeed's default.
        dtype: float16, bfloat16 or float32.
        scale: static loss scale; 0 is dynamic,
        initial_power: and starts at two to this power.
        not_taken: other keys, with what is done about them.
    """

    file: str
    total: int | None
    micro: int | None
    accumulate: int | None
    clip: float
    dtype: str
    scale: float
    initial_power: int
    window: int
    hysteresis: int
    min_scale: float
    stage: int
    offload: bool
    not_taken: dict[str, str]


def read_deepspeed(path: Path) -> DeepSpeed:
    """Read a DeepSpeed configuration.

    Raises:
        UserError: not a JSON object, a value of another type, or a feature that changes the numbers
            and is not supported.
    """
    file = str(path)
    try:
        values, _ = parse(read_text(path, DEEPSPEED_HINT).encode())  # JSON is YAML
    except Mistake as mistake:
        raise UserError(
            f"{file}: not JSON: {mistake.reason}", DEEPSPEED_HINT, Code.MALFORMED
        ) from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: not a JSON object", DEEPSPEED_HINT, Code.MALFORMED)
    for key, why in REFUSED.items():
        feature = values.get(key)
        if isinstance(feature, dict):  # a group without a switch is on
            feature = feature.get("enabled", bool(feature))
        if feature:
            raise UserError(
                f"{file}: {key} changes the numbers: {why}", f"remove {key}", Code.UNSUPPORTED
            )
    read = _DeepSpeedGroup(file, values)
    half = read.group("fp16")
    if half.values.get("consecutive_hysteresis"):
        what = f"{file}: fp16.consecutive_hysteresis is not supported"
        raise UserError(
            what, "remove it: hysteresis then counts from one growth to the next", Code.UNSUPPORTED
        )
    brain = read.group("bf16" if "bf16" in values else "bfloat16")
    zero = read.group("zero_optimization")
    dtypes = [
        name
        for name, group in (("float16", half), ("bfloat16", brain))
        if group.values.get("enabled") is True
    ]
    if len(dtypes) > 1:
        raise UserError(
            f"{file}: enables fp16 and bf16", "disable one of them", Code.CONFLICTING_OPTIONS
        )
    offloaded = zero.values.get("offload_optimizer", {})
    return DeepSpeed(
        file=file,
        total=read.optional("train_batch_size"),
        micro=read.optional("train_micro_batch_size_per_gpu"),
        accumulate=read.optional("gradient_accumulation_steps"),
        clip=read.number("gradient_clipping", 0.0),
        dtype=dtypes[0] if dtypes else "float32",
        scale=half.number("loss_scale", 0.0),
        initial_power=min(int(half.number("initial_scale_power", 16)), 1000),
        window=int(half.number("loss_scale_window", 1000)),
        hysteresis=int(half.number("hysteresis", 2)),
        min_scale=half.number("min_loss_scale", 1.0),
        stage=int(zero.number("stage", 0)),
        offload=zero.values.get("cpu_offload") is True
        or (isinstance(offloaded, dict) and offloaded.get("device") == "cpu"),
        not_taken={
            **{key: why for key, why in OVERRIDDEN.items() if key in values},
            **{key: "" for key in values if key in WITHOUT_EFFECT},
            **{
                printable(key): "unknown to Lathe: check whether it changes the numbers"
                for key in values.keys() - TAKEN - WITHOUT_EFFECT - OVERRIDDEN.keys()
                if key not in REFUSED
            },
        },
    )


@dataclass(frozen=True)
class _DeepSpeedGroup:
    """A group of the configuration, with checks."""

    file: str
    values: dict[str, Any]
    above: str = ""

    def group(self, key: str) -> "_DeepSpeedGroup":
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise UserError(
                f"{self.file}: {key} is not an object", DEEPSPEED_HINT, Code.INVALID_VALUE
            )
        return _DeepSpeedGroup(self.file, value, f"{key}.")

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= MAX_NUMBER:
            what = (
                f"{self.file}: {self.above}{key} is {printable(value, 60)}, not a number from 0 on"
            )
            raise UserError(what, "give a number", Code.INVALID_VALUE)
        return float(value)

    def optional(self, key: str) -> int | None:
        return int(self.number(key, 0)) or None if self.values.get(key) != "auto" else None


# --- flags ---
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

    def refuse(self, flag: str, why: str, hint: str, code: Code) -> NoReturn:
        """Raise UserError about a flag."""
        text = " ".join([f"--{flag}", *self.flags.get(flag, [])])
        raise UserError(f"{self.source}: {printable(text)}: {why}", hint, code)

    def word(self, flag: str) -> str | None:
        """The only value of a flag; None if it is not given."""
        values = self.flags.get(flag)
        if values is None:
            return None
        # Only now that the value is needed: other flags may have any.
        for value in values:
            if why := self.variables.why_unknown(value):
                raise UserError(f"{self.source}: --{flag}: {why}", UNDECIDED, Code.INCOMPLETE)
        if len(values) != 1:
            self.refuse(flag, f"has {len(values)} values", "give one", Code.INVALID_VALUE)
        return values[0]

    def size(self, flag: str) -> int | None:
        """A whole number, 0 or more."""
        value = self.word(flag)
        if value is None:
            return None
        if not re.fullmatch(r"\d{1,18}(\.0*)?", value):
            self.refuse(flag, "not a whole number", "give a whole number", Code.INVALID_VALUE)
        return int(value.partition(".")[0])

    def number(self, flag: str) -> float | None:
        """A finite number."""
        value = self.word(flag)
        try:
            parsed = None if value is None else float(value)
        except ValueError:
            self.refuse(flag, "not a number", "give a number", Code.INVALID_VALUE)
        if parsed is not None and not abs(parsed) < float("inf"):
            self.refuse(flag, "not a finite number", "give a number", Code.INVALID_VALUE)
        return parsed

    def required_size(self, flag: str) -> int:
        """A whole number, or Megatron's default.

        Raises:
            UserError: it is not given and has no default.
        """
        size = self.size(flag)
        return int(self._default(flag)) if size is None else size

    def required_number(self, flag: str) -> float:
        """A number, or Megatron's default; raises as `required_size` does."""
        number = self.number(flag)
        return self._default(flag) if number is None else number

    def _default(self, flag: str) -> float:
        if flag not in DEFAULTS:
            raise UserError(
                f"{self.source}: no --{flag}", "add it: it has no default", Code.MISSING_OPTION
            )
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
                self.refuse(
                    flag, "changes the numbers and is not supported", hint, Code.UNSUPPORTED
                )
        for flag in SWITCHES:
            if self.flags.get(flag):
                self.refuse(flag, "takes no value", "remove the value", Code.INVALID_VALUE)


def read_command(sources: Sequence[str]) -> Command:
    """Read flags from texts and files; of a flag that is given twice the last one counts.

    Args:
        sources: flags as text, `NAME=VALUE` for variables of a script that follows, paths of shell
            scripts (never executed) or of a `ds_config.json`.

    Raises:
        UserError: no flags, a word that is no flag, or a file that cannot be read.
    """
    command = Command()
    for source in sources:
        path = Path(source)
        if not _is_file(path):
            # NAME=VALUE for the script that follows, or flags as text.
            assignment = ASSIGNMENT.fullmatch(source.strip())
            if assignment and not assignment[3].startswith("-") and " --" not in source:
                for word in source.split():
                    name, _, value = word.partition("=")
                    command.variables.pinned[name] = value
            elif "--" not in source:
                raise UserError(
                    f"{printable(source, 100)}: no flags and no such file", HINT, Code.NOT_FOUND
                )
            else:
                _add(command, read_flags(source, command.source, command.variables))
            continue
        text = read_text(path, HINT, MAX_BYTES // 4)
        if text.lstrip().startswith("{"):
            command.deepspeed = read_deepspeed(path)
            continue
        if path.stat().st_size >= MAX_BYTES // 4:
            raise UserError(f"{path}: too long for a script", HINT, Code.TOO_LARGE)
        command.source = str(path)
        _add(command, read_flags(text, str(path), command.variables))
    if not command.flags:
        raise UserError(
            f"{printable(' '.join(sources), 100)}: no flags and no such file", HINT, Code.NOT_FOUND
        )
    # The configuration that the flags name, relative to the script or to the working directory.
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


def _add(command: Command, words: Sequence[str]) -> None:
    flag = ""
    for word in words:
        if flag_match := FLAG.fullmatch(word):
            flag = flag_match[1].replace("_", "-")
            command.flags[flag] = [] if flag_match[2] is None else [flag_match[2]]
        elif flag:
            command.flags[flag].append(word)
        elif POSITIONAL.fullmatch(word):
            command.notes.append(f"{word}, the arguments of the script, may add flags")
        else:
            if why := command.variables.why_unknown(word):
                raise UserError(f"{command.source}: {why}", UNDECIDED, Code.INCOMPLETE)
            raise UserError(
                f"{command.source}: {printable(word)} is not a flag", HINT, Code.MALFORMED
            )


def _is_file(path: Path) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:  # a NUL
        return False
