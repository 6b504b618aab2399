"""Exceptions that end a command with a message and no traceback, each with its code and its exit
status."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Self


class Code(StrEnum):
    """The kinds of errors: a stable name to search, count or alert on, and what it means."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    # Files and folders
    NOT_FOUND = "not-found", "Something that was named does not exist: a file, a model, a run."
    EXISTS = "exists", "Something is in the way of an output, and is not replaced."
    CHANGED = "changed", "It was changed by something else while it was read or written."
    IN_USE = "in-use", "A file, a folder or a port is in use by another process or run."
    PERMISSION = "permission", "The operating system refuses access to a path."
    BAD_PATH = "bad-path", "A path or an address that cannot be used: too long, a loop, a scheme."
    NO_SPACE = "no-space", "The disk or the quota is full."
    SYSTEM_LIMIT = "system-limit", "A limit of the operating system, such as open files."
    IO = "io", "Reading or writing failed for another reason, such as a failing disk."

    # What files hold
    MALFORMED = "malformed", "A file cannot be parsed as its format: JSON, YAML, GGUF, a tokenizer."
    CORRUPT = "corrupt", "Bytes are damaged: they do not match their digest, or are cut off."
    INCOMPLETE = "incomplete", "Something lacks parts: files, tensors, fields."
    WRONG_KIND = "wrong-kind", "A file, folder or artifact is of another kind than the one needed."
    WRONG_VERSION = "wrong-version", "It was written by another version, or needs one."
    WRONG_TOKENIZER = "wrong-tokenizer", "Tokens or models are of different tokenizers."
    MISMATCH = "mismatch", "Two inputs disagree: shapes, digests, settings of two artifacts."
    STATE_MISMATCH = "state-mismatch", "A saved state is of a run with other settings or inputs."
    TOO_LITTLE_DATA = "too-little-data", "There is not enough text, or not enough examples."
    TOO_LARGE = "too-large", "Something exceeds a limit of size or number."
    UNSUPPORTED = "unsupported", "A format, family or feature that Lathe or an engine cannot do."

    # Settings and options
    UNKNOWN_KEY = "unknown-key", "A setting, field or flag that does not exist."
    UNKNOWN_NAME = "unknown-name", "A name that is not one of the choices: a recipe, a criterion."
    INVALID_VALUE = "invalid-value", "A value of the wrong type, or outside its range."
    CIRCULAR = "circular", "Settings or files refer back to themselves."
    AMBIGUOUS = "ambiguous", "A name, a folder or a file has several matches, and one is needed."
    CONFLICTING_OPTIONS = "conflicting-options", "Options or settings that exclude each other."
    MISSING_OPTION = "missing-option", "An option, setting or variable is required here."
    LAYOUT = "layout", "Processes, parallel degrees, batches and the model do not fit together."
    DUPLICATE = "duplicate", "The same thing is given, or stored, twice."

    # Results
    NOT_FINITE = "not-finite", "A loss, a weight or a metric is NaN or infinite."
    NOT_PROVED = (
        "not-proved",
        "An export, a server or a resumed run is not shown to do what it must.",
    )
    GATE = "gate", "A model or a release fails its gate or tests, or no model meets the goal."

    # Machines
    OUT_OF_MEMORY = "out-of-memory", "A process needs, or has used, more memory than there is."
    NO_GPU = "no-gpu", "A GPU is needed and there is none that can be used."
    NO_ROOM = "no-room", "The cluster has no free nodes, GPUs or quota."
    NOT_INSTALLED = "not-installed", "A package, program or cluster component is missing."
    KILLED = "killed", "A process was ended by a signal."
    PREEMPTED = "preempted", "The run was asked to stop and has saved its state."
    FAILED = "failed", "A process, step or run failed; the message has its last lines."

    # Servers
    UNREACHABLE = "unreachable", "A server does not answer."
    TIMEOUT = "timeout", "Something was waited for, and did not happen in time."
    BUSY = "busy", "A server is full for the moment, or has reached a rate limit."
    UNAUTHORIZED = "unauthorized", "Credentials are missing, invalid or expired."
    FORBIDDEN = "forbidden", "The server refuses these credentials what was asked."
    SERVER_ERROR = "server-error", "A server failed, or answered outside of its protocol."
    NOT_RUNNING = "not-running", "What was addressed is not running, or has ended."
    INVALID_REQUEST = "invalid-request", "The server's or Lathe's API rejects a request."
    TOO_LONG = "too-long", "A prompt, sample or answer does not fit into the context."

    # Trust
    UNTRUSTED = "untrusted", "A signature or an attestation is missing, invalid or not trusted."
    UNSAFE = "unsafe", "Loading it could run code, or would write outside of its folder."


