"""Both formats against bytes packed with `struct` according to their specifications."""

import io
import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from lathe.data.megatron import MegatronWriter
from lathe.data.paddle import PaddleWriter
from lathe.data.tokens import WRITERS, TokenDataset, read_data_metadata
from lathe_base.artifacts.kinds import DATA
from lathe_base.errors import Code, UserError
from tests.support.errors import raises

DOCUMENTS = [[5, 6, 7], [65000], [8, 9]]
TOKENS = [5, 6, 7, 65000, 8, 9]
METADATA_TEXT = json.dumps({"documents": 3, "tokens": 6, "vocab_size": 65001, "eos_id": 0})


def golden_idx(code: int, width: int, modes: bytes = b"") -> bytes:
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", 3)
        + struct.pack("<Q", 4)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 3 * width, 4 * width)
        + struct.pack("<4q", 0, 1, 2, 3)
        + modes
    )


def golden_npy(descr: str, letter: str) -> bytes:
    """NPY 1.0: magic, version, u16 length, and a dict padded to a multiple of 64 bytes."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': (6,), }}"
    header = text.encode().ljust(128 - 10 - 1) + b"\n"
    return (
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", len(header))
        + header
        + struct.pack(f"<6{letter}", *TOKENS)
    )


def write(format: str, folder: Path, vocab_size: int) -> TokenDataset:
    folder.mkdir(exist_ok=True)
    with WRITERS[format](folder / "tokens", vocab_size) as writer:
        for tokens in DOCUMENTS:
            writer.append(tokens)
    (folder / DATA.metadata_file).write_text(METADATA_TEXT)
    return TokenDataset.open(folder)


@pytest.mark.parametrize(
    ("vocab_size", "code", "width", "letter"), [(65499, 8, 2, "H"), (65500, 4, 4, "i")]
)
def test_megatron_bytes(
    tmp_path: Path, vocab_size: int, code: int, width: int, letter: str
) -> None:
    with MegatronWriter(tmp_path / "x", vocab_size) as writer:
        for tokens in DOCUMENTS:
            writer.append(tokens)
    assert (tmp_path / "x.idx").read_bytes() == golden_idx(code, width)
    assert (tmp_path / "x.bin").read_bytes() == struct.pack(f"<6{letter}", *TOKENS)


@pytest.mark.parametrize(
    ("vocab_size", "descr", "letter"), [(65534, "<u2", "H"), (65535, "<i4", "i")]
)
def test_paddle_bytes(tmp_path: Path, vocab_size: int, descr: str, letter: str) -> None:
    with PaddleWriter(tmp_path / "x", vocab_size) as writer:
        for tokens in DOCUMENTS:
            writer.append(tokens)
    assert (tmp_path / "x_ids.npy").read_bytes() == golden_npy(descr, letter)
    with zipfile.ZipFile(tmp_path / "x_idx.npz") as archive:
        assert sorted(archive.namelist()) == ["docs.npy", "lens.npy"]
        lens = np.load(io.BytesIO(archive.read("lens.npy")))
        docs = np.load(io.BytesIO(archive.read("docs.npy")))
    assert (lens.dtype, lens.tolist()) == (np.int32, [3, 1, 2])
    assert (docs.dtype, docs.tolist()) == (np.int64, [0, 1, 2, 3])


def test_paddle_writer_equals_numpy(tmp_path: Path) -> None:
    """The header, written before the count is known, equals that of `np.save`."""
    with PaddleWriter(tmp_path / "x", 50257) as writer:
        for i in range(700):
            writer.append([i] * 250)
    buffer = io.BytesIO()
    np.save(buffer, np.repeat(np.arange(700, dtype=np.uint16), 250))
    assert (tmp_path / "x_ids.npy").read_bytes() == buffer.getvalue()


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
@pytest.mark.parametrize("modes", [b"", b"\x00\x01\x02"])
def test_reads_megatron_of_others(tmp_path: Path, code: int, letter: str, modes: bytes) -> None:
    documents = [[5, 6, 7], [100], [8, 9]]
    (tmp_path / "other.idx").write_bytes(golden_idx(code, struct.calcsize(letter), modes))
    (tmp_path / "other.bin").write_bytes(struct.pack(f"<6{letter}", 5, 6, 7, 100, 8, 9))
    (tmp_path / DATA.metadata_file).write_text(METADATA_TEXT)
    dataset = TokenDataset.open(tmp_path)
    assert [row.tolist() for row in dataset] == documents
    assert isinstance(dataset.arrays.tokens, np.memmap)
    assert dataset.arrays.doc_idx.tolist() == [0, 1, 2, 3]
    assert (dataset.arrays.modes is None) == (modes == b"")
    if dataset.arrays.modes is not None:
        assert dataset.arrays.modes.tolist() == [0, 1, 2]


def test_reads_paddle_of_others(tmp_path: Path) -> None:
    (tmp_path / "my_ids.npy").write_bytes(golden_npy("<i4", "i"))
    np.savez(tmp_path / "my_idx.npz", lens=np.array([3, 1, 2]), docs=np.array([0, 1, 2, 3]))
    (tmp_path / DATA.metadata_file).write_text(METADATA_TEXT)
    dataset = TokenDataset.open(tmp_path)
    assert [row.tolist() for row in dataset] == DOCUMENTS
    assert (dataset.sizes.dtype, dataset.sizes.tolist()) == (np.int32, [3, 1, 2])
    assert isinstance(dataset.arrays.tokens, np.memmap)


@pytest.mark.parametrize("format", WRITERS)
def test_documents_of_several_sequences(
    tmp_path: Path, format: str, byte_tokenizer: Tokenizer
) -> None:
    with WRITERS[format](tmp_path / "tokens", 257) as writer:
        writer.extend(np.array([5, 6, 7, 8]), [1, 2, 1], [2, 1])
        writer.append([9])
        writer.extend(np.array([300, 10]), [1, 1], [2])
    ((_, part),) = TokenDataset.open(tmp_path).parts
    assert [row.tolist() for row in part] == [[5], [6, 7], [8], [9], [300], [10]]
    assert part.arrays.doc_idx.tolist() == [0, 2, 3, 4, 6]
    assert part.arrays.document_sizes.tolist() == [3, 1, 1, 2]
    assert (part.metadata["documents"], part.metadata["tokens"]) == (4, 7)
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with raises(Code.WRONG_TOKENIZER, "document 3 contains token 300"):
        TokenDataset.open(tmp_path)


@pytest.mark.parametrize("docs", [[], [0], [0, 4], [1, 3], [0, 2, 1, 3]])
def test_paddles_docs_may_be_anything(
    tmp_path: Path, docs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """PaddleFleetX does not read them."""
    (tmp_path / "my_ids.npy").write_bytes(golden_npy("<i4", "i"))
    np.savez(tmp_path / "my_idx.npz", lens=np.array([3, 1, 2]), docs=np.array(docs, np.int64))
    ((_, part),) = TokenDataset.open(tmp_path).parts
    assert part.arrays.document_bounds.tolist() == [0, 1, 2, 3]
    assert "my_idx.npz: ignoring docs, which does not fit its 3 sequences" in caplog.text


@pytest.mark.parametrize("format", WRITERS)
def test_round_trip(tmp_path: Path, format: str) -> None:
    dataset = write(format, tmp_path, 65001)
    assert (len(dataset), dataset.vocab_size, dataset.eos_id) == (3, 65001, 0)
    assert [row.tolist() for row in dataset] == DOCUMENTS
    assert dataset.span(0, 1, 3).tolist() == [6, 7]


def test_a_foreign_folder_is_described_by_its_tokenizer(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    with WRITERS["megatron"](tmp_path / "tokens", 257) as writer:
        for tokens in ([1, 2, 256], [3], [4, 256]):
            writer.append(tokens)
    assert not TokenDataset.open(tmp_path).has_vocabulary
    with raises(Code.INCOMPLETE, tmp_path, "--tokenizer", "gpt2-vocab.json", "beside"):
        _ = TokenDataset.open(tmp_path).vocab_size
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    metadata = TokenDataset.open(tmp_path).metadata
    expected = {"format": "megatron", "documents": 3, "tokens": 6, "vocab_size": 257, "eos_id": 256}
    assert metadata == expected
    with WRITERS["megatron"](tmp_path / "tokens", 257) as writer:
        writer.append([1, 257])
    with raises(Code.WRONG_TOKENIZER, "document 0 contains token 257"):
        TokenDataset.open(tmp_path)


def test_more_than_one_pair_is_an_error_that_names_them(tmp_path: Path) -> None:
    write("megatron", tmp_path, 65001)
    with PaddleWriter(tmp_path / "second", 65001) as writer:
        writer.append([1])
    with raises(Code.AMBIGUOUS, "tokens.bin + tokens.idx, second_ids.npy + second"):
        TokenDataset.open(tmp_path)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "tokens_ids.npy", "tokens_idx.npz"])
@pytest.mark.parametrize("kept", [None, 0, 10, -1])
def test_missing_or_cut_files_are_named(tmp_path: Path, name: str, kept: int | None) -> None:
    write("paddle" if "_" in name else "megatron", tmp_path, 65001)
    file = tmp_path / name
    if kept is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match=name):
        TokenDataset.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "code", "text"),
    [
        (b"MMIDIDX\0\0" + bytes(25), Code.WRONG_VERSION, "version 0"),
        (golden_idx(7, 4), Code.UNSUPPORTED, "code 7"),
        (golden_idx(99, 2), Code.UNSUPPORTED, "code 99"),
        (golden_idx(8, 2) + b"\0" * 5, Code.CORRUPT, "3 sequences"),
        (golden_idx(8, 3), Code.CORRUPT, "outside tokens.bin"),
        (golden_idx(4, 4), Code.CORRUPT, "24"),
    ],
)
def test_broken_indexes(tmp_path: Path, index: bytes, code: Code, text: str) -> None:
    write("megatron", tmp_path, 100)
    (tmp_path / "tokens.idx").write_bytes(index)
    with raises(code, text):
        TokenDataset.open(tmp_path)


def test_metadata_of_other_files(tmp_path: Path) -> None:
    write("megatron", tmp_path, 100)
    (tmp_path / DATA.metadata_file).write_text(METADATA_TEXT.replace("6", "7"))
    with raises(Code.MISMATCH, "data.json", "7", "6"):
        TokenDataset.open(tmp_path)
    (tmp_path / DATA.metadata_file).write_text("{")
    with raises(Code.MALFORMED, "data.json", "JSON"):
        TokenDataset.open(tmp_path)


def test_folders_without_a_data_set(tmp_path: Path) -> None:
    with raises(Code.WRONG_KIND, tmp_path, "_ids.npy"):
        TokenDataset.open(tmp_path)
    with raises(Code.NOT_FOUND, tmp_path / "nowhere"):
        TokenDataset.open(tmp_path / "nowhere")


def test_a_failed_writer_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(OverflowError), MegatronWriter(tmp_path / "x", 1000) as writer:
        writer.append([70000])
    assert not (tmp_path / "x.idx").exists()


def test_a_pipe_in_place_of_the_metadata(tmp_path: Path) -> None:
    """The pipe is not opened, which would block forever."""
    os.mkfifo(tmp_path / "data.json")
    with raises(Code.WRONG_KIND, "data.json", "pipe"):
        read_data_metadata(tmp_path)
