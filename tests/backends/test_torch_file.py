"""Files of torch.save are read without torch, and nothing in them is executed."""

import io
import os
import pickle
import random
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lathe.backends.torch_file import Placeholder, Storage, StorageType, TensorView, open_torch_file
from lathe_base.errors import Code, UserError
from tests.support.errors import raises

WHOLE = torch.arange(24, dtype=torch.float32).reshape(4, 6)
TENSORS = {
    "float32": WHOLE,
    "float16": WHOLE.half(),
    "bfloat16": WHOLE.bfloat16() / 3,
    "float64": WHOLE.double(),
    "int64": WHOLE.long(),
    "bool": WHOLE > 3,
    "transposed": WHOLE.t(),
    "slice": WHOLE[1:3, ::2],
    "parameter": torch.nn.Parameter(WHOLE[1]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "no-stride": WHOLE[0, :1].expand(1, 1),
}


def refused(path: Path, code: Code = Code.MALFORMED) -> str:
    with raises(code, path.name) as caught, open_torch_file(path) as file:
        file.array(file.value["w"])
    assert caught.value.hint and len(caught.value.what) < 1000
    return str(caught.value)


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_are_read_bit_for_bit(legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(OrderedDict(TENSORS), path, _use_new_zipfile_serialization=not legacy)
    with open_torch_file(path) as file:
        assert list(file.value) == list(TENSORS)
        for name, tensor in TENSORS.items():
            expected = tensor.detach()
            if tensor.dtype == torch.bfloat16:
                expected = expected.float()
            found = file.array(file.value[name])
            assert found.dtype == expected.numpy().dtype, name
            assert np.array_equal(found, expected.numpy()), name


def test_objects_of_other_classes_keep_their_attributes_and_do_nothing(tmp_path: Path) -> None:
    saved = {
        "args": Namespace(num_layers=2, dtype=torch.float16, nested=Namespace(seed=1)),
        "rng": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
        "path": Path("/etc"),
        "set": {1, 2},
        "lambda": os.path.join,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
    }
    path = tmp_path / "x.pt"
    torch.save(saved, path)
    with open_torch_file(path) as file:
        found = file.value
    assert isinstance(found["args"], Placeholder)
    assert vars(found["args"])["num_layers"] == 2
    assert vars(vars(found["args"])["nested"]) == {"seed": 1}
    assert not isinstance(found["path"], Path)
    assert found["lambda"] is not os.path.join


class Call:
    """Object that is pickled as a call of a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


def zipped(path: Path, data: bytes, **entries: bytes) -> Path:
    """A zip archive as torch.save writes it, around any pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("x/data.pkl", data)
        archive.writestr("x/byteorder", entries.pop("byteorder", b"little"))
        for name, content in entries.items():
            archive.writestr(f"x/data/{name.removeprefix('_')}", content)
    return path


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "function", [os.system, eval, exec, os.popen, __import__, open], ids=lambda f: f.__name__
)
def test_a_pickle_that_would_run_something_runs_nothing(
    function: Callable[..., object], legacy: bool, protocol: int, tmp_path: Path
) -> None:
    proof = tmp_path / "ran"
    code = f"touch {proof}" if function in (os.system, os.popen) else f"open({str(proof)!r}, 'w')"
    arguments = (str(proof), "w") if function is open else (code,)
    value = {"args": Call(function, *arguments), "w": Call(function, *arguments)}
    path = tmp_path / "x.pt"
    if legacy:
        torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    else:
        zipped(path, pickle.dumps(value, protocol))
    with open_torch_file(path) as file:
        found = file.value["args"]
    assert isinstance(found, Placeholder) and not proof.exists()


def global_(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


@pytest.mark.parametrize(
    "program",
    [
        # GLOBAL, then BUILD with a state that sets attributes of what the global stands for.
        global_("torch._utils", "_rebuild_tensor_v2") + b"(N}\x8c\x04nameI1\nst\x86b.",
        global_("collections", "OrderedDict") + b"N}\x8c\x05itemsI1\ns\x86b.",
        global_("torch", "FloatStorage") + b"}\x8c\x05dtypeI1\nsb.",
        global_("os", "system") + b"N}\x8c\x0c__setstate__I1\ns\x86b.",
        global_("builtins", "getattr") + b"(" + global_("os", "system") + b"\x8c\x08__call__tR.",
        b"(\x8c\x04a.ptios\nsystem\n.",  # INST
        b"\x82\x01.",  # a code of the extension registry
        b"\x80\x7f.",
        b"\x80\x02]" * 3,
    ],
    ids=range(9),
)
def test_hand_written_pickles_change_nothing(program: bytes, tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.pt", b"\x80\x04" + program)
    try:
        with open_torch_file(path) as file:
            assert not callable(getattr(file.value, "__code__", None))
    except UserError:
        pass
    torch.save({"w": WHOLE}, tmp_path / "good.pt")
    with open_torch_file(tmp_path / "good.pt") as file:  # the reader is as it was
        assert np.array_equal(file.array(file.value["w"]), WHOLE.numpy())
    assert OrderedDict(a=1).items() and Placeholder().__setstate__ is not None


class Reference:
    """A tensor with any storage, shape and strides, pickled as torch does."""

    def __init__(self, *values: Any, storage: tuple[Any, ...] | None = None) -> None:
        self.values, self.storage = values, storage


class Pickler(pickle.Pickler):
    """Writes a `Reference` as a tensor."""

    def persistent_id(self, value: Any) -> Any:
        return value.storage if isinstance(value, Reference) and value.storage else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Reference):
            storage = ("storage", torch.FloatStorage, "0", "cpu", value.values[3])
            held = Reference(storage=storage)
            return torch._utils._rebuild_tensor_v2, (
                *(held, *value.values[:3], False, OrderedDict()),
            )
        return NotImplemented


def forged(path: Path, offset: Any, shape: Any, stride: Any, numel: Any, **entries: bytes) -> Path:
    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"w": Reference(offset, shape, stride, numel)})
    return zipped(path, buffer.getvalue(), **entries)


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "numel", "says"),
    [
        (0, (2, 2), (2, 1), 4, ""),
        (0, (5,), (1,), 4, "beyond its storage"),
        (1, (2, 2), (2, 1), 4, "beyond its storage"),
        (-1, (2,), (1,), 4, "do not fit"),
        (0, (2,), (-1,), 4, "do not fit"),
        (0, (-2,), (1,), 4, "do not fit"),
        (0, (2,), (1, 1), 4, "do not fit"),
        (0, (1 << 40,), (0,), 4, "beyond its storage"),  # one element, repeated
        (0, (1 << 59, 1 << 59), (0, 0), 4, "beyond its storage"),
        (0, (1,) * 99, (1,) * 99, 4, "do not fit"),
        (0, (2.0,), (1,), 4, "do not fit"),
        (0, [2], [1], 4, "not a tuple"),
        (0, (2,), (1,), 8, "has 16 bytes, not 32"),
        (0, (2,), (1,), 1 << 50, "has 16 bytes, not"),
        (0, (2,), (1,), -4, "without a size"),
        (0, (2,), (1,), "4", "without a size"),
        (0, (True,), (1,), 4, "do not fit"),
    ],
)
def test_forged_sizes_are_held_against_the_file(
    offset: Any, shape: Any, stride: Any, numel: Any, says: str, tmp_path: Path
) -> None:
    content = np.arange(4, dtype=np.float32).tobytes()
    path = forged(tmp_path / "x.pt", offset, shape, stride, numel, _0=content)
    if says:
        assert says in refused(path)
        return
    with open_torch_file(path) as file:
        assert file.array(file.value["w"]).tolist() == [[0, 1], [2, 3]]