def parse_code(value: str, default: Code) -> Code:
    """The code with this value; `default` for one that this version does not know."""
    try:
        return Code(value)
    except ValueError:
        return default


SECRETS = re.compile(
    r"(?<=://)[^/\s@]+(?=@)"
    r"|(?<=[?&])((?:x-(?:amz|goog)-\w[\w-]*|\w*(?:token|signature|secret|password|key)|sig)=)[^&\s'\"]+",
    re.IGNORECASE,
)
"""A user and a password in an address, and the query of a signed one."""


def without_secrets(text: str) -> str:
    """A message, with `***` for what an address has of secrets."""
    return SECRETS.sub(lambda match: f"{match[1] or ''}***", text)


class UserError(Exception):
    """A mistake in what the user gave; the message names the thing, its value and a hint.

    The command line prints it and exits with status 2.
    """

    status = 2

    def __init__(self, what: str, hint: str, code: Code) -> None:
        # Here, where every message passes: it may be logged, reported or sent to another process.
        what, hint = without_secrets(what), without_secrets(hint)
        super().__init__(f"{what}\n  hint: {hint}")
        self.what = what
        self.hint = hint
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        # Or unpickling would call `__init__` with the message alone.
        return Exception.__new__, (type(self), *self.args), self.__dict__

    @property
    def line(self) -> str:
        """Both in one line."""
        return f"{self.what}; {self.hint}"


class Unavailable(UserError):
    """A server that was waited for has not answered; the same command may succeed later.

    Status 69 is sysexits.h's EX_UNAVAILABLE. A step or a worker that ends with it is started again.
    """

    status = 69

    def __init__(self, what: str, hint: str, code: Code = Code.UNREACHABLE) -> None:
        super().__init__(what, hint, code)


class StageError(RuntimeError):
    """Work that failed on valid input; the message says what failed and where to look.

    The command line prints it and exits with status 1. Any other exception is a bug in Lathe and
    keeps its traceback.
    """

    status = 1

    def __init__(self, message: str, code: Code) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return RuntimeError.__new__, (type(self), *self.args), self.__dict__

    def __str__(self) -> str:
        return without_secrets(super().__str__())


class Preempted(StageError):
    """The run was asked to stop (SIGTERM) and has saved its state; the same command resumes it.

    Status 75 is sysexits.h's EX_TEMPFAIL: try again later.
    """

    status = 75

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.PREEMPTED)


NO_SPACE = "free some space, or use a larger disk, and run it again"
NO_RIGHT = "get permission to read or write it (ls -l, chmod), or give another path"

# Codes and hints by errno. A wrong path ends with the status of a UserError, a failing machine with
# that of a StageError.
USER_ERRORS = {
    errno.EACCES: (Code.PERMISSION, NO_RIGHT),
    errno.EPERM: (Code.PERMISSION, NO_RIGHT),
    errno.EROFS: (Code.PERMISSION, "the file system is read-only: give a path on another one"),
    errno.ENAMETOOLONG: (Code.BAD_PATH, "give a shorter name or path"),
    errno.ENOTDIR: (
        Code.WRONG_KIND,
        "there is a file where a folder is needed: move it away, or give another path",
    ),
    errno.EEXIST: (Code.EXISTS, "move away what is there, or give another path"),
    errno.EISDIR: (Code.WRONG_KIND, "it is a folder, but a file is needed: give the file"),
    errno.ENOTEMPTY: (Code.EXISTS, "the folder is not empty: give another path"),
    errno.ELOOP: (
        Code.BAD_PATH,
        "its symbolic links form a loop: fix them, or give another path",
    ),
    errno.ENOENT: (Code.NOT_FOUND, "check the path"),
    errno.EINVAL: (Code.BAD_PATH, "give another path: this one cannot be used for this"),
    errno.EBUSY: (Code.IN_USE, "it is in use, perhaps as a mount point: give another path"),
    errno.EXDEV: (
        Code.BAD_PATH,
        "the two paths are on different file systems: give paths on the same one",
    ),
    errno.ENXIO: (Code.WRONG_KIND, "it is not a regular file: give another path"),
    errno.ENODEV: (Code.WRONG_KIND, "it is not a regular file: give another path"),
}
MACHINE_ERRORS = {
    errno.ENOSPC: (Code.NO_SPACE, NO_SPACE),
    errno.EDQUOT: (Code.NO_SPACE, NO_SPACE),
    errno.EFBIG: (
        Code.SYSTEM_LIMIT,
        "raise the limit on the size of a file (ulimit -f), or use another disk",
    ),
    errno.EIO: (Code.IO, "the disk may be failing: see dmesg, and copy the data to another one"),
    errno.ESTALE: (
        Code.IO,
        "its network file handle is stale: remount the file system, and run it again",
    ),
    errno.EMFILE: (
        Code.SYSTEM_LIMIT,
        "raise the limit on open files (ulimit -n), and run it again",
    ),
    errno.ENFILE: (
        Code.SYSTEM_LIMIT,
        "the system has too many open files: close some programs, and run it again",
    ),
    errno.ENOMEM: (Code.OUT_OF_MEMORY, "free some memory, and run it again"),
    errno.EAGAIN: (
        Code.SYSTEM_LIMIT,
        "raise the limit on processes (ulimit -u), and run it again",
    ),
}


