"""Every parallel layout computes the same as a single process."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lathe.train.pretrain import pretrain
from lathe.train.workers import mesh_shape
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_run import SMALL, records, run_layouts
from tests.support.tables import quick_only

BASE = (
    *SMALL,
    "Model.num_layers=4",
    "Engine.max_steps=5",
    "Engine.eval_freq=5",
    "Global.global_batch_size=16",
    "Global.local_batch_size=",
    "Engine.save_load.save_steps=1000",
)
DP, MP, PP = (f"Distributed.{name}_degree=2" for name in ("dp", "mp", "pp"))
SP = "Model.sequence_parallel=True"


def sharding(stage: int) -> tuple[str, str]:
    return "Distributed.sharding.sharding_degree=2", f"Distributed.sharding.sharding_stage={stage}"


TWO = {
    "dp2": (DP,),
    "mp2": (MP,),
    "mp2-sequence-parallel": (MP, SP),
    "pp2": (PP,),
    "pp2-interleaved": (PP, "Model.virtual_pp_degree=2"),
    "sharding2-stage1": sharding(1),
    "sharding2-stage2": sharding(2),
    "sharding2-stage3-recompute": (*sharding(3), "Model.use_recompute=True"),
}
FOUR = {
    "dp2-mp2": (DP, MP),
    "dp2-pp2": (DP, PP),
    "mp2-pp2-sequence-parallel": (MP, PP, SP),
    "dp2-sharding2": (DP, *sharding(2)),
    "mp2-sharding2": (MP, *sharding(3)),
}
EIGHT = {"mp2-pp2-sharding2": (MP, PP, SP, *sharding(3), "Model.use_recompute=True")}


@pytest.fixture(scope="module")
def alone(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "run"
    pretrain(load_recipe("tiny", BASE), small_data, output)
    return output


@pytest.fixture(scope="module")
def runs(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run for every layout."""
    folder = tmp_path_factory.mktemp("layouts")
    for workers, layouts in ((2, TWO), (4, FOUR)):
        runs = {folder / name: ("tiny", *BASE, *o) for name, o in layouts.items()}
        run_layouts(small_data, runs, workers)
    return folder


def assert_same(run: Path, alone: Path) -> None:
    assert len(records(run, "loss")) == 5
    for key in ("loss", "eval_loss", "grad_norm"):
        np.testing.assert_allclose(records(run, key), records(alone, key), atol=1e-4)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, alone))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_processes_round_no_more_than_one(
    small_data: Path, tmp_path: Path, alone: Path, level: str
) -> None:
    half = "Engine.mix_precision.dtype=bfloat16", f"Engine.mix_precision.level={level}"
    pretrain(load_recipe("tiny", (*BASE, *half)), small_data, tmp_path / "alone")
    layouts = {"mp2": (MP, SP), "dp2": (DP,)}
    runs = {tmp_path / name: ("tiny", *BASE, *half, *o) for name, o in layouts.items()}
    run_layouts(small_data, runs, 2)
    for run in runs:
        for key in ("loss", "eval_loss", "grad_norm"):
            exact, rounded, divided = (
                np.array(records(folder, key)) for folder in (alone, tmp_path / "alone", run)
            )
            assert np.abs(divided - exact).max() < 3 * np.abs(rounded - exact).max(), (run, key)


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
@pytest.mark.slow
def test_layout_traces_the_losses_of_one_process(layout: str, runs: Path, alone: Path) -> None:
    assert_same(runs / layout, alone)


@pytest.mark.slow
def test_a_pipeline_validates_on_fewer_samples_than_a_micro_batch(
    small_data: Path, tmp_path: Path
) -> None:
    """The validation part is small, but stages exchange whole micro-batches."""
    few = (
        *BASE,
        "Global.global_batch_size=256",
        "Global.micro_batch_size=128",
        "Engine.max_steps=1",
    )
    few += tuple(f"Data.{part}.dataset.split=990,10,0" for part in ("Train", "Eval"))
    pretrain(load_recipe("tiny", few), small_data, tmp_path / "alone")
    run_layouts(small_data, {tmp_path / "pp2": ("tiny", *few, PP)}, 2)
    losses = [records(tmp_path / name, "eval_loss") for name in ("alone", "pp2")]
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(*losses, atol=1e-5)


