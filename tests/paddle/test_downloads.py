"""PaddleFleetX's models are imported as they were downloaded or saved: archives, parts of several
ranks, separate projections, and PaddleSlim's fake quantization."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe.backends.paddle_checkpoint import FILE, PART, export_checkpoint, import_checkpoint
from lathe.backends.pdparams import read_pdparams, write_pdparams
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.config import read_config
from lathe.model.gpt import GPT
from lathe.model.quantization import LinearFormat, WeightFormat
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.tables import quick_only

RECIPE = load_recipe("gpt-345m", ["Model.num_attention_heads=4"])
HEADS, LAYERS = 4, 2
Arrays = dict[str, NDArray[Any]]


@pytest.fixture
def state(tmp_path: Path, small_gpt: GPT, byte_tokenizer: Tokenizer) -> Arrays:
    """A single card's state dictionary of `small_gpt`."""
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_checkpoint(tmp_path / "dense", small_gpt, byte_tokenizer, "pretrain", RECIPE)
    return dict(read_pdparams(export_checkpoint(tmp_path / "dense", tmp_path / "theirs")))


def imported(source: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    import_checkpoint(RECIPE, source, tmp_path / "tokenizer.json", tmp_path / "back")
    return load_checkpoint(tmp_path / "back").model.state_dict()


def assert_same(found: Mapping[str, torch.Tensor], model: GPT) -> None:
    """Compare all weights; ranges of quantized inputs are no weights."""
    expected = model.state_dict()
    assert {name for name in found if ".observer." not in name} == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def pack(path: Path, mode: str, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def packed_model(tmp_path: Path) -> bytes:
    return (tmp_path / "theirs" / PART / FILE).read_bytes()


@pytest.mark.parametrize(
    ("name", "mode", "folder"),
    [
        ("GPT_345M.tar.gz", "w:gz", "PaddleFleetX_GPT_345M_220826"),
        ("GPT_345M_300B_DP_20220826.tgz", "w:gz", "./ckpt/PaddleFleetX_GPT_345M_220826"),
        ("model.tar", "w", ""),
        ("compressed.tar", "w:gz", "a"),
        ("model.tar.xz", "w:xz", "a/b/c"),
    ],
)
def test_archives_are_read_as_downloaded(
    name: str, mode: str, folder: str, state: Arrays, small_gpt: GPT, tmp_path: Path
) -> None:
    inside = "/".join(part for part in (folder, PART) if part)
    files = {
        f"{inside}/._{FILE}": b"macOS",
        f"{inside}/model_state.pdopt": b"optimizer",
        f"{inside}/{FILE}": packed_model(tmp_path),
        "../escaped": b"never written",
    }
    assert_same(imported(pack(tmp_path / name, mode, files), tmp_path), small_gpt)
    assert not (tmp_path.parent / "escaped").exists()


def test_links_in_an_archive_are_not_followed(state: Arrays, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "link.tar", "w") as archive:
        member = tarfile.TarInfo(FILE)
        member.type, member.linkname = tarfile.SYMTYPE, str(tmp_path / "theirs" / PART / FILE)
        archive.addfile(member)
    with raises(Code.WRONG_KIND, "link.tar"):
        imported(tmp_path / "link.tar", tmp_path)


def test_every_broken_archive_has_an_error_of_its_own(state: Arrays, tmp_path: Path) -> None:
    model = packed_model(tmp_path)
    whole = pack(tmp_path / "whole.tar.gz", "w:gz", {f"a/{FILE}": model, "b/rest": model})
    (tmp_path / "cut.tar.gz").write_bytes(whole.read_bytes()[:-2000])
    (tmp_path / "early.tar.gz").write_bytes(whole.read_bytes()[:5000])
    (tmp_path / "no.tar").write_bytes(b"<html>404</html>" * 100)
    (tmp_path / "empty.tar.gz").write_bytes(b"")
    pack(tmp_path / "other.tar", "w", {"readme": b"text"})
    pack(tmp_path / "two.tar", "w", {f"a/{PART}/{FILE}": model, f"b/{FILE}": model})
    pack(tmp_path / "twice.tar", "w", {f"a/{FILE}": model} | {f"./a/{FILE}": model})
    with (
        gzip.open(tmp_path / "bomb.tar.gz", "wb") as bomb,
        tarfile.open(fileobj=bomb, mode="w") as t,
    ):
        member = tarfile.TarInfo(FILE)
        member.size = 100 << 20
        t.addfile(member, io.BytesIO(bytes(100 << 20)))
    for name, (code, message) in {
        "cut.tar.gz": (Code.CORRUPT, ""),
        "early.tar.gz": (Code.CORRUPT, ""),
        "no.tar": (Code.MALFORMED, "as a tar file"),
        "empty.tar.gz": (Code.MALFORMED, "as a tar file"),
        "other.tar": (Code.WRONG_KIND, FILE),
        "two.tar": (Code.AMBIGUOUS, "a, b"),
        "twice.tar": (Code.DUPLICATE, f"a/{FILE}"),
        "bomb.tar.gz": (Code.TOO_LARGE, "104,857,600 bytes"),
    }.items():
        with raises(code, name, message) as raised:
            imported(tmp_path / name, tmp_path)
        assert raised.value.hint
        assert not (tmp_path / "back").exists()


def test_a_prefix_and_a_single_cards_folder(state: Arrays, small_gpt: GPT, tmp_path: Path) -> None:
    folder = tmp_path / "output" / "epoch_0_step_20"
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(packed_model(tmp_path))
    for source in (folder / "model", folder, folder.parent):
        assert_same(imported(source, tmp_path), small_gpt)
    (tmp_path / "output" / "epoch_1_step_40").mkdir()
    (tmp_path / "output" / "epoch_1_step_40" / FILE).write_bytes(packed_model(tmp_path))
    with raises(Code.AMBIGUOUS, "epoch_0_step_20, ", "epoch_1"):
        imported(folder.parent, tmp_path)
    with raises(Code.NOT_FOUND, folder / "other"):
        imported(folder / "other", tmp_path)


def sliced(state: Arrays, rank: int, of: int) -> Arrays:
    """What a tensor-parallel rank holds: slices of qkv and linear1 by columns, of out_proj and
    linear2 by rows, and of the token embedding by rows."""

    def cut(name: str, array: NDArray[Any]) -> NDArray[Any]:
        column = "qkv_proj" in name or "linear1" in name
        row = "out_proj.weight" in name or "linear2.weight" in name
        if column or row or "word_embeddings" in name:
            return np.split(array, of, axis=-1 if column else 0)[rank]
        return array

    return {name: cut(name, array) for name, array in state.items()}


def staged(state: Arrays, stage: int, prefix: str = "_layers.") -> Arrays:
    """What a stage of a pipeline of two holds."""
    embeddings = {
        f"{prefix}shared_layers.embed.{kind}_embeddings.weight": state[
            f"gpt.embeddings.{kind}_embeddings.weight"
        ].copy()
        for kind in ("word", "position")
    }
    block = f"gpt.decoder.layers.{stage}."
    found = embeddings | {
        f"{prefix}{stage + 1}.{name.removeprefix(block)}": array
        for name, array in state.items()
        if name.startswith(block)
    }
    if stage == LAYERS - 1:
        found[f"{prefix}shared_layers.embed.position_embeddings.weight"] += 1  # never used
        for kind in ("weight", "bias"):
            found[f"{prefix}{LAYERS + 1}.norm.{kind}"] = state[f"gpt.decoder.norm.{kind}"]
    return found


def write_rank(folder: Path, mp: int, sharding: int, pp: int, arrays: Arrays) -> None:
    part = folder / f"mp_{mp:02}_sharding_{sharding:02}_pp_{pp:02}"
    part.mkdir(parents=True)
    write_pdparams(part / FILE, arrays)


@pytest.fixture
def even(state: Arrays, tmp_path: Path) -> tuple[Arrays, GPT]:
    """A model whose vocabulary two ranks can share, and the same in torch."""
    table = "gpt.embeddings.word_embeddings.weight"
    rows = len(state[table])
    state[table] = np.concatenate([state[table], state[table][: rows % 2]])
    write_pdparams(tmp_path / FILE, state)
    import_checkpoint(RECIPE, tmp_path / FILE, tmp_path / "tokenizer.json", tmp_path / "unmerged")
    return state, load_checkpoint(tmp_path / "unmerged").model


@pytest.mark.parametrize(
    ("mp", "sharding", "pp"),
    quick_only(product((1, 2), repeat=3), [(1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2, 2)]),
)
def test_ranks_are_merged_bit_for_bit(
    mp: int, sharding: int, pp: int, even: tuple[Arrays, GPT], tmp_path: Path
) -> None:
    state, model = even
    folder = tmp_path / "epoch_0_step_8"
    for m in range(mp):
        mine = sliced(state, m, mp)
        for p in range(pp):
            for s in range(sharding):
                write_rank(folder, m, s, p, staged(mine, p) if pp > 1 else mine)
    first = folder / PART
    for source in (folder, first, first / FILE):
        assert_same(imported(source, tmp_path), model)
    files = {f"GPT/{p.relative_to(folder)}": p.read_bytes() for p in folder.rglob(FILE)}
    archive = pack(tmp_path / "GPT.tar.gz", "w:gz", dict(reversed(files.items())))
    assert_same(imported(archive, tmp_path), model)
    tokens = torch.arange(20)[None]
    merged = load_checkpoint(tmp_path / "back").model
    with torch.no_grad():
        assert torch.equal(merged(tokens), model(tokens))


def test_virtual_stages_are_merged(even: tuple[Arrays, GPT], tmp_path: Path) -> None:
    """A rank's chunks are numbered by their first layer, the embedding is layer 0."""
    state, model = even
    renamed = {
        name.replace("gpt.embeddings.", "_layers.0.0.")
        .replace("gpt.decoder.layers.0.", "_layers.0.1.")
        .replace("gpt.decoder.layers.1.", "_layers.2.0.")
        .replace("gpt.decoder.norm.", "_layers.2.1.norm."): array
        for name, array in state.items()
    }
    table = state["gpt.embeddings.word_embeddings.weight"]
    renamed["_layers.shared_layers.embed.word_embeddings.weight"] = table
    renamed["_layers.2.embed.word_embeddings.weight"] = table
    write_rank(tmp_path / "virtual", 0, 0, 0, renamed)
    assert_same(imported(tmp_path / "virtual", tmp_path), model)


@pytest.mark.parametrize(
    ("ranks", "change", "code", "texts"),
    [
        ([(1, 0, 0)], None, Code.INCOMPLETE, ["mp_00_sharding_00_pp_00", "2 parts"]),
        (
            [(0, 0, 0), (1, 1, 0)],
            None,
            Code.INCOMPLETE,
            ["mp_00_sharding_01_pp_00, mp_01_sharding_00_pp_00"],
        ),
        ([(0, 0, 0), (1, 0, 0)], "norm1.weight", Code.MISMATCH, ["ln_1.weight"]),
        (
            [(0, 0, 0), (0, 1, 0)],
            "linear1.weight",
            Code.MISMATCH,
            ["c_fc.weight", "sharding ranks"],
        ),
        ([(0, 0, 0), (0, 1, 0)], "partition", Code.UNSUPPORTED, ["other shapes"]),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    ranks: list[tuple[int, int, int]],
    change: str | None,
    code: Code,
    texts: list[str],
    even: tuple[Arrays, GPT],
    tmp_path: Path,
) -> None:
    state, _ = even
    for number, (mp, sharding, pp) in enumerate(ranks):
        mine = {name: x.copy() for name, x in sliced(state, mp, 2).items()}
        if number and change:
            name = f"gpt.decoder.layers.1.{change}"
            if change == "partition":
                mine["gpt.decoder.norm.weight"] = mine["gpt.decoder.norm.weight"][:4]
            else:
                mine[name].ravel()[0] += 1
        write_rank(tmp_path / "parts", mp, sharding, pp, mine)
    with raises(code, *texts):
        imported(tmp_path / "parts", tmp_path)
    assert not (tmp_path / "back").exists()


def test_a_last_rank_that_was_not_copied_is_noticed(state: Arrays, tmp_path: Path) -> None:
    quarters = dict(state)
    table = "gpt.embeddings.word_embeddings.weight"
    quarters[table] = np.resize(state[table], (4 * 100, state[table].shape[1]))
    for mp in range(3):
        write_rank(tmp_path / "parts", mp, 0, 0, sliced(quarters, mp, 4))
    with raises(Code.MISMATCH, "3 tensor-parallel parts with 3 heads"):
        imported(tmp_path / "parts", tmp_path)


def separated(state: Arrays) -> Arrays:
    """The model without `fuse_attn_qkv`."""
    found: Arrays = {}
    for name, array in state.items():
        if "qkv_proj" not in name:
            found[name] = array
            continue
        by_head = array.reshape(*array.shape[:-1], HEADS, 3, -1)
        for i, letter in enumerate("qkv"):
            part = by_head[..., i, :].reshape(*array.shape[:-1], -1)
            found[name.replace("qkv_proj", f"{letter}_proj")] = part
    return found


def test_separate_projections_are_fused(even: tuple[Arrays, GPT], tmp_path: Path) -> None:
    state, model = even
    write_pdparams(tmp_path / "separate.pdparams", separated(state))
    assert_same(imported(tmp_path / "separate.pdparams", tmp_path), model)
    for mp in range(2):
        mine = separated(state)
        halves = {
            name: np.split(array, 2, axis=-1)[mp] for name, array in mine.items() if "_proj" in name
        } | {n: a for n, a in sliced(state, mp, 2).items() if "qkv" not in n}
        write_rank(tmp_path / "parts", mp, 0, 0, halves)
    assert_same(imported(tmp_path / "parts", tmp_path), model)
    del mine["gpt.decoder.layers.1.self_attn.k_proj.bias"]
    write_pdparams(tmp_path / "separate.pdparams", mine)
    with raises(Code.UNSUPPORTED, "h.1.attn.c_attn.bias"):
        imported(tmp_path / "separate.pdparams", tmp_path)


LINEARS = ("self_attn.qkv_proj", "self_attn.out_proj", "linear1", "linear2")
FLOAT = ("gpt.decoder.layers.1.linear2",)


def quantized(state: Arrays, pact: bool, per_channel: bool) -> Arrays:
    """What PaddleSlim's QAT makes of a state dictionary."""
    found: Arrays = {}

    def one(value: float) -> NDArray[Any]:
        return np.array([value], np.float32)

    for name, array in state.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(LINEARS) or module in FLOAT:
            found[name] = array
            continue
        inner = f"{module}._layer"
        found[f"{inner}.{kind}"] = array
        if kind == "weight":
            absmax = np.abs(array).max(axis=0) if per_channel else one(np.abs(array).max())
            found[f"{inner}._fake_quant_weight._scale"] = absmax
            for quantizer in (f"{inner}._fake_quant_input", f"{module}._ma_output_scale"):
                for tensor, value in (("_scale", 12.7), ("_state", 3.4), ("_accum", 43.0)):
                    found[f"{quantizer}.{tensor}"] = one(value)
            if pact:
                found[f"{inner}._act_preprocess.alpha"] = one(6.35)
    return found


@pytest.mark.parametrize("pact", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_fake_quantized_model_becomes_an_int8_plan(
    pact: bool, per_channel: bool, even: tuple[Arrays, GPT], tmp_path: Path
) -> None:
    state, model = even
    theirs = tmp_path / "qat" / FILE
    theirs.parent.mkdir()
    write_pdparams(theirs, quantized(state, pact, per_channel))
    archive = pack(
        tmp_path / "GPT_345M_QAT_w_analysis.tar", "w", {f"GPT/{FILE}": theirs.read_bytes()}
    )
    assert_same(imported(archive, tmp_path), model)
    plan = read_config(tmp_path / "back").quantization
    assert plan is not None
    weight = WeightFormat("channel_wise_abs_max" if per_channel else "abs_max")
    names = [name for name in model.config.linear_names() if name != "h.1.mlp.c_proj"]
    assert sorted(plan.linears) == sorted(names)
    for form in plan.linears.values():
        assert form == LinearFormat(weight, "int8", form.activation_scale)
        assert form.activation_scale == pytest.approx(0.05 if pact else 0.1, rel=1e-6)


def test_ranges_of_ranks_become_the_widest(even: tuple[Arrays, GPT], tmp_path: Path) -> None:
    state, model = even
    for mp in range(2):
        whole = quantized(sliced(state, mp, 2), True, True)
        for name in whole:
            if name.endswith("_fake_quant_input._scale"):
                whole[name] = np.float32([1.27 * (mp + 1)])
        write_rank(tmp_path / "parts", mp, 0, 0, whole)
    assert_same(imported(tmp_path / "parts", tmp_path), model)
    plan = read_config(tmp_path / "back").quantization
    assert plan is not None
    assert all(scale == pytest.approx(0.02) for scale in plan.activation_scales.values())


def test_quantizers_without_a_range_are_refused(even: tuple[Arrays, GPT], tmp_path: Path) -> None:
    state = quantized(even[0], False, False)
    name = "gpt.decoder.layers.0.linear1._layer._fake_quant_input._scale"
    for value in (0.0, np.nan, None):
        broken = {n: a for n, a in state.items() if n != name}
        if value is not None:
            broken[name] = np.float32([value])
        write_pdparams(tmp_path / FILE, broken)
        with raises(Code.INCOMPLETE, "h.0.mlp.c_fc"):
            imported(tmp_path / FILE, tmp_path)


def test_the_tokenizer_beside_the_model_is_taken(
    state: Arrays, small_gpt: GPT, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "downloaded"
    write_rank(folder, 0, 0, 0, state)
    archive = pack(folder / "GPT.tar", "w", {FILE: packed_model(tmp_path)})
    sources = (folder / PART, folder / PART / "model", archive)
    for source in sources:
        with raises(Code.NOT_FOUND) as raised:
            import_checkpoint(RECIPE, source, None, tmp_path / "back")
        assert "--tokenizer" in raised.value.hint
    model = json.loads(byte_tokenizer.to_str())["model"]
    (folder / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n")
    for source in sources:
        import_checkpoint(RECIPE, source, None, tmp_path / "back")
        back = load_checkpoint(tmp_path / "back")
        assert_same(back.model.state_dict(), small_gpt)
        assert back.tokenizer.get_vocab() == byte_tokenizer.get_vocab()


def test_paddleslim_writes_these_names(
    in_paddle: Callable[..., Arrays], even: tuple[Arrays, GPT], tmp_path: Path
) -> None:
    """PaddleSlim itself quantizes linears under PaddleFleetX's names, with one skipped."""
    state, model = even
    in_paddle(
        """
        from paddle import nn
        from paddleslim.dygraph.quant import QAT

        root = nn.Layer()
        inputs = []
        for name, array in given.items():
            *path, last, kind = name.split(".")
            if kind != "weight" or not (last.endswith("_proj") or last.startswith("linear")):
                continue
            layer = root
            for part in path:
                if part not in layer._sub_layers:
                    layer.add_sublayer(part, nn.Layer())
                layer = layer._sub_layers[part]
            linear = nn.Linear(*array.shape)
            linear.skip_quant = name == "gpt.decoder.layers.1.linear2.weight"
            layer.add_sublayer(last, linear)
            inputs.append((layer, last, array.shape[0]))
        QAT({
            "weight_quantize_type": "abs_max",
            "activation_quantize_type": "moving_average_abs_max",
            "activation_preprocess_type": "PACT",
            "weight_bits": 8, "activation_bits": 8,
            "quantizable_layer_type": ["Linear", "ColumnParallelLinear", "RowParallelLinear"],
            "onnx_format": True,
        }).quantize(root)
        root.train()
        for layer, last, size in inputs:
            layer._sub_layers[last](3 * paddle.ones([2, size]))
        paddle.save(root.state_dict(), str(folder / "quantized.pdparams"))
        """,
        **state,
    )
    theirs = read_pdparams(tmp_path / "quantized.pdparams")
    expected = quantized(state, True, False)
    assert {n for n in theirs if "._" in n} == {n for n in expected if "._" in n}
    whole = expected | {
        name: array for name, array in theirs.items() if "._" in name.split("_layer")[-1]
    }
    write_pdparams(tmp_path / FILE, whole)
    assert_same(imported(tmp_path / FILE, tmp_path), model)
    plan = read_config(tmp_path / "back").quantization
    assert plan is not None and "h.1.mlp.c_proj" not in plan.linears
    assert len(plan.linears) == 4 * LAYERS - 1
    assert all(scale > 0 for scale in plan.activation_scales.values())
