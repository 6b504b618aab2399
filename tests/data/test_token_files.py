"""Malformed token files are rejected with one message and without large allocations."""

import io
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lathe.data import megatron
from lathe.data.megatron import TokenArrays, check_ids, read_megatron
from lathe.data.paddle import read_paddle
from lathe_base.errors import Code
from tests.support.errors import raises


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Limit memory to 4 GiB more than in use, while some headers announce exabytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def index(
    code: int = 8,
    n: int = 3,
    d: int = 4,
    version: int = 1,
    sizes: tuple[int, ...] = (3, 1, 2),
    pointers: tuple[int, ...] = (0, 6, 8),
    documents: tuple[int, ...] = (0, 1, 2, 3),
    magic: bytes = b"MMIDIDX\0\0",
) -> bytes:
    return (
        magic
        + struct.pack("<QBQQ", version, code, n, d)
        + struct.pack(f"<{len(sizes)}i", *sizes)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


MAX = 2**63 - 1


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        (b"", Code.MALFORMED, "x.idx"),
        (b"MMIDIDX\0\0", Code.MALFORMED, "x.idx"),
        (index(magic=b"MMIDIDX\0\1"), Code.MALFORMED, "x.idx"),
        (index(version=2), Code.WRONG_VERSION, "version 2"),
        (index(n=2**60), Code.CORRUPT, "1,152,921,504,606,846,976 sequences"),
        (index(n=2**64 - 1, d=2**64 - 1), Code.CORRUPT, "18,446,744,073,709,551,615"),
        (index(d=2**60), Code.CORRUPT, "1,152,921,504,606,846,976 document marks"),
        (index(code=0), Code.UNSUPPORTED, "dtype code 0"),
        (index(code=6), Code.UNSUPPORTED, "dtype code 6"),
        (index(code=255), Code.UNSUPPORTED, "dtype code 255"),
        (index(code=4), Code.CORRUPT, "12 bytes, but x.idx lists 24"),
        (index(sizes=(-3, 7, 2)), Code.CORRUPT, "outside x.bin"),
        (index(sizes=(2**31 - 1, -(2**31) + 1, 6)), Code.CORRUPT, "outside x.bin"),
        (index(pointers=(0, 6, -2)), Code.CORRUPT, "outside x.bin"),
        (index(pointers=(0, 6, 7)), Code.CORRUPT, "outside x.bin"),
        (index(pointers=(0, 6, MAX)), Code.CORRUPT, "outside x.bin"),
        (index(pointers=(0, 6, MAX - 3)), Code.CORRUPT, "outside x.bin"),
        (index(pointers=(0, 2, 8)), Code.CORRUPT, "overlap"),
        (index(documents=(0, 2, 1, 3)), Code.CORRUPT, "document boundaries"),
        (index(documents=(0, 1, 2, 4)), Code.CORRUPT, "document boundaries"),
        (index(documents=(1, 1, 2, 3)), Code.CORRUPT, "document boundaries"),
        (index(documents=(0, 1, MAX, 3)), Code.CORRUPT, "document boundaries"),
    ],
)
def test_a_megatron_index_that_is_wrong(
    tmp_path: Path, content: bytes, code: Code, text: str
) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(12))
    (tmp_path / "x.idx").write_bytes(content)
    with raises(code, text):
        read_megatron(tmp_path / "x.bin", tmp_path / "x.idx")


def test_sizes_without_the_end_of_text_are_named(tmp_path: Path) -> None:
    """Two documents of two sequences, and an empty one, each with a token that no size counts."""
    sizes, pointers = np.array([2, 1, 1, 3], "<i4"), np.array([0, 4, 6, 8], "<i8")
    documents = np.array([0, 2, 2, 4], "<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 4, 4)
    body = sizes.tobytes() + pointers.tobytes() + documents.tobytes()
    (tmp_path / "x.idx").write_bytes(head + body)
    for tokens, hint in ((9, "does not count the end-of-text token"), (8, "truncated")):
        (tmp_path / "x.bin").write_bytes(bytes(2 * tokens))
        with raises(Code.CORRUPT, f"x.bin: {2 * tokens} bytes, but x.idx lists 14", hint):
            read_megatron(tmp_path / "x.bin", tmp_path / "x.idx")


def test_sequences_may_lie_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(struct.pack("<6H", *range(6)))
    (tmp_path / "x.idx").write_bytes(index(pointers=(6, 4, 0)))
    assert read_megatron(tmp_path / "x.bin", tmp_path / "x.idx").starts.tolist() == [3, 2, 0]


def npy(array: np.ndarray | None = None, header: str = "", body: bytes = bytes(12)) -> bytes:
    if array is not None:
        file = io.BytesIO()
        np.save(file, array, allow_pickle=True)
        return file.getvalue()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + body


def npy_header(descr: str, shape: object, fortran: object = False) -> bytes:
    return npy(header=f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {shape}}}\n")


IDS = npy(np.arange(6, dtype="<u2"))


