"""Arguments of a run -> location of its text, and content identifiers of every address."""

from typing import NamedTuple

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("waiting", hours=0.5, is_cached=False, seconds=2)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def inputs(
    recipe: str,
    overrides: list[str],
    prune_recipe: str = "",
    qat_recipe: str = "",
    corpus: str = "",
    tokenizer: str = "",
    model: str = "",
    init: str = "",
    cloze: str = "",
) -> NamedTuple(
    "RunInputs", [("corpus", str), ("text", dict), ("weights", dict), ("scored", dict)]
):
    """Identify a run's external inputs by their contents, so that changed contents are not cached.

    Args:
        recipe: Name or path of the run's recipe, with the default text and tokenizer.
        overrides: Settings that replace the recipes', as `Group.key=value`.
        prune_recipe: Recipe of the pruning steps, in pipelines that have one.
        qat_recipe: Recipe of the quantization steps, in pipelines that have one.
        corpus: File, folder, address or data set name; the recipe's when empty.
        tokenizer: Tokenizer file or folder; the model's when empty, else the recipe's.
        model: Checkpoint folder that the run starts from.
        init: Checkpoint folder with the initial weights for training.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.

    Returns:
        corpus: Location of the text; for `newest:PLACE`, the newest one now.
        text: Content identifiers of the text, the tokenizer and the model with a tokenizer.
        weights: Content identifiers of the initial weights and a teacher.
        scored: Content identifiers of everything that evaluations read.
    """
    import logging

    from components.stage import stage
    from lathe.data.run_inputs import look_up
    from lathe_base.config.recipe import load_recipe

    with stage(recipe, overrides):
        names = [recipe, *(name for name in (prune_recipe, qat_recipe) if name)]
        settings = [load_recipe(name, overrides) for name in names]
        found = look_up(settings, corpus, tokenizer, model, init, cloze)
        for place, content in (found.text | found.scored).items():
            logging.getLogger("lathe").info("%s: %s", place, content)
        return (found.corpus, found.text, found.weights, found.scored)
