"""Output, choices and errors of `lathe plan`."""

import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lathe.cli import app
from lathe.train.layout import configured_layout, options
from lathe.train.plan import (
    Plan,
    make_plan,
    parse_memory,
    plan_table,
    precision_advice,
    require_fit,
)
from lathe.train.shape import model_config
from lathe.train.speed import GPUS, known_gpu, step_time
from lathe.train.workers import mesh_shape
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code, UserError
from tests.support.errors import raises


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(load_recipe("gpt-6.7b"), 16, 80e9)


def test_every_layout_shown_fits_and_uses_all_gpus(plan: Plan) -> None:
    assert len(plan.fitting) > 10
    for one in plan.fitting:
        assert one.layout.gpus == 16
        assert one.memory.total <= 0.9 * 80e9
        assert one.layout.data_parallel * one.layout.micro_batch * one.layout.accumulate_steps == (
            plan.batch
        )
    times = [one.time.total for one in plan.fitting]
    assert times == sorted(times)


def test_picked_options_give_the_recipe_that_layout(plan: Plan) -> None:
    recipe = load_recipe("gpt-6.7b")
    for one in plan.fitting:
        other = load_recipe("gpt-6.7b", options(recipe, one.layout))
        assert configured_layout(model_config(other, 50304), other, 16) == one.layout
        assert mesh_shape(other.Distributed, 16) == (
            one.layout.pp,
            one.layout.dp,
            one.layout.sharding,
            one.layout.mp,
        )


def test_less_memory_costs_speed(plan: Plan) -> None:
    small = make_plan(load_recipe("gpt-6.7b"), 16, 20e9)
    assert small.best.time.total > plan.best.time.total
    assert small.best.memory.total <= 18e9


def test_table_marks_the_pick(plan: Plan) -> None:
    console = Console(width=130)
    with console.capture() as printed:
        console.print(plan_table(plan))
    lines = printed.get().splitlines()
    assert len(lines) == 13
    assert [line.startswith("*") for line in lines].index(True) == 1
    assert f"{plan.best.memory.total / 1e9:.1f}" in lines[1]


def test_the_recipes_own_layout_is_judged(plan: Plan) -> None:
    assert "fits at" in plan.verdict()
    assert "cannot run" in make_plan(load_recipe("gpt-6.7b"), 8, 200e9).verdict()


@pytest.mark.parametrize(
    "name, gpus",
    [
        *[(name, 8) for name in ("megatron-345m", "megatron-1.3b", "qat-345m-mp8")],
        *[
            (name, 8)
            for name in (
                "megatron-2.7b",
                "megatron-3.7b",
                "megatron-345m-without-mp",
                "gpt-1.3b-dp8",
            )
        ],
        *[("gpt-6.7b", 16), ("prune-6.7b-sharding16", 16), ("gpt-175b-mp8-pp16", 128)],
    ],
)
def test_a_shipped_recipe_can_run_on_its_gpus(name: str, gpus: int) -> None:
    recipe = load_recipe(name)
    assert configured_layout(model_config(recipe, 50257), recipe, gpus).gpus == gpus


def test_a_recipe_that_cannot_fit_is_refused_with_the_plan_that_would() -> None:
    recipe = load_recipe("gpt-1.3b-dp8")
    config = model_config(recipe, 50257)
    require_fit(config, recipe, 8, 80e9)
    require_fit(config, recipe, 8, None)
    with raises(Code.OUT_OF_MEMORY, "16.0 GB", "--no-try") as error:
        require_fit(config, recipe, 8, 16e9)
    chosen = re.findall(r"-o (\S+)", str(error.value))
    require_fit(config, load_recipe("gpt-1.3b-dp8", chosen), 8, 16e9)


@pytest.mark.slow
def test_nothing_fits() -> None:
    with raises(Code.OUT_OF_MEMORY, "16 GPUs with 72.0 GB") as error:
        make_plan(load_recipe("gpt-175b-mp8-pp16"), 16, 80e9)
    gpus = int(str(error.value).partition("hint: ")[2].split()[1].rstrip(","))
    assert make_plan(load_recipe("gpt-175b-mp8-pp16"), gpus, 80e9).fitting


@pytest.mark.parametrize(
    "gpus, gpus_per_node, used", [(7, 8, {1, 2, 3, 4, 6}), (14, 7, {1, 2, 3, 4, 6})]
)
def test_fewer_gpus_are_used_where_all_would_need_another_batch(
    gpus: int, gpus_per_node: int, used: set[int]
) -> None:
    recipe = load_recipe("gpt-345m")
    plan = make_plan(recipe, gpus, 80e9, gpus_per_node)
    assert plan.batch == 8
    assert {one.layout.gpus for one in plan.fitting} == used
    assert plan.best.layout.gpus == 4  # 6 would be a pipeline, idle a third of the time
    idle = plan.idle()
    assert idle is not None and idle.startswith(f"4 of {gpus}: a batch of 8 sequences cannot")
    all_of_them = load_recipe("gpt-345m", re.findall(r"-o (\S+)", idle))
    other = make_plan(all_of_them, gpus, 80e9, gpus_per_node)
    assert other.idle() is None and {one.layout.gpus for one in other.fitting} == {gpus}