def test_a_storage_that_is_missing_or_compressed_is_named(tmp_path: Path) -> None:
    assert "x/data/0 is missing" in refused(forged(tmp_path / "x.pt", 0, (2,), (1,), 4))
    path = tmp_path / "packed.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}))
    assert "compressed" in refused(path)


def test_other_zip_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "not one of torch.save" in refused(path)
    big = zipped(tmp_path / "big.pt", pickle.dumps({}), byteorder=b"big")
    assert "big-endian" in refused(big)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        b"text",
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.",  # only the magic number
        pickle.dumps({"w": 1}),
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0f.",
        b"\x80\x04" + b"]" * 100_000,
        b"\x80\x04(" * 100_000 + b".",
    ],
    ids=range(8),
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    assert "cannot be read as a file of torch.save" in refused(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_every_truncation_is_an_error_or_harmless(legacy: bool, tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save({"w": WHOLE}, whole, _use_new_zipfile_serialization=not legacy)
    content = whole.read_bytes()
    for size in range(0, len(content), 7):
        path = tmp_path / "x.pt"
        path.write_bytes(content[:size])
        assert "cannot be read" in refused(path)


@pytest.mark.parametrize("legacy", [False, True])
@given(data=st.data())
def test_a_flipped_byte_is_an_error_or_the_same_kind_of_file(
    legacy: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    buffer = io.BytesIO()
    torch.save({"w": WHOLE, "a": Namespace(b=1)}, buffer, _use_new_zipfile_serialization=not legacy)
    content = bytearray(buffer.getvalue())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flipped") / "x.pt"
    path.write_bytes(content)
    try:
        with open_torch_file(path) as file:
            view = file.value.get("w") if isinstance(file.value, dict) else None
            if isinstance(view, TensorView):
                file.array(view)
    except UserError:
        pass


def test_a_flipped_byte_of_a_weight_is_found_by_the_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": WHOLE}, path)
    content = path.read_bytes()
    at = content.index(struct.pack("<3f", 1, 2, 3))
    path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    assert "Bad CRC-32" in refused(path)


def test_links_folders_and_pipes_in_place_of_a_file(tmp_path: Path) -> None:
    torch.save({"w": WHOLE}, tmp_path / "real.pt")
    link = tmp_path / "link.pt"
    link.symlink_to("real.pt")
    with open_torch_file(link) as file:
        assert file.value["w"].shape == (4, 6)
    circle = tmp_path / "circle.pt"
    circle.symlink_to("circle.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    for name, code in (
        ("circle.pt", Code.BAD_PATH),
        ("pipe.pt", Code.WRONG_KIND),
        (".", Code.WRONG_KIND),
    ):
        refused(tmp_path / name, code)


def test_a_view_that_was_not_read_from_a_file_is_checked_too() -> None:
    view = TensorView(Storage(StorageType("<f4"), "0", 4), 0, (2, 2), (2, 1))
    assert view.n_elements == 4
    with pytest.raises(ValueError, match="beyond its storage"):
        assert view._replace(offset=2).n_elements
