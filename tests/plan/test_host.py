"""Operations of a step, and the time in which the host starts them."""

import pytest

from lathe.model import block
from lathe.plan.host import small_recipe, time_host
from lathe.plan.rank import make_job
from lathe.plan.trial import run_apart, step_table, try_ranks, try_training
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from tests.support.small_run import SMALL

BASE = (
    *SMALL,
    "Global.device=cpu",
    "Model.vocab_size=512",
    "Model.num_attention_heads=16",
    "Model.hidden_size=512",
    "Global.local_batch_size=2",
    "Global.micro_batch_size=1",
    "Engine.max_steps=2",
    "Engine.eval_iters=1",
    "Engine.mix_precision.dtype=bfloat16",
    "Data.Train.dataset.split=[1,1,0]",
    "Data.Eval.dataset.split=[1,1,0]",
)
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    # processes, overrides
    "one process": (1, ()),
    "mp8": (8, ("Distributed.mp_degree=8", "Model.sequence_parallel=True")),
    "pp2": (2, ("Distributed.pp_degree=2",)),
    "sharding8": (8, ("Distributed.sharding.sharding_degree=8",)),
    "llama": (1, ("Model.architecture=llama", "Model.num_key_value_heads=4")),
    "quantized to INT4": (
        1,
        ("Compress.Quantization.enable=True", "Compress.Quantization.weight_bits=4"),
    ),
    "pruned": (1, ("Compress.Prune.enable=True", "Compress.Prune.ratio=0.5")),
    "distilled": (1, ("Compress.Distill.teacher=parent",)),
}


def recipe(*overrides: str) -> Recipe:
    return load_recipe("tiny", [*BASE, *overrides])


def operations(recipe: Recipe, processes: int) -> float:
    block._cached_table.cache_clear()  # another test may have made the rotary table of one size
    (tried,) = try_ranks(recipe, [0], processes, on_gpu=True)
    phases = ("forward and backward", "update", "after the step")
    return sum(tried.operations.get(phase, 0) for phase in phases)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_small_tensors_keep_the_operations(case: str) -> None:
    processes, overrides = CASES[case]
    whole = recipe(*overrides)
    small = small_recipe(whole)
    engine = small.Engine.model_copy(update={"max_steps": 2})
    small = small.model_copy(update={"Engine": engine})
    assert make_job(small).model.config.n_params < make_job(whole).model.config.n_params
    assert operations(small, processes) == operations(whole, processes)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_host_is_timed(case: str) -> None:
    processes, overrides = CASES[case]
    small = small_recipe(recipe(*overrides))
    (seconds,) = run_apart({case: lambda: time_host(small, 0, processes)})
    assert 0 < seconds < 60


@pytest.mark.slow
def test_a_trial_says_how_many_operations_a_step_starts_and_how_long_that_takes() -> None:
    two, four = (try_training(recipe(f"Model.num_layers={n}"), 1) for n in (2, 4))
    six = try_training(recipe("Model.num_layers=6"), 1)
    starts = [trial.ranks[0].operations for trial in (two, four, six)]
    assert starts[2] - starts[1] == starts[1] - starts[0] > 0  # every layer starts as many
    measured, planned = zip(two.host, six.host, strict=True)
    assert 0 < measured[0] < measured[1] and planned[1] == pytest.approx(3 * planned[0])
    assert step_table(two).row_count == 2
