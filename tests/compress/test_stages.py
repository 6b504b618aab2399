"""The stages prune and quantize on a small trained model."""

from pathlib import Path

import pytest
import torch

from lathe.compress.criteria import importance
from lathe.compress.feasible import require_possible
from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.data.tokens import TokenDataset
from lathe.model import fake_quant
from lathe.model.checkpoint import load_checkpoint
from lathe.model.folder import checkpoint_digest
from lathe.train.batches import EvalBatches
from lathe.train.loss import next_token_loss
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import PruneSettings
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.report_folders import sensitivity_analysis, write_json
from tests.support.small_models import small_config
from tests.support.small_run import SMALL, kill_after_saves, records, run, start

KV_CACHE = "Compress.Quantization.kv_cache_bits=8"
WEIGHTS_ALONE = "Compress.Quantization.activation_quantize_type=none"
QUANTIZE = (*SMALL, "Compress.Quantization.quantize_embedding=True", "Optimizer.lr.max_lr=2e-4")


@pytest.mark.slow
def test_prune_then_finetune_with_recompute(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    changes = ("Compress.Prune.ratio=0.25", "Model.use_recompute=True", "Engine.max_steps=30")
    result = prune(load_recipe("tiny", (*SMALL, *changes)), small_dense, small_data, tmp_path / "p")
    pruned = load_checkpoint(tmp_path / "p")
    assert pruned.model.config.n_head == (3, 3) and pruned.model.config.n_inner == (96, 96)
    assert result.n_params < load_checkpoint(small_dense).model.config.n_params
    assert result.eval_loss < result.first_eval_loss
    assert pruned.meta["parent"] == load_checkpoint(small_dense).digest
    with raises(Code.WRONG_KIND, tmp_path / "q"):
        run_quantized = tmp_path / "q"
        quantize(load_recipe("tiny", QUANTIZE), tmp_path / "p", small_data, run_quantized)
        prune(load_recipe("tiny", SMALL), run_quantized, small_data, tmp_path / "again")


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("layers=5", "layers is 5, but the model has 2 layers"),
        ("layers=2", "layers is 2, but the model has 2 layers"),
        ("ratio=0.001", "ratio is 0.001"),
    ],
)
def test_what_cannot_be_removed_is_refused_before_training(
    wrong: str, what: str, small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    recipe = load_recipe("tiny", (*SMALL, f"Compress.Prune.{wrong}"))
    with raises(Code.INVALID_VALUE, f"Compress.Prune.{what}"):
        prune(recipe, small_dense, small_data, tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_what_can_be_removed_in_part_is_said_before_training_and_after(
    small_dense: Path, small_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An eighth of four heads is half a head."""
    changes = ("Compress.Prune.ratio=0.125", "Compress.Prune.layers=1", "Engine.max_steps=0")
    result = prune(load_recipe("tiny", (*SMALL, *changes)), small_dense, small_data, tmp_path / "p")
    assert "heads: Compress.Prune.ratio=0.125 removes 0 of 8" in caplog.text
    assert "channels: Compress.Prune" not in caplog.text
    metrics = load_checkpoint(tmp_path / "p").meta["metrics"]
    assert (result.removed_layers, metrics["removed_layers"]) == (1, 1)
    assert result.removed_heads == metrics["removed_heads"] == 0.5
    assert result.removed_channels == 1 - 112 / 256


def test_one_key_value_head_is_not_pruned_silently() -> None:
    one = small_config(n_head=(4, 4), kv_heads=(1, 1))
    (unmet,) = require_possible(PruneSettings(ratio=0.5), one)
    assert unmet.startswith("heads: Compress.Prune.ratio=0.5 removes 0 of 2, because each layer")
    assert require_possible(PruneSettings(ratio=0.5, head_unit="query"), one) == []
    everywhere = PruneSettings(ratio=0.5, scope="global")
    (unmet,) = require_possible(everywhere, one)
    assert unmet.startswith("heads: Compress.Prune.ratio=0.5 removes 0 of 2, because each layer")
    with raises(Code.INVALID_VALUE, "layers is 1", "1 layers"):
        require_possible(PruneSettings(layers=1), small_config(n_head=(4,), n_inner=(96,)))


def test_a_global_ratio_is_not_rounded_in_every_layer() -> None:
    few = small_config(n_head=(3,) * 8, n_inner=(96,) * 8)
    (unmet,) = require_possible(PruneSettings(ratio=0.125), few)
    assert unmet.startswith("heads: Compress.Prune.ratio=0.125 removes 0 of 24")
    assert require_possible(PruneSettings(ratio=0.125, scope="global"), few) == []
    wide = PruneSettings(ratio=0.03, scope="global", channel_multiple=64)  # 23 of 768 channels
    (unmet,) = require_possible(wide, few)
    assert unmet.startswith("channels: Compress.Prune.ratio=0.03 removes 0 of 768")


def test_a_recipe_names_the_widths_of_layers(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    widths = ("Compress.Prune.heads=[0,3]", "Compress.Prune.channels=[0,40]")
    recipe = load_recipe("tiny", (*SMALL, *widths, "Engine.max_steps=0"))
    prune(recipe, small_dense, small_data, tmp_path / "p")
    pruned, dense = (load_checkpoint(path).model for path in (tmp_path / "p", small_dense))
    assert (pruned.config.n_head, pruned.config.n_inner) == ((3,), (40,))
    kept = importance(dense, "l1_norm", []).channels[1].topk(40).indices.sort().values
    weight = dense.get_parameter("h.1.mlp.c_fc.weight")[kept]
    assert torch.equal(pruned.get_parameter("h.0.mlp.c_fc.weight"), weight)
    for heads in ("[4]", "[4,5]"):
        channels = "[9]" if heads == "[4]" else "[9,9]"
        wrong = (f"Compress.Prune.heads={heads}", f"Compress.Prune.channels={channels}")
        with raises(Code.INVALID_VALUE, f"Compress.Prune.heads is {heads[:2]}", "[4, 4]"):
            prune(load_recipe("tiny", (*SMALL, *wrong)), small_dense, small_data, tmp_path / "q")


@pytest.mark.parametrize(
    "wrong",
    [
        ("heads=[1,2]",),
        ("heads=[1,0]", "channels=[9,9]"),
        ("heads=[0,0]", "channels=[0,0]"),
        ("heads=[1,1]", "channels=[9,9]", "rounds=2"),
        ("heads=[1,1]", "channels=[9,9]", "layers=1"),
    ],
)
def test_widths_that_make_no_sense(wrong: tuple[str, ...]) -> None:
    with raises(Code.INVALID_VALUE, "Compress.Prune"):
        load_recipe("tiny", [f"Compress.Prune.{setting}" for setting in wrong])


def test_a_recipe_names_the_formats_of_linears(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    formats = "Compress.Quantization.formats={block_0: {qkv: float}, block_1: {linear1: int4}}"
    short = "Engine.max_steps=0"
    quantize(
        load_recipe("tiny", (*QUANTIZE, formats, short)), small_dense, small_data, tmp_path / "q"
    )
    plan = load_checkpoint(tmp_path / "q").model.config.quantization
    assert plan is not None and "h.0.attn.c_attn" not in plan.linears
    bits = {name: form.weight.bits for name, form in plan.linears.items()}
    assert bits.pop("h.1.mlp.c_fc") == 4 and set(bits.values()) == {8} and len(bits) == 7
    for wrong, code, what in (
        ("formats={block_7: {out: int8}}", Code.UNKNOWN_NAME, "formats names 'block_7'"),
        ("head_format=int4", Code.CONFLICTING_OPTIONS, "head_format is int4"),
    ):
        recipe = load_recipe("tiny", (*SMALL, f"Compress.Quantization.{wrong}"))
        with raises(code, f"Compress.Quantization.{what}"):
            quantize(recipe, small_dense, small_data, tmp_path / "w")


@pytest.mark.parametrize(
    ("bits", "weight_only", "cached"),
    [
        *((4, True, False), (8, False, True)),
        *(
            pytest.param(*x, False, marks=pytest.mark.slow)
            for x in ((8, False), (8, True), (4, False))
        ),
    ],
)
def test_quantized_checkpoint_computes_what_was_trained(
    small_dense: Path,
    small_data: Path,
    tmp_path: Path,
    weight_only: bool,
    bits: int,
    cached: bool,
) -> None:
    """The plan in config.json rebuilds exactly the model whose loss the run reported."""
    skip = ("Compress.Quantization.skip_tensor_map.block_1=[linear2,qkv]",)
    alone = (WEIGHTS_ALONE,) if weight_only else ()
    width = f"Compress.Quantization.weight_bits={bits}"
    cache = (KV_CACHE,) if cached else ()
    recipe = load_recipe("tiny", (*QUANTIZE, *skip, *alone, width, *cache))
    result = quantize(recipe, small_dense, small_data, tmp_path / "q")
    model = load_checkpoint(tmp_path / "q").model
    plan = model.config.quantization
    assert plan is not None and plan.quantize_embedding
    assert {"h.1.mlp.c_proj", "h.1.attn.c_attn"}.isdisjoint(plan.linears)
    assert len(plan.linears) == 8 - 2 + 1
    assert set(plan.integer_linears) == (set() if weight_only else set(plan.linears))
    assert plan.weight_bits == bits
    scales = fake_quant.cache_scales(model).values()
    assert len(scales) == (4 if cached else 0) and all((scale > 0).all() for scale in scales)
    tokens = TokenDataset.open(small_data)
    batches = EvalBatches(recipe, tokens, 8, 2)
    assert len(batches) == 2
    with torch.no_grad():
        tensors = [torch.from_numpy(batches[i]) for i in range(len(batches))]
        losses = [float(next_token_loss(model, tokens)) for tokens in tensors]
    assert sum(losses) / len(losses) == pytest.approx(result.eval_loss, abs=1e-6)


@pytest.mark.slow
def test_killed_qat_resumes_with_the_same_ranges(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    pact = ("Compress.Quantization.activation_preprocess_type=PACT",)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("quantize", small_dense, small_data, whole, overrides=pact)
    process = start("quantize", small_dense, small_data, killed, overrides=pact)
    kill_after_saves(process, killed, 1)
    run("quantize", small_dense, small_data, killed, overrides=pact)
    assert records(killed, "loss") == records(whole, "loss")
    assert (killed / "config.json").read_text() == (whole / "config.json").read_text()


@pytest.mark.slow
def test_two_workers_watch_the_same_ranges_as_one(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run("quantize", small_dense, small_data, one)
    half = ("Global.local_batch_size=4",)
    run("quantize", small_dense, small_data, two, overrides=half, workers=2)
    scales = [load_checkpoint(f).model.config.quantization.activation_scales for f in (one, two)]  # type: ignore[union-attr]
    assert scales[1] == pytest.approx(scales[0], rel=1e-3)


def test_a_skip_of_no_block_is_refused(small_dense: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = load_recipe("tiny", (*SMALL, "Compress.Quantization.skip_tensor_map.block_9=[out]"))
    with raises(Code.UNKNOWN_NAME, "block_9"):
        quantize(recipe, small_dense, small_data, tmp_path / "q")


def test_an_analysis_of_another_model_is_refused(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    analysis = sensitivity_analysis(model="5" * 64)
    write_json(tmp_path / "sensitivity" / "sensitivity.json", analysis)
    own = checkpoint_digest(small_dense)[:12]
    with raises(Code.MISMATCH, tmp_path / "sensitivity", 12 * "5", f"dense is {own}"):
        quantize(
            load_recipe("tiny", QUANTIZE),
            *(small_dense, small_data, tmp_path / "q", tmp_path / "sensitivity"),
        )
    assert not (tmp_path / "q").exists()


INT4 = "Compress.Quantization.weight_bits=4"
LAYOUTS = {
    "mp2": ("Distributed.mp_degree=2",),
    "mp2 of weights alone": ("Distributed.mp_degree=2", "Distributed.pp_degree=1", WEIGHTS_ALONE),
    "pp2": ("Distributed.pp_degree=2",),
    "sharding2": (
        "Distributed.sharding.sharding_degree=2",
        "Distributed.sharding.sharding_stage=3",
        "Compress.Quantization.activation_preprocess_type=PACT",
    ),
    "mp2 with an INT8 KV cache": ("Distributed.mp_degree=2", KV_CACHE),
    "sharding2 of INT4": (
        "Distributed.sharding.sharding_degree=2",
        "Distributed.sharding.sharding_stage=3",
        INT4,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_layouts_quantize_alike(
    layout: str, small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    degrees = LAYOUTS[layout]
    own = [override for override in degrees if override.startswith("Compress.")]
    batch = ("Global.local_batch_size=", "Global.global_batch_size=8", "Engine.max_steps=8")
    common = (*QUANTIZE, *batch, *own)
    quantize(load_recipe("tiny", common), small_dense, small_data, tmp_path / "alone")
    inputs = (small_dense, small_data, tmp_path / "run")
    run("quantize", *inputs, overrides=(*common, *degrees), workers=2)
    for key in ("loss", "grad_norm"):
        found, expected = (records(tmp_path / name, key) for name in ("run", "alone"))
        assert found == pytest.approx(expected, rel=1e-3), key
    models = [load_checkpoint(tmp_path / name).model for name in ("run", "alone")]
    found, expected = (model.config.quantization for model in models)
    assert found is not None and expected is not None
    assert found.activation_scales == pytest.approx(expected.activation_scales, rel=1e-2)
    buffers = [dict(model.named_buffers()) for model in models]
    torch.testing.assert_close(*buffers, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (LAYOUTS["sharding2"][2], "PACT cannot be trained"),
        (INT4, "scales of groups or of tokens"),
    ],
)
@pytest.mark.slow
def test_pact_and_int4_are_refused_with_tensor_parallelism(
    small_dense: Path, small_data: Path, tmp_path: Path, setting: str, said: str
) -> None:
    overrides = (*QUANTIZE, *LAYOUTS["mp2"], setting)
    paths = small_dense, small_data, tmp_path / "run"
    with pytest.raises(AssertionError, match=said):  # includes the output of the group
        run("quantize", *paths, overrides=overrides, workers=2)
