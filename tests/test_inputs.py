"""Any file given as text is read, or rejected at once with one appropriate message."""

import gzip
import lzma
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from tokenizers import Tokenizer

from lathe.data.sources import documents
from lathe.evaluate.tasks import cloze
from lathe.evaluate.tasks.text import read_text
from lathe.export.prompts import held_out_prompts
from lathe.release.deploy import _prompts
from lathe_base import inputs
from lathe_base.errors import Code, StageError, UserError
from lathe_base.inputs import argument_text, parse_json, require_text
from lathe_serving.client.bench import _lines
from tests.support.errors import raises
from tests.support.tables import quick_only

DEEP = b"[" * 100_000


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path, since a socket's path is limited to 107 characters."""
    folder = Path("/tmp") / f"lathe-inputs-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))


MAKERS: dict[str, tuple[Callable[[Path], object], set[Code]]] = {
    "absent": (lambda p: None, {Code.NOT_FOUND}),
    "fifo": (os.mkfifo, {Code.WRONG_KIND}),
    "socket": (bind, {Code.WRONG_KIND}),
    "endless": (lambda p: p.symlink_to("/dev/zero"), {Code.WRONG_KIND}),
    "full": (lambda p: p.symlink_to("/dev/full"), {Code.WRONG_KIND}),
    "memory": (lambda p: p.symlink_to("/proc/self/mem"), {Code.IO}),
    "loop": (lambda p: p.symlink_to(p.name), {Code.BAD_PATH, Code.NOT_FOUND}),
    "long name": (lambda p: None, {Code.NOT_FOUND}),
    "UTF-16": (lambda p: p.write_bytes("one two\n".encode("utf-16")), {Code.WRONG_KIND}),
    "UTF-16 without mark": (lambda p: p.write_bytes("one".encode("utf-16-le")), {Code.MALFORMED}),
    "UTF-16, big": (lambda p: p.write_bytes(b"\xfe\xff\0o\0n"), {Code.WRONG_KIND}),
    "binary": (lambda p: p.write_bytes(bytes(range(256)) * 99), {Code.MALFORMED}),
    "gzip": (lambda p: p.write_bytes(gzip.compress(b"one two")), {Code.WRONG_KIND}),
    "xz": (lambda p: p.write_bytes(lzma.compress(b"one two")), {Code.WRONG_KIND}),
    "zst": (lambda p: p.write_bytes(zstandard.compress(b"one two")), {Code.WRONG_KIND}),
    "empty": (lambda p: p.write_bytes(b""), {Code.TOO_LITTLE_DATA}),
    "blank": (
        lambda p: p.write_text("\n \n\n"),
        {Code.TOO_LITTLE_DATA},
    ),
}


def readers(tokenizer: Tokenizer) -> dict[str, tuple[str, Callable[[Path], object]]]:
    """File name and reading function by verb."""
    return {
        "corpus": ("c.txt", lambda p: list(documents(str(p)))),
        "JSON corpus": ("c.jsonl", lambda p: list(documents(str(p)))),
        "cloze": ("cloze.jsonl", lambda p: cloze.read_cloze(p, tokenizer)),
        "text": ("wiki.tokens", lambda p: read_text(p, tokenizer)),
        "load": ("prompts.txt", _lines),
        "held out": ("heldout.txt", lambda p: held_out_prompts(tokenizer, p.parent, 4, 16)),
        "deploy": ("heldout.txt", lambda p: _prompts(p.parent)),
    }


@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize(
    "reader", ["corpus", "JSON corpus", "cloze", "text", "load", "held out", "deploy"]
)
def test_a_non_text_file_is_rejected(
    place: Path, byte_tokenizer: Tokenizer, reader: str, made: str
) -> None:
    name, read = readers(byte_tokenizer)[reader]
    make, codes = MAKERS[made]
    make(place / name)
    if reader == "deploy" and made in ("empty", "blank"):
        assert read(place / name)  # the default prompts
        return
    with pytest.raises((UserError, StageError)) as raised:
        read(place / name)
    assert raised.value.code in codes
    first, hint = str(raised.value).splitlines()
    assert name in first and hint.startswith("  hint: ")
    assert "space" not in hint or made == "memory"


def test_a_folder_in_place_of_a_file_is_refused(place: Path, byte_tokenizer: Tokenizer) -> None:
    for reader, (name, read) in readers(byte_tokenizer).items():
        if "corpus" in reader:
            continue
        (place / name).mkdir(exist_ok=True)
        with raises(Code.WRONG_KIND, f"{name}: a folder"):
            read(place / name)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (DEEP, ""),
        (b'{"text": ' + DEEP, ""),
        (b'{"n": ' + b"9" * 5000 + b', "text": "a b"}', "digits"),
        (rb'{"text": "a \ud800"}', "at character 2"),
        (b'{"text": "a \0"}', "NUL"),
        (b'{"text": "a \xff"}', "at byte 12"),
        (b'{"text": 3}', "int"),
        (b'"text"', ""),
        (b"null", ""),
        (b"{'text': 1}", ""),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_line_without_an_example(
    tmp_path: Path, byte_tokenizer: Tokenizer, line: bytes, says: str
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "one two"}\n' + line + b"\n")
    for reader in ("JSON corpus", "cloze"):
        with raises(Code.MALFORMED, f"{path}:2: ", says) as raised:
            readers(byte_tokenizer)[reader][1](path)
        assert len(raised.value.what) < 400


