"""The model of step time against published measurements."""

import pytest

from lathe.train.layout import Layout
from lathe.train.shape import model_config
from lathe.train.speed import GPUS, step_time
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings.types import Recompute

# Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5, A100: seconds with full recomputation,
# then with sequence parallelism and recomputation of core attention only.
PUBLISHED = {
    "22B": ((48, 6144, 64), (8, 1, 4, 1, 1), 1.42, 1.10),
    "175B": ((96, 12288, 96), (8, 8, 1, 64, 3), 18.13, 13.75),
    "530B": ((105, 20480, 128), (8, 35, 1, 280, 3), 49.05, 37.83),
    "1T": ((128, 25600, 160), (8, 64, 1, 512, 1), 94.42, 71.49),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_steps_of_megatron(name: str) -> None:
    (layers, hidden, heads), degrees, *published = PUBLISHED[name]
    mp, pp, micro_batch, steps, virtual_pp = degrees
    overrides = {
        "Model.num_layers": layers,
        "Model.hidden_size": hidden,
        "Model.num_attention_heads": heads,
        "Model.max_position_embeddings": 2048,
        "Data.Train.dataset.max_seq_len": 2048,
    }
    recipe = load_recipe("gpt-345m", [f"{key}={value}" for key, value in overrides.items()])
    config = model_config(recipe, 51200)
    cases: list[tuple[Recompute | None, bool]] = [("full", False), (None, True)]
    modelled = [
        step_time(
            config,
            recipe,
            Layout(1, mp, pp, 1, 1, micro_batch, steps, virtual_pp, recompute, sequence_parallel),
        ).total
        for recompute, sequence_parallel in cases
    ]
    assert modelled == pytest.approx(published, rel=0.35)
    assert modelled[0] / modelled[1] == pytest.approx(published[0] / published[1], rel=0.12)


def test_the_one_run_that_was_measured() -> None:
    """benchmarks/README.md: GPT 345M with 32 rows on an H200, eager, in O1."""
    overrides = ("bfloat16", "O1"), ("Global.global_batch_size=32", "Global.local_batch_size=32")
    precision = zip(("dtype", "level"), overrides[0], strict=True)
    options = [f"Engine.mix_precision.{key}={value}" for key, value in precision]
    recipe = load_recipe("gpt-345m", [*options, *overrides[1]])
    layout = Layout(1, 1, 1, 1, 1, 32, 1, 1, None, False)
    time = step_time(model_config(recipe, 50304), recipe, layout, gpu=GPUS["H200"])
    assert 32 * 1024 / time.total == pytest.approx(157_900, rel=0.1)


@pytest.mark.parametrize("degree, is_bound", [(1, False), (8, True)])
def test_tensor_parallelism_waits_for_the_host_unless_compiled(degree: int, is_bound: bool) -> None:
    recipe = load_recipe("gpt-1.3b")
    config = model_config(recipe, 50304)
    layout = Layout(1, degree, 1, 1, 1, 8, 1, 1, None, degree > 1)
    eager, compiled = (
        step_time(
            config, load_recipe("gpt-1.3b", [f"Engine.compile={on}"]), layout, 8, GPUS["H100"]
        )
        for on in (False, True)
    )
    assert (eager.host > 0) == is_bound
    assert compiled.host < 0.5 * eager.host or not is_bound
