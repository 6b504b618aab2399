"""The components `prune` and `quantize` given a design of the search."""

from dataclasses import replace
from pathlib import Path

from kfp import dsl

from components.training import copy_checkpoint
from lathe.model.config import read_config
from lathe.model.folder import checkpoint_digest
from lathe.search.design import Design, parse_design, pruning_to, quantization_to
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings.types import Format


def the_whole(model: Path) -> Design:
    """The design that keeps all of a model, in INT8."""
    config = read_config(model)
    formats: dict[str, Format] = dict.fromkeys(config.linear_names(), "int8")
    return Design(config.n_kv_head, config.n_inner, formats)


def test_a_design_that_leaves_nothing_out_keeps_the_model_as_it_is(
    small_dense: Path, tmp_path: Path
) -> None:
    design = the_whole(small_dense).to_json()
    recipe, _ = pruning_to(design, load_recipe("tiny-prune", []), [], small_dense)
    assert recipe is None
    source, output = (dsl.Model(uri=str(path)) for path in (small_dense, tmp_path / "pruned"))
    page = dsl.HTML(uri=str(tmp_path / "page.html"))
    assert copy_checkpoint(source, output, page)["loss"] > 0
    assert checkpoint_digest(tmp_path / "pruned") == checkpoint_digest(small_dense)
    assert "loss" in (tmp_path / "page.html").read_text()


def test_the_overrides_of_a_design_give_its_recipes(small_dense: Path) -> None:
    whole = the_whole(small_dense)
    design = replace(whole, heads=(1, *whole.heads[1:]))
    assert parse_design(design.to_json()) == design
    given = ["Compress.Quantization.skip_tensor_map={block_0: [out]}", "Engine.max_steps=3"]
    for change in (pruning_to, quantization_to):
        recipe, overrides = change(
            design.to_json(), load_recipe("tiny-qat", given), given, small_dense
        )
        assert load_recipe("tiny-qat", overrides) == recipe
        assert recipe != load_recipe("tiny-qat", given)
