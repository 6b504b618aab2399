"""`enable: False` stops a stage before it does anything; the default lets it run."""

from pathlib import Path

import pytest

from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.stages import prune, quantize


@pytest.mark.parametrize("engine", ["torch", "paddle"])
@pytest.mark.parametrize(("group", "stage"), [("Prune", prune), ("Quantization", quantize)])
def test_a_recipe_that_disables_a_stage_stops_it(
    engine: str, group: str, stage: object, tmp_path: Path
) -> None:
    recipe = load_recipe("tiny", [f"Compress.{group}.enable=False", f"Compress.engine={engine}"])
    assert callable(stage)
    with raises(
        Code.CONFLICTING_OPTIONS,
        f"Compress.{group}.enable is False",
        f"-o Compress.{group}.enable=True",
    ):
        stage(recipe, tmp_path / "model", tmp_path / "data", tmp_path / "output")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("enable", ["True", "null"])
def test_an_enabled_stage_looks_for_its_model(enable: str, tmp_path: Path) -> None:
    recipe = load_recipe("tiny", [f"Compress.Prune.enable={enable}"])
    with raises(Code.NOT_FOUND, tmp_path / "model"):
        prune(recipe, tmp_path / "model", tmp_path / "data", tmp_path / "output")
