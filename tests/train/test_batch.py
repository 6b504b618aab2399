"""Batch arithmetic: global = local * data parallel, local = micro * accumulate."""

import pytest

from lathe.train.batches import Batch, resolve_batch
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from tests.support.errors import raises


def recipe(
    total: int | None, local: int | None, micro: int, accumulate: int | None = None
) -> Recipe:
    sizes = {"global_batch_size": total, "local_batch_size": local, "micro_batch_size": micro}
    return Recipe.model_validate({"Global": sizes, "Engine": {"accumulate_steps": accumulate}})


@pytest.mark.parametrize(
    ("given", "data_parallel", "resolved"),
    [
        (recipe(None, None, 4), 2, Batch(8, 4, 4, 1)),
        (recipe(None, None, 4, 3), 2, Batch(24, 12, 4, 3)),
        (recipe(None, 8, 4), 2, Batch(16, 8, 4, 2)),
        (recipe(64, None, 8), 8, Batch(64, 8, 8, 1)),
        (recipe(64, None, 4), 8, Batch(64, 8, 4, 2)),
        (recipe(16, 8, 2, 4), 2, Batch(16, 8, 2, 4)),
    ],
)
def test_unset_batch_settings_are_derived(
    given: Recipe, data_parallel: int, resolved: Batch
) -> None:
    assert resolve_batch(given, data_parallel) == resolved


@pytest.mark.parametrize(
    ("given", "data_parallel", "code", "texts"),
    [
        (recipe(10, None, 1), 4, Code.LAYOUT, ["global_batch_size 10", "of 4", "12"]),
        (
            recipe(16, 4, 1),
            2,
            Code.CONFLICTING_OPTIONS,
            ["global_batch_size 16", "local_batch_size 4 * 2"],
        ),
        (
            recipe(None, 6, 4),
            1,
            Code.CONFLICTING_OPTIONS,
            ["local_batch_size 6", "micro_batch_size 4"],
        ),
        (recipe(None, 8, 4, 3), 1, Code.CONFLICTING_OPTIONS, ["accumulate_steps 3", "= 2"]),
    ],
)
def test_sizes_that_disagree(
    given: Recipe, data_parallel: int, code: Code, texts: list[str]
) -> None:
    with raises(code, *texts):
        resolve_batch(given, data_parallel)


@pytest.mark.parametrize(
    ("name", "data_parallel", "resolved"),
    [
        ("gpt-345m", 1, Batch(8, 8, 8, 1)),
        ("gpt-175b-mp8-pp16", 1, Batch(1536, 1536, 1, 1536)),
        ("megatron-1.3b", 2, Batch(32, 16, 8, 2)),
        ("megatron-3.7b", 2, Batch(16, 8, 4, 2)),
        ("megatron-345m-without-mp", 8, Batch(64, 8, 8, 1)),
    ],
)
def test_published_configurations(name: str, data_parallel: int, resolved: Batch) -> None:
    assert resolve_batch(load_recipe(name), data_parallel) == resolved
