"""Errors: their codes, and the messages for those of the operating system."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from lathe.data.tokenizer import save_tokenizer
from lathe_base.errors import (
    Code,
    Preempted,
    StageError,
    Unavailable,
    UserError,
    code_in,
    coded,
    explain_os_error,
    os_errors,
    printable,
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("no corpus", "give one", Code.NOT_FOUND), "error[not-found]: no corpus"),
        (Unavailable("no answer", "start it"), "error[unreachable]: no answer"),
        (StageError("a loss of nan", Code.NOT_FINITE), "error[not-finite]: a loss of nan"),
        (Preempted("saved at step 3"), "preempted: saved at step 3"),
    ],
)
def test_a_printed_error_begins_with_its_code(error: UserError | StageError, line: str) -> None:
    assert coded(error).splitlines()[0] == line
    assert code_in(f"reading\n[rank0]: {coded(error)}") is error.code


def test_output_without_a_known_code_has_failed() -> None:
    assert code_in("Traceback ...\nKeyError: 'h.0'") is Code.FAILED
    assert code_in("error[of-another-version]: x") is Code.FAILED


def raised_by(call: Callable[[], object]) -> OSError:
    with pytest.raises(OSError) as raised:
        call()
    return raised.value


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        (lambda p: (p / "none").read_bytes(), Code.NOT_FOUND, "none: No such file or directory"),
        (lambda p: (p / "file" / "x").read_bytes(), Code.WRONG_KIND, "file/x: Not a directory"),
        (lambda p: (p / ("x" * 300)).read_bytes(), Code.BAD_PATH, "xx: File name too long"),
        (lambda p: (p / "loop").read_bytes(), Code.BAD_PATH, "loop: Too many levels"),
        (lambda p: p.read_bytes(), Code.WRONG_KIND, ": Is a directory"),
        (lambda p: p.rmdir(), Code.EXISTS, ": Directory not empty"),
        (lambda p: Path("/proc/none").mkdir(), Code.NOT_FOUND, "/proc/none: No such file"),
        (lambda p: (p / "file").mkdir(), Code.EXISTS, "file: File exists"),
        (lambda p: os.rename(p, p / "in"), Code.BAD_PATH, "Invalid argument"),
    ],
)
def test_an_unusable_path_is_a_user_error(
    tmp_path: Path, call: Callable[[Path], object], code: Code, says: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    error = explain_os_error(raised_by(lambda: call(tmp_path)))
    assert isinstance(error, UserError)
    assert error.code is code and says in error.what and error.hint
    assert "space" not in error.hint


@pytest.mark.parametrize(
    ("number", "kind", "code", "hint"),
    [
        (errno.EACCES, UserError, Code.PERMISSION, "chmod"),
        (errno.EPERM, UserError, Code.PERMISSION, "chmod"),
        (errno.EROFS, UserError, Code.PERMISSION, "read-only"),
        (errno.ENOSPC, StageError, Code.NO_SPACE, "free some space"),
        (errno.EDQUOT, StageError, Code.NO_SPACE, "free some space"),
        (errno.EFBIG, StageError, Code.SYSTEM_LIMIT, "ulimit -f"),
        (errno.EMFILE, StageError, Code.SYSTEM_LIMIT, "ulimit -n"),
        (errno.EIO, StageError, Code.IO, "dmesg"),
        (errno.EADDRINUSE, StageError, Code.IO, "check the path"),
    ],
)
def test_the_hint_fits_the_errno(number: int, kind: type[Exception], code: Code, hint: str) -> None:
    error = explain_os_error(OSError(number, os.strerror(number)), Path("out/model"))
    assert type(error) is kind and error.code is code
    what, told = str(error).split("\n  hint: ")
    assert what == f"out/model: {os.strerror(number)}" and hint in told


def test_a_full_disk_as_it_comes() -> None:
    def fill() -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    error = explain_os_error(raised_by(fill), "run/data")
    assert isinstance(error, StageError)
    assert str(error).startswith("run/data: No space left on device\n  hint: free some space")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain é", "plain é"),
        (b"caf\xe9", r"caf\udce9"),
        ("two\nlines\x1b[31m", r"two\nlines\x1b[31m"),
        (Path("a/b"), "a/b"),
        (3, "3"),
    ],
)
def test_a_name_of_any_bytes_can_be_printed(name: object, shown: str) -> None:
    assert printable(name) == shown
    printable(name).encode()
    assert len(printable("x" * 5000)) == 300
    assert printable("a\n" * 50, 20) == r"a\na\na\na\n...\na\n"


def test_an_error_without_an_errno_keeps_its_words() -> None:
    assert "Not a gzipped file" in str(explain_os_error(OSError("Not a gzipped file"), "c.gz"))


def test_a_full_disk_inside_a_library_in_rust_is_an_os_error(tmp_path: Path) -> None:
    """Rust libraries raise their own exceptions and do not name the file."""
    (tmp_path / "full").symlink_to("/dev/full")
    tokenizer = Tokenizer(models.BPE(vocab={f"{i}": i for i in range(9999)}, merges=[]))
    with pytest.raises(OSError, match="No space left") as raised:
        save_tokenizer(tokenizer, tmp_path / "full")
    told = explain_os_error(raised.value)
    assert isinstance(told, StageError) and str(told).startswith(f"{tmp_path}/full: No space left")
    with pytest.raises(OSError, match="No such file"), os_errors(tmp_path / "none" / "m"):
        save_file({"a": np.zeros(3)}, tmp_path / "none" / "m")
    with pytest.raises(ValueError, match="another"), os_errors(tmp_path):
        raise ValueError("another thing")
