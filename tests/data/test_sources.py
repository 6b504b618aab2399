import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
import zstandard

from lathe.data.rows import TextKey
from lathe.data.sources import documents, named
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.loopback import LoopbackServer, QuietHandler

LINES = "".join(json.dumps({"text": t, "title": "x"}) + "\n" for t in ("one\n", " ", "", "zwei é"))
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def read(source: Path | str, text_key: str = "text") -> list[str]:
    return list(documents(str(source), TextKey(text_key)))


@pytest.mark.parametrize("ending", COMPRESS)
def test_json_lines(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"c.jsonl{ending}"
    file.write_bytes(COMPRESS[ending](LINES.encode()))
    assert read(file) == ["one", "zwei é"]
    assert read(file, "title") == ["x"] * 4


def test_zstandard_frames_and_long_lines(tmp_path: Path) -> None:
    """Two frames, a line that spans both and is longer than a read chunk, and no final newline."""
    long = "".join(map(str, range(200_000)))
    data = (json.dumps({"text": long}) + "\n" + '{"text": "end"}').encode()
    (tmp_path / "c.jsonl.zst").write_bytes(
        zstandard.compress(data[:500_000]) + zstandard.compress(data[500_000:])
    )
    assert read(tmp_path / "c.jsonl.zst") == [long, "end"]


@pytest.mark.parametrize("window_log", [27, 28, 31])
def test_zstandard_with_long_windows(tmp_path: Path, window_log: int) -> None:
    """`zstd --long=31` writes windows of 2 GiB."""
    packer = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=window_log)
    ).compressobj()  # of unknown size, so that the header has the window
    (tmp_path / "c.jsonl.zst").write_bytes(packer.compress(LINES.encode()) + packer.flush())
    assert read(tmp_path / "c.jsonl.zst") == ["one", "zwei é"]


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_cut_archives(tmp_path: Path, ending: str) -> None:
    whole = COMPRESS[ending]("".join(f"{i * i} " for i in range(30_000)).encode())
    for name, data in ((f"cut.txt{ending}", whole[:-20]), (f"none.jsonl{ending}", b"not packed")):
        (tmp_path / name).write_bytes(data)
        with raises(Code.CORRUPT, name):
            read(tmp_path / name)


def test_text_file_is_cut_at_blank_lines_after_4000_characters(tmp_path: Path) -> None:
    blocks = [f"block {i} " + "x" * 991 for i in range(10)]
    (tmp_path / "a.md").write_text("\ufeff" + "\r\n \r\n".join(blocks) + "\n\n\n")
    found = read(tmp_path / "a.md")
    assert [text.count("block") for text in found] == [4, 4, 2]
    assert found[0].startswith("block 0") and found[1].startswith("block 4")
    assert "\r" not in "".join(found)
    (tmp_path / "b.tokens").write_text("x" * 9000 + "\ny")
    assert read(tmp_path / "b.tokens") == ["x" * 9000 + "\ny"]


def test_folder_is_read_in_sorted_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "sub/b.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "z.txt").write_text("last")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden/c.txt").write_text("no")
    assert read(tmp_path) == ["first", "one", "zwei é", "last"]
    assert caplog.messages == [f"{tmp_path}: 1 files with other endings ignored"]


@pytest.mark.parametrize(
    ("content", "code", "texts"),
    [
        (b'{"text": "a"}\n\n{"text": \n', Code.MALFORMED, ["c.jsonl:3: not JSON"]),
        (b'{"text": "a"}\n["b"]', Code.MALFORMED, ["c.jsonl:2: not a JSON object"]),
        (
            b'{"text": "a"}\n{"body": "b"}',
            Code.UNKNOWN_NAME,
            ["c.jsonl:2: no key 'text' among 'body'"],
        ),
        (b'{"text": null}', Code.MALFORMED, ["c.jsonl:1: 'text' holds NoneType"]),
        (b'{"text": "a\\u0000b"}', Code.MALFORMED, ["c.jsonl:1: ", "NUL"]),
        (b"PAR1\x15\x04\xff", Code.WRONG_KIND, ["c.jsonl:1: ", "Parquet"]),
        (b"BZh91AY&SY\xff", Code.WRONG_KIND, ["c.jsonl:1: ", "bzip2", ".bz2"]),
        (
            b"[\n{}\n]",
            Code.MALFORMED,
            ["c.jsonl:1: not JSON", "to convert an array"],
        ),
        (
            b'[{"text": "a"}]',
            Code.MALFORMED,
            ["c.jsonl:1: not a JSON object", "to convert an array"],
        ),
        (b'{"text": "\\ud800"}', Code.MALFORMED, ["c.jsonl:1: ", "surrogate"]),
        (
            b'{"text": "a"}\n{"text": "\xff"}',
            Code.MALFORMED,
            ["c.jsonl:2: ", "UTF-8", "invalid start byte"],
        ),
        (b"", Code.TOO_LITTLE_DATA, ["c.jsonl"]),
        (b'{"text": " "}\n', Code.TOO_LITTLE_DATA, ["c.jsonl"]),
    ],
)
def test_broken_json_lines(tmp_path: Path, content: bytes, code: Code, texts: list[str]) -> None:
    (tmp_path / "c.jsonl").write_bytes(content)
    with raises(code, *texts):
        read(tmp_path / "c.jsonl")