def npz(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


GOOD = npz(lens=npy(np.array([3, 1, 2], "<i4")))


@pytest.mark.parametrize(
    ("tokens", "code", "text"),
    [
        (b"", Code.MALFORMED, "x_ids.npy"),
        (b"\x93NUMPY", Code.MALFORMED, "x_ids.npy"),
        (GOOD, Code.MALFORMED, "x_ids.npy"),
        (npy_header("<u2", (2**60,)), Code.MALFORMED, "x_ids.npy"),
        (npy_header("<u2", (-1,)), Code.MALFORMED, "x_ids.npy"),
        (npy_header("<u2", (2**70,)), Code.MALFORMED, "x_ids.npy"),
        (npy_header("<u2", "(" * 900), Code.MALFORMED, "x_ids.npy"),
        (npy(header="x" * 20000), Code.MALFORMED, "x_ids.npy"),
        (npy(np.array([{}, {}], object)), Code.MALFORMED, "x_ids.npy"),
        (npy_header("|O", (1,)), Code.MALFORMED, "x_ids.npy"),
        (npy(np.arange(6, dtype=">u2")), Code.MALFORMED, ">u2 of shape (6,)"),
        (npy(np.arange(6.0)), Code.MALFORMED, "float64 of shape (6,)"),
        (npy(np.zeros((2, 3), "<u2", order="F")), Code.MALFORMED, "uint16 of shape (2, 3)"),
        (npy(np.array(3, "<u2")), Code.MALFORMED, "uint16 of shape ()"),
        (npy(np.arange(7, dtype="<u2")), Code.MISMATCH, "7 tokens, but x_idx.npz lists 6"),
    ],
    ids=range(15),
)
def test_paddle_ids_that_are_wrong(tmp_path: Path, tokens: bytes, code: Code, text: str) -> None:
    (tmp_path / "x_ids.npy").write_bytes(tokens)
    (tmp_path / "x_idx.npz").write_bytes(GOOD)
    with raises(code, text):
        read_paddle(tmp_path / "x_ids.npy", tmp_path / "x_idx.npz")


def lens(array: object) -> Callable[[], bytes]:
    return lambda: npz(lens=npy(np.array(array)))


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (lambda: b"", Code.MALFORMED, "zip"),
        (lambda: IDS, Code.MALFORMED, "zip"),
        (lambda: GOOD[:-9], Code.MALFORMED, "zip"),
        (lambda: npz(lens=b"\x93NUMPX" + IDS[6:]), Code.MALFORMED, "magic string"),
        (lambda: npz(docs=npy(np.arange(4))), Code.MALFORMED, "lens.npy"),
        (lambda: npz(), Code.MALFORMED, "lens.npy"),
        (lens([3.0, 1.0, 2.0]), Code.MALFORMED, "lens is float64"),
        (lens([np.nan, 6.0]), Code.MALFORMED, "lens is float64"),
        (lens([[3, 1, 2]]), Code.MALFORMED, "(1, 3)"),
        (lens([3, 1, 2, -1, 1]), Code.CORRUPT, "lens"),
        (lens([2**62, 2**62, 2**62, 2**62, 6]), Code.CORRUPT, "lens"),
        (lens(np.array([{}, {}], object)), Code.MALFORMED, "lens is object"),
        (
            lambda: npz(lens=npy_header("<i4", (2**60,))),
            Code.MALFORMED,
            "1,152,921,504,606,846,976 numbers",
        ),
        (lambda: npz(lens=npy_header("<i4", (-1,))), Code.MALFORMED, "-1 numbers"),
        (lambda: npz(lens=npy_header("<i4", (9,))), Code.MALFORMED, "lens is truncated"),
        (
            lambda: npz(lens=npy(np.zeros(10**8, "i1"))),
            Code.MALFORMED,
            "100,000,000 numbers for 6 tokens",
        ),
        (
            lambda: npz(lens=npy(np.array([3, 1, 2])), docs=npy_header("<i8", (2**50,))),
            Code.MALFORMED,
            "docs has 1,125,899,906,842,624 numbers",
        ),
    ],
    ids=range(17),
)
def test_a_paddle_index_that_is_wrong(
    tmp_path: Path, make: Callable[[], bytes], code: Code, text: str
) -> None:
    (tmp_path / "x_ids.npy").write_bytes(IDS)
    (tmp_path / "x_idx.npz").write_bytes(make())
    with raises(code, "x_idx.npz", text):
        read_paddle(tmp_path / "x_ids.npy", tmp_path / "x_idx.npz")


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([0, 1, 2, 3, 4, 9], None),
        (
            [0, 1, 2, 3, 4, 10],
            "document 2 contains token 10, but the largest id of the vocabulary is 9",
        ),
        ([0, 1, 2, -1, 4, 10], "document 1 contains token -1"),
        ([70000, 1, 2, 3, 4, 5], "document 0 contains token 70000"),
    ],
)
def test_ids_are_those_of_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], says: str | None
) -> None:
    monkeypatch.setattr(megatron, "CHECKED_TOKENS", 2)
    starts, sizes = np.array([0, 3, 4]), np.array([3, 1, 2], "i4")
    arrays = TokenArrays(np.array(tokens, "<i4"), starts, sizes, np.arange(4))
    if says is None:
        check_ids(arrays, 10, Path("run/data"))
        return
    with raises(Code.WRONG_TOKENIZER, f"run/data: {says}"):
        check_ids(arrays, 10, Path("run/data"))
