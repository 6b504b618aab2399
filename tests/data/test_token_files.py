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
from lathe_base.errors import UserError


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
    ("content", "says"),
    [
        (b"", "not a Megatron index"),
        (b"MMIDIDX\0\0", "not a Megatron index"),
        (index(magic=b"MMIDIDX\0\1"), "not a Megatron index"),
        (index(version=2), "unsupported version 2; only 1 is supported"),
        (index(n=2**60), "but 1,152,921,504,606,846,976 sequences"),
        (index(n=2**64 - 1, d=2**64 - 1), "document marks take"),
        (index(d=2**60), "document marks take"),
        (index(code=0), "dtype code 0 is not an integer type"),
        (index(code=6), "dtype code 6"),
        (index(code=255), "dtype code 255"),
        (index(code=4), "12 bytes, but x.idx lists 24"),
        (index(sizes=(-3, 7, 2)), "points outside"),
        (index(sizes=(2**31 - 1, -(2**31) + 1, 6)), "points outside"),
        (index(pointers=(0, 6, -2)), "points outside"),
        (index(pointers=(0, 6, 7)), "points outside"),
        (index(pointers=(0, 6, MAX)), "points outside"),
        (index(pointers=(0, 6, MAX - 3)), "points outside"),
        (index(pointers=(0, 2, 8)), "sequences overlap"),
        (index(documents=(0, 2, 1, 3)), "invalid document boundaries"),
        (index(documents=(0, 1, 2, 4)), "invalid document boundaries"),
        (index(documents=(1, 1, 2, 3)), "invalid document boundaries"),
        (index(documents=(0, 1, MAX, 3)), "invalid document boundaries"),
    ],
)
def test_a_megatron_index_that_is_wrong(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(12))
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(UserError, match=says):
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
        with pytest.raises(UserError, match=r"x\.bin: 1\d bytes, but x\.idx lists 14") as error:
            read_megatron(tmp_path / "x.bin", tmp_path / "x.idx")
        assert hint in error.value.hint


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
    ("tokens", "says"),
    [
        (b"", "cannot be mapped"),
        (b"\x93NUMPY", "cannot be mapped"),
        (GOOD, "cannot be mapped"),
        (npy_header("<u2", (2**60,)), "cannot be mapped"),
        (npy_header("<u2", (-1,)), "cannot be mapped|lists 6"),
        (npy_header("<u2", (2**70,)), "cannot be mapped"),
        (npy_header("<u2", "(" * 900), "cannot be mapped"),
        (npy(header="x" * 20000), "cannot be mapped"),
        (npy(np.array([{}, {}], object)), "cannot be mapped"),
        (npy_header("|O", (1,)), "cannot be mapped"),
        (npy(np.arange(6, dtype=">u2")), "not one row of token ids"),
        (npy(np.arange(6.0)), "float64 of shape"),
        (npy(np.zeros((2, 3), "<u2", order="F")), "not one row of token ids"),
        (npy(np.array(3, "<u2")), "not one row of token ids"),
        (npy(np.arange(7, dtype="<u2")), "7 tokens, but x_idx.npz lists 6"),
    ],
    ids=range(15),
)
def test_paddle_ids_that_are_wrong(tmp_path: Path, tokens: bytes, says: str) -> None:
    (tmp_path / "x_ids.npy").write_bytes(tokens)
    (tmp_path / "x_idx.npz").write_bytes(GOOD)
    with pytest.raises(UserError, match=says):
        read_paddle(tmp_path / "x_ids.npy", tmp_path / "x_idx.npz")


def lens(array: object) -> Callable[[], bytes]:
    return lambda: npz(lens=npy(np.array(array)))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: b"", "not a zip file"),
        (lambda: IDS, "not a zip file"),
        (lambda: GOOD[:-9], "not a zip file"),
        (lambda: npz(lens=b"\x93NUMPX" + IDS[6:]), "magic string"),
        (lambda: npz(docs=npy(np.arange(4))), "lens.npy"),
        (lambda: npz(), "lens.npy"),
        (lens([3.0, 1.0, 2.0]), "not one row of integers"),
        (lens([np.nan, 6.0]), "not one row of integers"),
        (lens([[3, 1, 2]]), "not one row of integers"),
        (lens([3, 1, 2, -1, 1]), "invalid lengths"),
        (lens([2**62, 2**62, 2**62, 2**62, 6]), "invalid lengths"),
        (lens(np.array([{}, {}], object)), "not one row of integers"),
        (lambda: npz(lens=npy_header("<i4", (2**60,))), "numbers for 6 tokens"),
        (lambda: npz(lens=npy_header("<i4", (-1,))), "numbers for 6 tokens|cannot be read"),
        (lambda: npz(lens=npy_header("<i4", (9,))), "lens is truncated"),
        (lambda: npz(lens=npy(np.zeros(10**8, "i1"))), "100,000,000 numbers for 6 tokens"),
        (
            lambda: npz(lens=npy(np.array([3, 1, 2])), docs=npy_header("<i8", (2**50,))),
            "docs has 1,125,899,906,842,624 numbers",
        ),
    ],
    ids=range(17),
)
def test_a_paddle_index_that_is_wrong(tmp_path: Path, make: Callable[[], bytes], says: str) -> None:
    (tmp_path / "x_ids.npy").write_bytes(IDS)
    (tmp_path / "x_idx.npz").write_bytes(make())
    with pytest.raises(UserError, match=says) as raised:
        read_paddle(tmp_path / "x_ids.npy", tmp_path / "x_idx.npz")
    assert raised.value.hint


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
    with pytest.raises(UserError, match=f"run/data: {says}"):
        check_ids(arrays, 10, Path("run/data"))