def test_missing_empty_and_foreign_sources(tmp_path: Path) -> None:
    with raises(Code.NOT_FOUND, "nowhere"):
        read(tmp_path / "nowhere")
    with raises(Code.TOO_LITTLE_DATA, tmp_path):
        read(tmp_path)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with raises(Code.MALFORMED, "latin.txt:1", "UTF-8"):
        read(tmp_path)


class Quiet(QuietHandler, SimpleHTTPRequestHandler):
    """Serves the files in a folder."""


@pytest.fixture
def http(tmp_path: Path) -> Iterator[str]:
    with LoopbackServer(partial(Quiet, directory=str(tmp_path))) as server:  # type: ignore[arg-type]
        yield server.url


def test_http(tmp_path: Path, http: str) -> None:
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(LINES.encode()))
    assert read(f"{http}/c.jsonl.xz?version=1") == ["one", "zwei é"]
    with raises(Code.NOT_FOUND, "nothing.txt", "404"):
        read(f"{http}/nothing.txt")


@pytest.fixture
def local_data_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.mark.usefixtures("local_data_sets")
@pytest.mark.slow
def test_hugging_face_data_set(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "n": [1, 2]})
    (tmp_path / "files").mkdir()
    rows.to_json(tmp_path / "files/train.jsonl")
    rows.select([1]).to_json(tmp_path / "files/validation.jsonl")
    assert read(f"hf://{tmp_path}/files") == ["one", "two"]
    assert read(f"hf://{tmp_path}/files::validation") == ["two"]
    rows.save_to_disk(str(tmp_path / "saved"))
    assert read(f"hf://{tmp_path}/saved") == ["one", "two"]
    with raises(Code.UNKNOWN_NAME, "row 0: no key 'body' among 'text', 'n'"):
        read(f"hf://{tmp_path}/saved", "body")
    with raises(Code.NOT_FOUND, f"{tmp_path}/files::nosuch"):
        read(f"hf://{tmp_path}/files::nosuch")
    with raises(Code.NOT_FOUND, f"{tmp_path}/nowhere"):
        read(f"hf://{tmp_path}/nowhere")
    with raises(Code.INVALID_VALUE, "hf://"):
        read("hf://")


def test_python_prose(prose: list[str]) -> None:
    """About 2 MB of help topics and docstrings without duplicates, and nothing from tests."""
    assert len(prose) > 300 and sum(map(len, prose)) > 1_500_000
    assert len(set(prose)) == len(prose) and min(map(len, prose)) >= 200
    assert all(text == text.strip() for text in prose)
    (topic,) = [text for text in prose if text.startswith('The "for" statement\n')]
    assert "used to iterate over the elements of a sequence" in topic
    (module,) = [text for text in prose if text.startswith("Utilities for with-statement")]
    first = module.index("An abstract base class for context managers.")
    assert first < module.index("Context to automatically close something")
    # Paragraphs are joined to one line, doctests are unchanged.
    assert any("instances of user-defined classes.\n\nUsed by pickle" in text for text in prose)
    assert any(
        "\n>>> Fraction('-47e-2') # string may include a decimal exponent\n" in text
        for text in prose
    )
    # Duplicate: every event loop of asyncio repeats the docstrings of the base class.
    assert sum(text.count("Schedule a coroutine object.") for text in prose) == 1


def test_a_signature_in_an_address_is_kept_out_of_messages(tmp_path: Path, http: str) -> None:
    (tmp_path / "empty.txt").touch()
    with raises(Code.TOO_LITTLE_DATA, "/empty.txt") as raised:
        read(f"{http}/empty.txt?X-Amz-Signature=0a1b2c")
    assert "0a1b2c" not in str(raised.value)
    assert named("notes#1?.txt") == "notes#1?.txt"
