"""Results of a trial, and errors that it finds in broken runs."""

import json

import pytest
import torch
import torch.distributed as dist

from lathe.plan.trial import (
    TrainingTrial,
    as_json,
    figures,
    memory_table,
    short_steps,
    traffic_table,
    tried_ranks,
    try_ranks,
    try_training,
)
from lathe.train.layout import Layout, configured_layout
from lathe.train.optimizer import TiedEmbedding
from lathe.train.passes import PipelinePasses
from lathe.train.plan import make_plan
from lathe.train.shape import model_config, trained_adapters
from lathe.train.trainer import Trainer
from lathe_base.config.recipe import load_recipe
from tests.support.small_run import SMALL

SHAPE = (*SMALL, "Model.vocab_size=384", "Global.local_batch_size=8", "Global.micro_batch_size=4")
MP, PP = "Distributed.mp_degree=2", "Distributed.pp_degree=2"


def attempt(*overrides: str, gpus: int = 1) -> TrainingTrial:
    return try_training(load_recipe("tiny", [*SHAPE, *overrides]), gpus)


def recipe_layout(name: str, gpus: int) -> Layout:
    recipe = load_recipe(name)
    return configured_layout(model_config(recipe, recipe.Prepare.vocab_size), recipe, gpus)


def test_a_trial_of_one_process_is_near_the_plan() -> None:
    trial = attempt()
    assert trial.fullest.peak == pytest.approx(trial.estimate.total, rel=0.1)
    assert trial.flops == pytest.approx(trial.model_flops, rel=0.02)
    assert trial.mismatch is None
    found = json.loads(json.dumps(as_json(trial, 80e9)))
    assert found["ranks"][0]["bytes"]["total"] == trial.fullest.peak
    assert memory_table(trial, 80e9).row_count == 2
    assert traffic_table(trial.fullest).row_count == 0
    assert "1 of 1 processes" in figures(trial)["tried"]


LORA = ("Finetune.lora.rank=4", "Engine.mix_precision.dtype=bfloat16")


@pytest.mark.slow
def test_adapters_are_planned_for_the_stage_that_trains_them() -> None:
    adapters, whole = attempt(*LORA), attempt(LORA[1])
    assert adapters.fullest.peak == pytest.approx(adapters.estimate.total, rel=0.1)
    assert adapters.estimate.optimizer < 0.2 * whole.estimate.optimizer
    for stage in ("Quantization", "Prune"):  # which have no adapters, whatever the recipe says
        enabled = f"Compress.{stage}.enable=True"
        with_rank, without = (
            load_recipe("tiny", [*SHAPE, enabled, *options]) for options in (LORA, LORA[1:])
        )
        assert trained_adapters(with_rank) is None
        plans = [make_plan(recipe, 2, 80e9) for recipe in (with_rank, without)]
        assert plans[0].best.memory == plans[1].best.memory
    recipe = load_recipe("tiny", [*SHAPE, *LORA])
    assert {one.layout.mp for one in make_plan(recipe, 2, 80e9).fitting} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["moving_average_abs_max", "dynamic", "token"])
def test_the_masks_of_quantization_are_planned(scales: str) -> None:
    trial = attempt(
        "Compress.Quantization.enable=True",
        f"Compress.Quantization.activation_quantize_type={scales}",
        *("Model.hidden_size=512", "Model.num_layers=8", "Model.num_attention_heads=8"),
        *("Global.micro_batch_size=2", "Global.local_batch_size=2", "Global.global_batch_size=2"),
    )
    assert trial.fullest.peak == pytest.approx(trial.estimate.total, rel=0.02)


@pytest.mark.slow
def test_a_peer_is_named_by_its_rank_among_all_processes() -> None:
    layout = ("Distributed.dp_degree=2", PP, "Global.global_batch_size=16")
    (last,) = try_ranks(load_recipe("tiny", [*SHAPE, *layout]), [3], 4, on_gpu=False)
    assert {call.peer for call in last.collectives} == {None, 1}


