"""Text -> trained model, evaluated."""

from kfp import dsl

from components.certify.component import certify
from components.evaluate.component import evaluate
from components.pretrain.component import pretrain as train
from pipelines.steps.steps import Steps


def pretrain(
    steps: Steps,
    recipe: str = "tiny",
    corpus: str = "",
    tokenizer: str = "",
    model: str = "",
    cloze: str = "",
    kills: int = 0,
    overrides: list[str] = [],  # noqa: B006
) -> None:
    """Prepare the data, train a GPT and evaluate it.

    Args:
        recipe: Name or path of the training recipe.
        corpus: File, folder, address or data set name; the recipe's when empty.
        tokenizer: Tokenizer file or folder; the recipe's when empty.
        model: Checkpoint folder with the initial weights; random weights when empty.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.
        kills: Number of times to kill training for a certificate that it resumes to the same model;
            0 makes none.
        overrides: Settings that replace the recipe's, as `Group.key=value`.
    """
    sources = {"corpus": corpus, "tokenizer": tokenizer, "init": model, "cloze": cloze}
    steps.look_up(recipe, overrides, **sources)
    data = steps.prepare(tokenizer=tokenizer).outputs["data"]
    trained = steps.add(train, data=data, init=model).outputs["model"]
    # Other trainings with the same settings, beside the one whose model is evaluated.
    with dsl.If(kills > 0, "certified"):
        steps.add(certify, data=data, kills=kills)
    steps.add(evaluate, "dense", model=trained, data=data, cloze=cloze)
