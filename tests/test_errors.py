"""Error messages for errors of the operating system."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from lathe.data.tokenizer import save_tokenizer
from lathe_base.errors import StageError, UserError, explain_os_error, os_errors, printable


def raised_by(call: Callable[[], object]) -> OSError:
    with pytest.raises(OSError) as raised:
        call()
    return raised.value


@pytest.mark.parametrize(
    ("call", "says", "hint"),
    [
        (lambda p: (p / "none").read_bytes(), "none: No such file or directory", "check the path"),
        (lambda p: (p / "file" / "x").read_bytes(), "file/x: Not a directory", "there is a file"),
        (lambda p: (p / ("x" * 300)).read_bytes(), "xx: File name too long", "a shorter name"),
        (lambda p: (p / "loop").read_bytes(), "loop: Too many levels", "form a loop"),
        (lambda p: p.read_bytes(), ": Is a directory", "give the file"),
        (lambda p: p.rmdir(), ": Directory not empty", "give another path"),
        (lambda p: Path("/proc/none").mkdir(), "/proc/none: No such file", "check the path"),
        (lambda p: (p / "file").mkdir(), "file: File exists", "move away what is there"),
        (lambda p: os.rename(p, p / "in"), "Invalid argument", "give another path"),
    ],
)
def test_a_path_that_cannot_be_used_is_the_users_to_mend(
    tmp_path: Path, call: Callable[[Path], object], says: str, hint: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    error = explain_os_error(raised_by(lambda: call(tmp_path)))
    assert isinstance(error, UserError)
    assert says in error.what and hint in error.hint
    assert "space" not in error.hint


@pytest.mark.parametrize(
    ("number", "kind", "hint"),
    [
        (errno.EACCES, UserError, "chmod"),
        (errno.EPERM, UserError, "chmod"),
        (errno.EROFS, UserError, "read-only"),
        (errno.ENOSPC, StageError, "free some space"),
        (errno.EDQUOT, StageError, "free some space"),
        (errno.EFBIG, StageError, "ulimit -f"),
        (errno.EMFILE, StageError, "ulimit -n"),
        (errno.EIO, StageError, "dmesg"),
        (errno.EADDRINUSE, StageError, "check the path"),
    ],
)
def test_the_cure_fits_the_errno(number: int, kind: type[Exception], hint: str) -> None:
    error = explain_os_error(OSError(number, os.strerror(number)), Path("out/model"))
    assert type(error) is kind
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
