"""Arguments of a run -> where its text is, and what is behind every address."""

from typing import NamedTuple

from kfp import dsl

from components.images import TRAIN
from components.supervise import supervised


@supervised
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def inputs(
    recipes: list[str],
    overrides: list[str],
    corpus: str = "",
    tokenizer: str = "",
    model: str = "",
    init: str = "",
    cloze: str = "",
) -> NamedTuple(
    "RunInputs", [("corpus", str), ("text", dict), ("weights", dict), ("scored", dict)]
):
    """Identify the bytes that a run reads from outside, so that other bytes are another input.

    Args:
        recipes: Names or paths of the run's recipes; the first one's text and tokenizer are taken.
        overrides: Settings that replace the recipes', as `Group.key=value`.
        corpus: File, folder, address or data set name; the recipe's when empty.
        tokenizer: Tokenizer file or folder; the model's when empty, else the recipe's.
        model: Checkpoint folder that the run starts from.
        init: Checkpoint folder whose weights training starts from.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.

    Returns:
        corpus: Where the text is; of `newest:PLACE`, what is the newest one now.
        text: By address, what identifies the text, the tokenizer and the model that brings one.
        weights: By address, what identifies the weights that the run starts from, and a teacher.
        scored: The same of all that evaluations read.
    """
    import logging

    from components.stage import stage
    from lathe.config.recipe import load_recipe
    from lathe.data.run_inputs import look_up

    with stage(recipes[0], overrides):
        settings = [load_recipe(recipe, overrides) for recipe in recipes]
        found = look_up(settings, corpus, tokenizer, model, init, cloze)
        for place, content in (found.text | found.scored).items():
            logging.getLogger("lathe").info("%s: %s", place, content)
        return (found.corpus, found.text, found.weights, found.scored)