def test_a_line_without_end_is_not_gathered_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 1000)
    for ending, pack in (("", bytes), (".gz", gzip.compress), (".zst", zstandard.compress)):
        path = tmp_path / f"c.txt{ending}"
        path.write_bytes(pack(b"ok\n" + b"x" * 5_000_000))
        with raises(Code.TOO_LARGE, "c.txt", ":2: "):
            list(documents(str(path)))


@pytest.mark.parametrize("ending", quick_only([".gz", ".zst"], [".zst"]))
def test_an_archive_that_unpacks_to_very_much_takes_little_memory(
    tmp_path: Path, ending: str
) -> None:
    """A line of 272 MB, compressed to 10 KB by zstandard, is read within 1 GiB of memory."""
    path = tmp_path / f"bomb.jsonl{ending}"
    part = b"x" * (1 << 22)
    with (gzip.open if ending == ".gz" else zstandard.open)(path, "wb") as file:
        for _ in range(65):
            file.write(part)
    script = (
        "import resource, sys; from lathe.data.sources import documents\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "list(documents(sys.argv[1]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, encoding="utf-8"
    )
    assert "UserError" in ended.stderr.splitlines()[-2], ended.stderr
    assert "256 MiB" in ended.stderr


def test_a_folder_with_loops_hidden_files_and_links(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / ".hidden.txt").write_bytes(b"\xff")
    assert list(documents(str(tmp_path))) == ["one"]
    assert "loop: a link to a folder" in caplog.text
    (tmp_path / "gone.txt").symlink_to("nowhere")
    with raises(Code.NOT_FOUND, tmp_path / "gone.txt"):
        list(documents(str(tmp_path)))
    (tmp_path / "gone.txt").unlink()
    os.mkfifo(tmp_path / "pipe.txt")
    with raises(Code.WRONG_KIND, tmp_path / "pipe.txt"):
        list(documents(str(tmp_path)))


@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv is not installed")
@pytest.mark.parametrize(
    "name",
    quick_only(["c.jsonl", "folder", "folder/inner/x.txt"], ["folder", "folder/inner/x.txt"]),
)
def test_unreadable_inputs_are_reported(place: Path, name: str) -> None:
    """The hint is about permissions, not disk space; unreadable folders are not skipped."""
    place.chmod(0o755)
    (place / "c.jsonl").write_text('{"text": "a"}')
    (place / "folder" / "inner").mkdir(parents=True)
    (place / "folder" / "x.txt").write_text("x")
    (place / "folder" / "inner" / "x.txt").write_text("x")
    (place / name).chmod(0)
    source = place / name.partition("/")[0]
    script = "import sys; from lathe.data.sources import documents; list(documents(sys.argv[1]))"
    drop = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    ended = subprocess.run(
        [*(drop if os.getuid() == 0 else []), sys.executable, "-c", script, str(source)],
        capture_output=True,
        encoding="utf-8",
    )
    if "Permission denied" in ended.stderr and "import" in ended.stderr.splitlines()[0]:
        pytest.skip("the unprivileged user cannot read the interpreter")
    assert f"{place / name}: Permission denied" in ended.stderr
    assert "chmod" in ended.stderr and "space" not in ended.stderr


@pytest.mark.parametrize(
    ("given", "read"), [("plain", "plain"), ("caf\udcc3\udca9", "café"), ("a\0b", "a\0b")]
)
def test_an_argument_is_utf_8_whatever_the_locale(given: str, read: str) -> None:
    assert argument_text(given, "prompt") == read


@pytest.mark.parametrize("given", ["caf\udce9", "\ud800", "x\udfff"])
def test_an_argument_that_is_not_utf_8(given: str) -> None:
    with raises(Code.MALFORMED, "prompt ", "\\ud"):
        argument_text(given, "prompt")
    with raises(Code.MALFORMED, "f: "):
        require_text(given, "f")


@pytest.mark.parametrize("text", ["[" * 99999, "{", b"\xff", "9" * 5000, "", '{"a": nul}'])
def test_json_that_is_none(text: str | bytes) -> None:
    with raises(Code.MALFORMED, "f: ") as raised:
        parse_json(text, "f", "fix it")
    assert raised.value.hint == "fix it" and "set_int" not in raised.value.what


def test_the_beginning_of_a_text_may_end_within_a_character(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    for text in ("aé€😀" * 50, "a" * 99 + "\r\n😀", "\ufeffone", "é", "😀😀"):
        path.write_text(text, encoding="utf-8", newline="")
        plain = text.removeprefix("\ufeff").replace("\r\n", "\n")
        assert inputs.read_text(path) == plain
        for characters in range(1, 60):
            read = inputs.read_text(path, characters=characters)
            assert plain.startswith(read) and len(read) >= min(characters - 1, len(plain))
