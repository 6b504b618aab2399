"""The model of step time against published measurements."""

import pytest

from lathe.train.layout import Layout
from lathe.train.shape import model_config
from lathe.train.speed import step_time
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
    assert modelled[0] / modelled[1] == pytest.approx(published[0] / published[1], rel=0.1)
