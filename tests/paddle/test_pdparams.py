"""PaddleFleetX's files are read and written without Paddle, and without executing pickled code."""

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from lathe.backends.paddle_checkpoint import FILE, PART, export_checkpoint, import_checkpoint
from lathe.backends.pdparams import SLICES, read_pdparams, write_pdparams
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.gpt import GPT
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.errors import raises

RECIPE = load_recipe("gpt-345m", ["Model.num_attention_heads=4"])


@pytest.fixture
def dense(tmp_path: Path, small_gpt: GPT, byte_tokenizer: Tokenizer) -> Path:
    save_checkpoint(tmp_path / "dense", small_gpt, byte_tokenizer, "pretrain", RECIPE)
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "dense"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_there_and_back(dense: Path, tmp_path: Path, dtype: str, small_gpt: GPT) -> None:
    path = export_checkpoint(dense, tmp_path / "theirs", dtype)
    assert path == tmp_path / "theirs" / PART / FILE
    stored = read_pdparams(path)
    assert {array.dtype.name for array in stored.values()} == {dtype}
    qkv = stored["gpt.decoder.layers.1.self_attn.qkv_proj.weight"]
    ours = small_gpt.h[1].attn.c_attn.weight  # type: ignore[union-attr]
    assert np.array_equal(qkv, ours.detach().numpy().T.astype(dtype))  # type: ignore[union-attr, operator]
    for source in (tmp_path / "theirs", path.parent, path):
        import_checkpoint(RECIPE, source, tmp_path / "tokenizer.json", tmp_path / "back")
        back = load_checkpoint(tmp_path / "back").model
        assert back.config == small_gpt.config
        for name, tensor in small_gpt.state_dict().items():
            narrow = tensor.to(getattr(torch, dtype)).float()
            assert torch.equal(back.state_dict()[name], narrow), name


