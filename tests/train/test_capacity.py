"""Models too large for the machine are rejected by estimate, before any output is touched."""

from pathlib import Path

import pytest

from lathe.train.memory import require_capacity
from lathe.train.pretrain import pretrain
from lathe.train.shape import model_config
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.errors import raises


@pytest.mark.parametrize(
    "override",
    [
        "Model.hidden_size=6000000",
        "Model.num_layers=10000",
        "Model.ffn_hidden_size=2147483647",
        "Model.vocab_size=2147483647",
        "Model.max_position_embeddings=2147483647",
    ],
)
def test_a_model_that_no_machine_holds_is_refused(
    override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lathe.train.memory.available_memory", lambda device: 16e9)
    recipe = load_recipe("tiny", ["Global.device=cpu", override])
    name, size = override.removeprefix("Model.").split("=")
    with raises(Code.OUT_OF_MEMORY, f"{name} {size}", "this machine has 16 GB"):
        require_capacity(model_config(recipe, 4096), recipe)


def test_a_model_that_fits_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """355M parameters take 16 bytes each; activations are not counted."""
    recipe = load_recipe("gpt-345m", ["Global.device=cpu", "Engine.mix_precision.dtype=float32"])
    config = model_config(recipe, 50257)
    monkeypatch.setattr("lathe.train.memory.available_memory", lambda device: 5.7e9)
    require_capacity(config, recipe)
    monkeypatch.setattr("lathe.train.memory.available_memory", lambda device: 5.6e9)
    with raises(Code.OUT_OF_MEMORY, " 6 GB"):
        require_capacity(config, recipe)


def test_the_output_is_untouched(small_data: Path, tmp_path: Path) -> None:
    recipe = load_recipe("tiny", ["Model.hidden_size=6000000"])
    with raises(Code.OUT_OF_MEMORY, "hidden_size 6000000"):
        pretrain(recipe, small_data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