def explain_os_error(error: OSError, path: str | Path | None = None) -> UserError | StageError:
    """Turn an operating-system error into the exception that the user sees.

    Args:
        path: what was being read or written, used if the error does not name a file itself.

    Returns:
        UserError if the path is the cause, StageError if the machine is: a full or failing disk,
        a limit. Both name the file and give a matching hint.
    """
    if error.errno == errno.ENOENT and error.filename is None:
        try:
            os.getcwd()
        except OSError:
            return UserError(
                "the working directory has been deleted",
                "change to another one with cd",
                Code.NOT_FOUND,
            )
    named = error.filename if isinstance(error.filename, str | bytes | Path) else path
    where = f"{printable(named)}: " if named is not None else ""
    what = f"{where}{error.strerror or error or type(error).__name__}"
    number = error.errno or 0
    if number in USER_ERRORS:
        code, hint = USER_ERRORS[number]
        return UserError(what, hint, code)
    fallback = (Code.IO, "check the path, the disk and the space on it")
    code, hint = MACHINE_ERRORS.get(number, fallback)
    return StageError(f"{what}\n  hint: {hint}", code)


EXTRAS = {
    "cyclonedx": "cards",
    "datasets": "data",
    "kubeflow_trainer_api": "cluster",
    "kubernetes": "cluster",
    "packageurl": "cards",
    "packaging": "cards",
    "py3langid": "data",
    "rensa": "data",
    "sentencex": "data",
}
"""Module that verbs import only when they need it -> the extra that installs it."""


def explain_missing_package(error: ModuleNotFoundError) -> UserError | None:
    """The UserError for a missing package of an extra; None for any other package."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    hint = f"pip install 'lathe[{EXTRAS[package]}]'"
    return UserError(f"{package} is not installed", hint, Code.NOT_INSTALLED)


EXPECTED_ERRORS = (UserError, StageError, OSError)
"""The exceptions that end a command with a message and no traceback."""


def explain(
    error: UserError | StageError | OSError, path: str | Path | None = None
) -> UserError | StageError:
    """The exception to show for one that ends a command: it has a code, a message and a status.
    See `explain_os_error`."""
    return explain_os_error(error, path) if isinstance(error, OSError) else error


def coded(error: UserError | StageError) -> str:
    """What commands print before ending: `error[not-found]: ...`, or `preempted: ...`."""
    return (
        f"preempted: {error}" if isinstance(error, Preempted) else f"error[{error.code}]: {error}"
    )


MESSAGE = re.compile(r"(?:error\[([a-z-]+)\]|preempted): ")
"""How a message begins that a command prints."""


def code_in(output: str) -> Code:
    """The code of the last message in the output of another process; `failed` if it has none."""
    named = [match[1] or Code.PREEMPTED for match in MESSAGE.finditer(output)]
    return parse_code(named[-1], Code.FAILED) if named else Code.FAILED


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Raise an OSError that names `path` if the original error does not name its file: a failed
    write, or a library written in Rust that wraps the error in its own exception (`tokenizers` in
    Exception, `safetensors` in SafetensorError)."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    except Exception as error:
        match = re.search(r"\(os error (\d+)\)", str(error))
        if not match:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def printable(name: object, limit: int = 300) -> str:
    """A name or value, whatever its bytes, as one printable line of at most `limit` characters; of
    a longer one, the beginning and the end."""
    text = os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else str(name)
    # Cut before it is escaped: most of a long text is not shown, and escapes are up to ten times as
    # long.
    text = text if len(text) <= 2 * limit else text[:limit] + text[-limit:]
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    end = limit // 4
    return plain if len(plain) <= limit else f"{plain[: limit - end - 3]}...{plain[-end:]}"