def test_every_distinct_kind_of_process_is_tried() -> None:
    ranks = list(tried_ranks(recipe_layout("gpt-175b-mp8-pp16", 128)))
    assert {rank // 8 for rank in ranks} == set(range(16))
    assert {0, 7, 120, 127} <= set(ranks)
    assert list(tried_ranks(recipe_layout("gpt-6.7b", 16))) == [0, 15]
    assert list(tried_ranks(recipe_layout("megatron-1.3b", 8))) == [0, 1, 2, 4, 5, 6]


def test_a_long_step_is_tried_as_two_short_ones() -> None:
    assert short_steps(recipe_layout("gpt-175b-mp8-pp16", 128)) == [18, 19]
    assert short_steps(recipe_layout("gpt-6.7b", 16)) == [1]


@pytest.mark.slow
def test_short_steps_tell_what_a_long_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = (PP, "Global.local_batch_size=16", "Global.micro_batch_size=2")
    extended = attempt(*overrides, gpus=2)
    monkeypatch.setattr("lathe.plan.trial.short_steps", lambda layout: [layout.accumulate_steps])
    whole = attempt(*overrides, gpus=2)
    for one, other in zip(extended.ranks, whole.ranks, strict=True):
        assert one.memory == other.memory
        assert one.traffic == other.traffic
        assert one.flops == other.flops


PURE = ("Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O2")


@pytest.mark.slow
@pytest.mark.parametrize("precision", [(), PURE], ids=["float32", "16-bit copies"])
def test_repeated_passes_record_what_they_would_do(
    precision: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses the first of four pipeline stages, with four micro-batches in flight."""
    four = ("Distributed.pp_degree=4", "Model.num_layers=4", "Global.micro_batch_size=1")
    recipe = load_recipe("tiny", [*SHAPE, *four, *precision, "Engine.max_steps=2"])
    (repeated,) = try_ranks(recipe, [0], 4, on_gpu=True)
    monkeypatch.setattr("lathe.plan.repeat.RUN", 100)
    (whole,) = try_ranks(recipe, [0], 4, on_gpu=True)
    assert repeated.memory == whole.memory
    assert repeated.flops == whole.flops
    assert repeated.collectives == whole.collectives


@pytest.mark.slow
@pytest.mark.parametrize("precision", [(), PURE], ids=["float32", "16-bit copies"])
def test_a_process_makes_the_gradient_of_its_rows_of_a_table(precision: tuple[str, ...]) -> None:
    first = attempt(MP, PP, "Model.vocab_size=65536", *precision, gpus=4).ranks[0]
    share = 4 * 65536 * 32 / 2  # of the table, in float32
    # Weight, two moments, the sum of gradients, and that of a micro-batch; its 16-bit copy.
    assert first.peak < 5.2 * share


@pytest.mark.slow
def test_a_message_that_waits_for_a_collective_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Trainer.update

    def crossed(trainer: Trainer, rate: float) -> None:
        value, stage = torch.zeros(1), trainer.workers.at("pp")
        if stage == 0:
            dist.recv(value, src=1)
        dist.all_reduce(value)
        if stage == 1:
            dist.send(value, dst=0)
        update(trainer, rate)

    monkeypatch.setattr(Trainer, "update", crossed)
    found = attempt(PP, gpus=2).mismatch
    assert found is not None and "rank 0 is in recv([1] float32) with rank 1" in found
    assert "rank 1 is in all_reduce([1] float32) of ranks 0, 1" in found and "(update)" in found


@pytest.mark.slow
def test_a_collective_that_one_process_leaves_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = TiedEmbedding.settle

    def of_first_stage(tied: TiedEmbedding) -> None:
        if not tied.is_second_copy:
            settle(tied)

    monkeypatch.setattr(TiedEmbedding, "settle", of_first_stage)
    found = attempt(PP, gpus=2).mismatch
    assert found is not None and "rank 0" in found and "rank 1" in found
    assert "lathe/train/optimizer.py:" in found and "lathe/train/workers.py:" in found
    assert "forward and backward" in found


@pytest.mark.slow
def test_groups_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Trainer.update

    def swapped(trainer: Trainer, rate: float) -> None:
        workers = trainer.workers
        groups = [workers.mesh["mp"].get_group(), None]
        for group in groups if workers.at("mp") == 0 else reversed(groups):
            dist.all_reduce(torch.zeros(1), group=group)
        update(trainer, rate)

    monkeypatch.setattr(Trainer, "update", swapped)
    found = attempt(MP, PP, gpus=4).mismatch
    assert found is not None and "rank 0" in found and "(update)" in found


@pytest.mark.slow
def test_a_message_of_another_type_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = PipelinePasses.__init__

    def rounded(passes: PipelinePasses, stages: object, recipe: object, *rest: object) -> None:
        if stages[0].index == 1:  # type: ignore[index]
            precision = recipe.Engine.mix_precision.model_copy(  # type: ignore[attr-defined]
                update={"dtype": "bfloat16", "level": "O2"}
            )
            engine = recipe.Engine.model_copy(update={"mix_precision": precision})  # type: ignore[attr-defined]
            recipe = recipe.model_copy(update={"Engine": engine})  # type: ignore[attr-defined]
            for stage in stages:  # type: ignore[attr-defined]
                stage.dtype = torch.bfloat16
        make(passes, stages, recipe, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PipelinePasses, "__init__", rounded)
    found = attempt(PP, gpus=2).mismatch
    assert found is not None and "rank 0 is in send" in found and "rank 1 is in recv" in found
    assert "float32" in found and "bfloat16" in found
