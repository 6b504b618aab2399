"""A trial makes the same collective calls in the same order as real processes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from lathe.plan.trial import try_ranks
from lathe_base.config.recipe import load_recipe
from tests.support import warm
from tests.support.recorded_group import to_json
from tests.support.small_run import SMALL

BASE = (
    *SMALL,
    "Model.num_layers=4",
    "Model.vocab_size=384",
    "Engine.max_steps=2",
    "Engine.eval_iters=1",
    "Data.Train.dataset.split=[1,1,0]",
    "Data.Eval.dataset.split=[1,1,0]",
    "Global.global_batch_size=16",
    "Global.local_batch_size=",
)
DP, MP, PP = (f"Distributed.{name}_degree=2" for name in ("dp", "mp", "pp"))
SP = "Model.sequence_parallel=True"
FULL = "Model.use_recompute=True"


def sharding(stage: int) -> tuple[str, str]:
    return "Distributed.sharding.sharding_degree=2", f"Distributed.sharding.sharding_stage={stage}"


PRETRAIN: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "dp": (DP,),
        "mp": (MP,),
        "mp-sequence-parallel": (MP, SP, FULL),
        "pp": (PP,),
        "pp-documents-apart": (PP, "Data.reset_attention=True"),
        "pp-interleaved": (PP, "Model.virtual_pp_degree=2"),
        "sharding-1": sharding(1),
        "sharding-2": sharding(2),
        "sharding-3": (*sharding(3), FULL),
        "bfloat16-O2": (DP, "Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O2"),
    },
    4: {"dp-pp": (DP, PP), "mp-pp": (MP, PP, SP), "mp-sharding": (MP, *sharding(3))},
    8: {"mp-pp-sharding": (MP, PP, SP, *sharding(2))},
}
QUANTIZE = {"qat-mp": (MP,), "qat-distilled": (*sharding(2), "Compress.Distill.teacher=parent")}


def record(size: int, pieces: list[tuple[str, str, tuple[str, ...], list[Path]]]) -> None:
    given = [[stage, name, list(o), list(map(str, paths))] for stage, name, o, paths in pieces]
    done = subprocess.run(
        [*warm.python(), "-m", "tests.support.recorded_group", json.dumps([size, given])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def assert_same(recipe: str, overrides: tuple[str, ...], size: int, output: Path) -> None:
    tried = try_ranks(load_recipe(recipe, list(overrides)), range(size), size, on_gpu=False)
    for trial in tried:
        real = json.loads(Path(f"{output}.{trial.rank}.json").read_text())
        assert [to_json(call) for call in trial.collectives] == real, (output.name, trial.rank)
        assert len(real) > 2


@pytest.mark.slow
@pytest.mark.parametrize("size", PRETRAIN)
def test_a_trial_makes_the_calls_of_real_processes(
    size: int, small_data: Path, tmp_path: Path
) -> None:
    layouts = {name: (*BASE, *overrides) for name, overrides in PRETRAIN[size].items()}
    record(
        size,
        [("pretrain", "tiny", o, [small_data, tmp_path / name]) for name, o in layouts.items()],
    )
    for name, overrides in layouts.items():
        assert_same("tiny", overrides, size, tmp_path / name)


@pytest.mark.slow
def test_a_trial_makes_the_calls_of_quantization_and_distillation(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    base = tuple(option for option in BASE if option != "Model.num_layers=4")  # small_dense
    layouts = {
        name: (
            *base,
            "Compress.Quantization.enable=True",
            "Compress.Quantization.smoothing=False",
            *o,
        )
        for name, o in QUANTIZE.items()
    }
    record(
        2,
        [
            ("quantize", "tiny-qat", o, [small_dense, small_data, tmp_path / name])
            for name, o in layouts.items()
        ],
    )
    for name, overrides in layouts.items():
        assert_same("tiny-qat", overrides, 2, tmp_path / name)