@pytest.mark.slow
def test_the_published_shape(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """Names and shapes of two of the 24 layers of GPT-345M, as PaddleFleetX writes them."""
    C, V = 1024, 50304
    shapes = {
        "gpt.embeddings.word_embeddings.weight": (V, C),
        "gpt.embeddings.position_embeddings.weight": (1024, C),
        "gpt.decoder.norm.weight": (C,),
        "gpt.decoder.norm.bias": (C,),
    }
    for i in range(2):
        layer = f"gpt.decoder.layers.{i}."
        shapes |= {
            f"{layer}self_attn.qkv_proj.weight": (C, 3 * C),
            f"{layer}self_attn.qkv_proj.bias": (3 * C,),
            f"{layer}self_attn.out_proj.weight": (C, C),
            f"{layer}self_attn.out_proj.bias": (C,),
            f"{layer}linear1.weight": (C, 4 * C),
            f"{layer}linear1.bias": (4 * C,),
            f"{layer}linear2.weight": (4 * C, C),
            f"{layer}linear2.bias": (C,),
            **{f"{layer}norm{n}.{kind}": (C,) for n in (1, 2) for kind in ("weight", "bias")},
        }
    folder = tmp_path / "epoch_0_step_1000" / PART
    folder.mkdir(parents=True)
    state = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    (folder / FILE).write_bytes(pickle.dumps(state, 2))
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    recipe = load_recipe("gpt-345m")
    config = import_checkpoint(
        recipe, folder.parent, tmp_path / "tokenizer.json", tmp_path / "model"
    )
    assert (config.head_dim, config.n_head, config.n_inner) == (64, (16, 16), (4096, 4096))
    (folder.parent / "mp_01_sharding_00_pp_00").mkdir()
    with raises(Code.INCOMPLETE, "mp_01_sharding_00_pp_00/model.pdparams"):
        import_checkpoint(recipe, folder.parent, tmp_path / "tokenizer.json", tmp_path / "model")


class Malicious:
    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, "posix.system"), (eval, ".eval")],
)
def test_a_file_that_would_run_something_is_refused_by_name(
    function: Callable[..., object], name: str, protocol: int, tmp_path: Path
) -> None:
    proof = tmp_path / "ran"
    code = f"touch {proof}" if function is os.system else f"open({str(proof)!r}, 'w')"
    path = tmp_path / FILE
    path.write_bytes(pickle.dumps({"w": Malicious(function, code)}, protocol))
    with raises(Code.UNSAFE, name):
        read_pdparams(path)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"", Code.MALFORMED, "not a .pdparams"),
        (b"\x80\x04garbage", Code.MALFORMED, "not a .pdparams"),
        (pickle.dumps([1, 2]), Code.WRONG_KIND, "a list"),
        (pickle.dumps({"w": "text"}), Code.MALFORMED, "w is a str"),
        (
            pickle.dumps({"w": np.array([{}, "x"], object)}),
            Code.MALFORMED,
            "array of Python objects",
        ),
        (pickle.dumps({"w": np.zeros(9)})[:-20], Code.MALFORMED, "not a .pdparams"),
    ],
)
def test_other_files_are_refused(content: bytes, code: Code, message: str, tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(content)
    with raises(code, message):
        read_pdparams(path)


def test_slices_and_bfloat16(tmp_path: Path) -> None:
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    state = OrderedDict(
        {
            "w@@.0": whole.ravel()[:7],
            "w@@.1": whole.ravel()[7:],
            "UnpackBigParamInfor@@": {"w": {"OriginShape": (3, 4), "slices": ["w@@.0", "w@@.1"]}},
            "b": ("linear_0.b_0", np.array([0x3F80, 0xC000], np.uint16)),
            "StructuredToParameterName@@": {"w": "linear_0.w_0"},
        }
    )
    (tmp_path / FILE).write_bytes(pickle.dumps(state, 2))
    read = read_pdparams(tmp_path / FILE)
    assert np.array_equal(read["w"], whole)
    assert read["b"].tolist() == [1.0, -2.0]
    assert set(read) == {"w", "b"}


def test_paddle_saves_what_is_read_and_loads_what_is_written(
    in_paddle: Callable, dense: Path, tmp_path: Path
) -> None:
    path = export_checkpoint(dense, tmp_path / "theirs")
    out = in_paddle(
        f"""
        state = paddle.load({str(path)!r})
        name = "gpt.decoder.layers.0.linear1.weight"
        out["loaded"] = state[name].numpy()
        paddle.seed(3)
        layer = paddle.nn.Linear(3, 5)
        out["weight"] = layer.weight.numpy()
        for protocol in (2, 4):
            paddle.save(layer.state_dict(), str(folder / f"p{{protocol}}"), protocol=protocol)
        layer.astype("float16")
        out["half"] = layer.weight.numpy()
        paddle.save(layer.state_dict(), str(folder / "half"))
        """
    )
    assert np.array_equal(out["loaded"], read_pdparams(path)["gpt.decoder.layers.0.linear1.weight"])
    for name in ("p2", "p4"):
        read = read_pdparams(tmp_path / name)
        assert set(read) == {"weight", "bias"}
        assert np.array_equal(read["weight"], out["weight"])
    half = read_pdparams(tmp_path / "half")["weight"]
    assert half.dtype == np.float16
    assert np.array_equal(half, out["half"])


def test_shapes_that_do_not_fit(dense: Path, tmp_path: Path) -> None:
    path = export_checkpoint(dense, tmp_path / "theirs")
    wrong = load_recipe("gpt-345m", ["Model.hidden_size=1000", "Model.num_attention_heads=5"])
    with raises(Code.MISMATCH, "Model.num_attention_heads 5"):
        import_checkpoint(wrong, path, tmp_path / "tokenizer.json", tmp_path / "out")


RECONSTRUCT = np.zeros(1).__reduce__()[0]


class Call:
    """Object that is pickled as a call of a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


def nested(depth: int) -> bytes:
    return b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b"."


def cut(**info: object) -> bytes:
    zeros = np.zeros(4, np.float32)
    return pickle.dumps({"a": zeros, "b": zeros, "n": 3, SLICES: {"w": info} if info else 3})


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (nested(1_000_000), Code.WRONG_KIND, "a list"),
        (b"\x80\x04}X\x01\0\0\0w" + nested(200_000)[2:-1] + b"s.", Code.MALFORMED, "w is a list"),
        (pickle.dumps({3: np.zeros(2)}), Code.MALFORMED, "a int"),
        (pickle.dumps({("a", "b"): np.zeros(2)}), Code.MALFORMED, "a tuple"),
        (pickle.dumps({"w": Call(np.ndarray, (1 << 40,))}), Code.MALFORMED, "not a .pdparams"),
        (
            pickle.dumps({"w": Call(RECONSTRUCT, np.ndarray, (1 << 40,), b"b")}),
            Code.MALFORMED,
            "not a .pdparams",
        ),
        (pickle.dumps({"w": np.zeros(3, "S4")}), Code.MALFORMED, "w is a ndarray"),
        (pickle.dumps({"w": np.zeros(3, "c16")}), Code.MALFORMED, "w is a ndarray"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0f.", Code.MALFORMED, "not a .pdparams"),
        (b"\x80\x04" + b"(" * 100_000, Code.MALFORMED, "not a .pdparams"),
        (cut(), Code.CORRUPT, "slices"),
        (cut(slices=["a", "b"]), Code.CORRUPT, "slices"),
        (cut(OriginShape=[8]), Code.CORRUPT, "slices"),
        (cut(slices=["a", "absent"], OriginShape=[8]), Code.CORRUPT, "slices"),
        (cut(slices=["a", "b"], OriginShape=[9]), Code.CORRUPT, "slices"),
        (cut(slices=["a", "b"], OriginShape=[1 << 60]), Code.CORRUPT, "slices"),
        (cut(slices=["a", "n"], OriginShape=[5]), Code.CORRUPT, "slices"),
        (cut(slices=3, OriginShape=[8]), Code.CORRUPT, "slices"),
        (cut(slices=[], OriginShape=[0]), Code.CORRUPT, "slices"),
        (cut(slices=["a", "a"], OriginShape=[8]), Code.CORRUPT, "slices"),
    ],
    ids=range(20),
)
def test_a_files_metadata_is_checked_against_its_arrays(
    content: bytes, code: Code, message: str, tmp_path: Path
) -> None:
    path = tmp_path / FILE
    path.write_bytes(content)
    with raises(code, message) as raised:
        read_pdparams(path)
    assert raised.value.hint


def test_a_folder_or_nothing_in_place_of_a_file(tmp_path: Path) -> None:
    with raises(Code.WRONG_KIND, tmp_path):
        read_pdparams(tmp_path)
    with raises(Code.NOT_FOUND, "none.pdparams"):
        read_pdparams(tmp_path / "none.pdparams")


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (
            {"gpt.decoder.norm.weight": np.zeros(4, np.int32)},
            Code.UNSUPPORTED,
            "gpt.decoder.norm.weight contains int32",
        ),
        ({"decoder.norm.weight": np.zeros(4, np.float32)}, Code.DUPLICATE, "decoder.norm.weight"),
        (
            {"gpt.embeddings.word_embeddings.weight": np.zeros(4, np.float32)},
            Code.INCOMPLETE,
            "not a complete GPT",
        ),
        (
            {"gpt.embeddings.word_embeddings.weight": np.zeros((4, 0), np.float32)},
            Code.INCOMPLETE,
            "not a complete GPT",
        ),
        (
            {"gpt.decoder.layers.0.linear1.weight": np.zeros(4, np.float32)},
            Code.INCOMPLETE,
            "not a complete GPT",
        ),
        (
            {f"gpt.decoder.layers.{9**99}.linear1.weight": np.zeros(4, np.float32)},
            Code.INCOMPLETE,
            "not a complete GPT",
        ),
    ],
    ids=range(6),
)
def test_tensors_that_do_not_form_a_gpt(
    changes: dict[str, np.ndarray], code: Code, message: str, tmp_path: Path
) -> None:
    arrays = {
        "gpt.embeddings.word_embeddings.weight": np.zeros((9, 4), np.float32),
        "gpt.embeddings.position_embeddings.weight": np.zeros((8, 4), np.float32),
        "gpt.decoder.norm.weight": np.zeros(4, np.float32),
        "gpt.decoder.layers.0.self_attn.qkv_proj.weight": np.zeros((4, 12), np.float32),
    }
    path = tmp_path / FILE
    write_pdparams(path, arrays | changes)
    recipe = load_recipe("tiny", ["Model.num_attention_heads=2"])
    with raises(code, message):
        import_checkpoint(recipe, path, tmp_path / "tokenizer.json", tmp_path / "model")