@pytest.mark.slow
def test_shipped_recipes_train_in_their_layouts(small_data: Path, tmp_path: Path) -> None:
    """Smaller degrees and widths, but the recipes' precision, recomputation and dropout."""
    width = ("Model.vocab_size=384", "Global.micro_batch_size=1")
    warm = ("Optimizer.lr.decay_steps=20", "Engine.max_steps=12")
    reduced = (*SMALL, "Model.num_layers=2", "Global.local_batch_size=4", *width, *warm)
    one_dp = "Distributed.dp_degree=1"
    recipes: dict[int, dict[str, tuple[str, ...]]] = {
        2: {
            "gpt-345m-auto-dp8": ("Global.global_batch_size=8", DP),
            "megatron-345m": ("Global.global_batch_size=4", one_dp),
            "gpt-6.7b": ("Distributed.sharding.sharding_degree=2",),
        },
        4: {
            "megatron-1.3b": ("Global.global_batch_size=4", one_dp),
            "gpt-175b-mp8-pp16": (MP, PP),
        },
    }
    for workers, layouts in recipes.items():
        runs = {tmp_path / n: (n, *reduced, *overrides) for n, overrides in layouts.items()}
        run_layouts(small_data, runs, workers)
        for output in runs:
            losses = records(output, "loss")
            assert len(losses) == 12 and losses[-1] < losses[0] - 0.1, output.name


@pytest.mark.long
def test_eight_processes(small_data: Path, tmp_path: Path, alone: Path) -> None:
    for name, overrides in EIGHT.items():
        run_layouts(small_data, {tmp_path / name: ("tiny", *BASE, *overrides)}, 8)
        assert_same(tmp_path / name, alone)


@pytest.mark.parametrize(
    "granularity", quick_only(["full", "full_attn", "core_attn"], ["full_attn"])
)
def test_recompute_leaves_every_bit(
    granularity: str, small_data: Path, tmp_path: Path, alone: Path
) -> None:
    on = ("Model.use_recompute=True", f"Model.recompute_granularity={granularity}")
    pretrain(load_recipe("tiny", (*BASE, *on)), small_data, tmp_path / "run")
    for key in ("loss", "eval_loss", "grad_norm"):
        assert records(tmp_path / "run", key) == records(alone, key)


def test_accumulation_leaves_the_losses(small_data: Path, tmp_path: Path, alone: Path) -> None:
    whole = (*BASE, "Global.micro_batch_size=16")  # BASE accumulates 4 micro-batches
    pretrain(load_recipe("tiny", whole), small_data, tmp_path / "run")
    for key in ("loss", "grad_norm", "eval_loss"):
        np.testing.assert_allclose(records(tmp_path / "run", key), records(alone, key), atol=1e-4)


def test_degrees_fill_the_processes() -> None:
    settings = load_recipe("tiny", (MP, PP)).Distributed
    assert mesh_shape(settings, 12) == (2, 3, 1, 2)
    with raises(Code.LAYOUT, "= 4 processes", "6"):
        mesh_shape(load_recipe("tiny", (MP, PP, "Distributed.dp_degree=1")).Distributed, 6)


@pytest.mark.parametrize(
    ("overrides", "code", "text"),
    [
        (("Distributed.mp_degree=3",), Code.LAYOUT, "Distributed"),
        (("Global.micro_batch_size=3",), Code.CONFLICTING_OPTIONS, "micro_batch_size 3"),
    ],
)
def test_refusals(
    overrides: tuple[str, ...], code: Code, text: str, small_data: Path, tmp_path: Path
) -> None:
    with raises(code, text):
        pretrain(load_recipe("tiny", (*BASE, *overrides)), small_data, tmp_path / "run")
