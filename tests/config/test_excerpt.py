"""The excerpt of a recipe that a step is given has what it declares, and refuses the rest."""

import pytest

from components.plan import SETTINGS, SHARED, plan
from components.step import NAMES
from lathe_base.config.recipe import excerpt_text, load_recipe, recipe_as_text, shipped_recipes
from lathe_base.config.settings import Recipe
from lathe_base.config.settings.types import UndeclaredSetting
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.tables import quick_only


@pytest.mark.parametrize("name", quick_only(shipped_recipes(), shipped_recipes()[::5]))
def test_a_recipe_as_text_is_the_same_recipe(name: str) -> None:
    recipe = load_recipe(name)
    assert load_recipe(recipe_as_text(recipe)) == recipe
    for group in Recipe.model_fields.keys() - {"Inference"}:
        found = load_recipe(excerpt_text(recipe, [group]))
        assert getattr(found, group) == getattr(recipe, group)
        assert found.model_dump().keys() == {group}


def test_other_settings_cannot_be_read() -> None:
    keys = ["Engine", "Gate.max_perplexity_increase", "Compress.Prune"]
    recipe = load_recipe(excerpt_text(load_recipe("tiny"), keys), ["Gate.sequential=true"])
    assert recipe.Engine.max_steps == 900 and not recipe.Compress.Prune.enable
    for read in (
        lambda: recipe.Data,
        lambda: recipe.Gate.sequential,
        lambda: recipe.Compress.Quantization,
        lambda: recipe.model_copy(update={"Export": None}).Serving,
    ):
        with pytest.raises(UndeclaredSetting, match="not declared for this step"):
            read()
    with raises(Code.MALFORMED, "_excerpt_"):
        load_recipe("_excerpt_: [Gates]\n")


def test_every_component_has_settings_that_exist() -> None:
    assert {*SETTINGS, *SHARED, "inputs", "notify"} == set(NAMES)
    for settings in SETTINGS.values():
        load_recipe(excerpt_text(load_recipe("tiny"), settings))


def changed(*overrides: str) -> set[str]:
    """The steps whose settings are others with these overrides."""
    before, after = (plan("tiny", o, "tiny-prune", "tiny-qat") for o in ([], overrides))
    return {name for name in SETTINGS if before[name] != after[name]}


@pytest.mark.parametrize(
    ("override", "steps"),
    [
        ("Gate.max_accuracy_drop=0.5", {"gate", "report", "release", "choose"}),
        ("Production.burst_clients=3", {"release"}),
        ("Serving.max_wait_seconds=3", {"deploy", "release"}),
        ("Compress.Prune.ratio=0.3", {"prune"}),
        (
            "Compress.Quantization.weight_bits=4",
            {"pretrain", "finetune", "prune", "analyze", "quantize", "estimate", "price"},
        ),
        ("Export.prompts=3", {"export", "deploy", "price"}),
        ("Finetune.lora.rank=3", {"finetune"}),
        ("Card.license=mit", set()),
    ],
)
def test_an_override_changes_the_steps_that_read_it(override: str, steps: set[str]) -> None:
    assert changed(override) == steps


def test_overrides_in_another_order_change_nothing() -> None:
    overrides = ["Engine.max_steps=7", "Global.seed=3", "Data.reset_attention=true"]
    assert plan("tiny", overrides) == plan("tiny", overrides[::-1])
    assert changed(*overrides) >= {"pretrain", "prune", "quantize"}
