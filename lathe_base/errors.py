"""Exceptions that end a command with a message and no traceback, each with its exit status."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

    kind, status = "error", 2

    def __init__(self, what: str, hint: str) -> None:
        what, hint = without_secrets(what), without_secrets(hint)
        super().__init__(f"{what}\n  hint: {hint}")
        self.what = what
        self.hint = hint

    @property
    def line(self) -> str:
        """Both in one line."""
        return f"{self.what}; {self.hint}"


class Unavailable(UserError):
    """A server that was waited for has not answered; the same command may succeed later.

    Status 69 is sysexits.h's EX_UNAVAILABLE. A step or a worker that ends with it is started again.
    """

    status = 69


class StageError(RuntimeError):
    """Work that failed on valid input; the message says what failed and where to look.

    The command line prints it and exits with status 1. Any other exception is a bug in Lathe and
    keeps its traceback.
    """

    kind, status = "error", 1

    def __str__(self) -> str:
        return without_secrets(super().__str__())


class Preempted(StageError):
    """The run was asked to stop (SIGTERM) and has saved its state; the same command resumes it.

    Status 75 is sysexits.h's EX_TEMPFAIL: try again later.
    """

    kind, status = "preempted", 75


NO_SPACE = "free some space, or use a larger disk, and run it again"
NO_RIGHT = "get permission to read or write it (ls -l, chmod), or give another path"

# Hints by errno. A wrong path ends with the status of a UserError, a failing machine with that of
# a StageError.
USER_HINTS = {
    errno.EACCES: NO_RIGHT,
    errno.EPERM: NO_RIGHT,
    errno.EROFS: "the file system is read-only: give a path on another one",
    errno.ENAMETOOLONG: "give a shorter name or path",
    errno.ENOTDIR: "there is a file where a folder is needed: move it away, or give another path",
    errno.EEXIST: "move away what is there, or give another path",
    errno.EISDIR: "it is a folder, but a file is needed: give the file",
    errno.ENOTEMPTY: "the folder is not empty: give another path",
    errno.ELOOP: "its symbolic links form a loop: fix them, or give another path",
    errno.ENOENT: "check the path",
    errno.EINVAL: "give another path: this one cannot be used for this",
    errno.EBUSY: "it is in use, perhaps as a mount point: give another path",
    errno.EXDEV: "the two paths are on different file systems: give paths on the same one",
    errno.ENXIO: "it is not a regular file: give another path",
    errno.ENODEV: "it is not a regular file: give another path",
}
MACHINE_HINTS = {
    errno.ENOSPC: NO_SPACE,
    errno.EDQUOT: NO_SPACE,
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or use another disk",
    errno.EIO: "the disk may be failing: see dmesg, and copy the data to another one",
    errno.ESTALE: "its network file handle is stale: remount the file system, and run it again",
    errno.EMFILE: "raise the limit on open files (ulimit -n), and run it again",
    errno.ENFILE: "the system has too many open files: close some programs, and run it again",
    errno.ENOMEM: "free some memory, and run it again",
    errno.EAGAIN: "raise the limit on processes (ulimit -u), and run it again",
}


def explain_os_error(error: OSError, path: str | Path | None = None) -> UserError | StageError:
    """Turn an operating-system error into the exception that the user sees.

    Args:
        path: what was being read or written, used if the error does not name a file itself.

    Returns:
        UserError if the path is the cause, StageError if the machine is: a full or failing disk,
        a limit. Both name the file and give a matching hint.
    """
    if error.errno == errno.ENOENT and error.filename is None and not _here():
        return UserError("the working directory has been deleted", "change to another one with cd")
    named = error.filename if isinstance(error.filename, str | bytes | Path) else path
    where = f"{printable(named)}: " if named is not None else ""
    what = f"{where}{error.strerror or error or type(error).__name__}"
    number = error.errno or 0
    if number in USER_HINTS:
        return UserError(what, USER_HINTS[number])
    hint = MACHINE_HINTS.get(number, "check the path, the disk and the space on it")
    return StageError(f"{what}\n  hint: {hint}")


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
    return UserError(f"{package} is not installed", f"pip install 'lathe[{EXTRAS[package]}]'")


EXPECTED_ERRORS = (UserError, StageError, OSError)
"""The exceptions that end a command with a message and no traceback."""


def explain(
    error: UserError | StageError | OSError, path: str | Path | None = None
) -> UserError | StageError:
    """The exception to show for one that ends a command: it has a kind, a message and a status.
    See `explain_os_error`."""
    return explain_os_error(error, path) if isinstance(error, OSError) else error


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


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
    text = text if len(text) <= 2 * limit else text[:limit] + text[-limit:]
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    end = limit // 4
    return plain if len(plain) <= limit else f"{plain[: limit - end - 3]}...{plain[-end:]}"