def test_all_gpus_are_used_where_the_batch_can_be_divided(plan: Plan) -> None:
    assert plan.idle() is None


def test_no_whole_number_of_nodes() -> None:
    with raises(Code.LAYOUT, "12 GPUs", "nodes of 8"):
        make_plan(load_recipe("gpt-345m"), 12, 80e9)
    with raises(Code.INVALID_VALUE, "--gpus 1000000000"):
        make_plan(load_recipe("gpt-345m"), 10**9, 80e9)


@pytest.mark.parametrize(
    "text, size", [("80GB", 80e9), ("24g", 24e9), ("40GiB", 40 * 2**30), ("0.5 TB", 5e11)]
)
def test_memory_sizes(text: str, size: float) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "80",
        "GB",
        "-1GB",
        "0GB",
        "80 parsec",
        "nan",
        "nanGB",
        "infGB",
        "1e3GB",
        "",
        "9" * 400 + "GB",
    ],
)
def test_not_a_memory_size(text: str) -> None:
    with raises(Code.INVALID_VALUE, "--memory"):
        parse_memory(text)


def test_pretrain_refuses_what_cannot_fit_this_machines_gpus(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of GPUs and their memory are faked, since tests have none."""
    monkeypatch.setattr("lathe_launch.shape.visible_gpus", lambda: 8)
    monkeypatch.setattr("lathe.train.memory.available_memory", lambda device: 16e9)
    command = ["pretrain", "-r", "gpt-1.3b-dp8", "--data", str(small_data)]
    result = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "run")])
    assert isinstance(result.exception, UserError)
    assert result.exception.code is Code.OUT_OF_MEMORY and "16.0 GB" in result.exception.what
    assert "--no-try" in result.exception.hint and "-o Distributed." in result.exception.hint
    assert not (tmp_path / "run").exists()


def test_float16_recipes_get_the_recipe_for_bfloat16() -> None:
    advice = precision_advice(load_recipe("gpt-345m"), "gpt-345m", None)
    assert advice is not None
    assert "-r gpt-345m-bf16, or " in advice
    assert advice.endswith("-o Engine.mix_precision.dtype=bfloat16 -o Engine.compile=True")
    other = precision_advice(load_recipe("qat-345m"), "qat-345m", GPUS["H100"])
    assert other is not None and "-r" not in other and "this GPU has bfloat16" in other
    assert precision_advice(load_recipe("gpt-345m"), "gpt-345m", GPUS["V100"]) is None
    assert precision_advice(load_recipe("gpt-345m-bf16"), "gpt-345m-bf16", None) is None


@pytest.mark.parametrize(
    "name, gpus",
    {"gpt-345m": 1, "gpt-1.3b": 8, "gpt-6.7b": 16, "gpt-175b-mp8-pp16": 128}.items(),
)
def test_recipes_for_bfloat16_fit_80_gb_and_recompute_nothing(name: str, gpus: int) -> None:
    recipe = load_recipe(f"{name}-bf16")
    assert recipe.Engine.compile and recipe.Model.recompute is None
    degree = ["Distributed.dp_degree=auto"]
    before, after = (load_recipe(x, degree) for x in (name, f"{name}-bf16"))
    config = model_config(after, 50257)
    require_fit(config, after, gpus, 0.9 * 80e9)
    trained = ("Global", "Data", "Optimizer")  # what is learned does not change
    assert [getattr(before, x) for x in trained] == [getattr(after, x) for x in trained]
    times = [
        step_time(config, one, configured_layout(config, one, gpus), gpu=GPUS["H100"])
        for one in (before, after)
    ]
    assert times[1].total < times[0].total


def test_the_gpu_is_the_one_that_is_named() -> None:
    faster = [
        make_plan(load_recipe("gpt-345m"), 1, 32e9, gpu=GPUS[name]).best.time.total for name in GPUS
    ]
    assert faster == sorted(faster, reverse=True)
    with pytest.raises(UserError, match="V100-SXM2 has no bfloat16"):
        make_plan(load_recipe("gpt-345m-bf16"), 1, 32e9, gpu=GPUS["V100"])
    with pytest.raises(UserError, match="--gpu H800: unknown model"):
        known_gpu("H800")
    command = ["plan", "-r", "gpt-345m", "--gpus", "1"]
    shown = CliRunner().invoke(app, [*command, "--gpu", "h200"])
    assert "tokens/s per GPU" in shown.output and "-r gpt-345m-bf16" in shown.output
    unknown = CliRunner().invoke(app, command)
    assert isinstance(unknown.exception, UserError) and "--memory" in unknown.exception.hint
