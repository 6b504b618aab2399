"""Model -> pruned model beside the dense one."""

from pipelines.steps import Steps, imported, look_up


def prune(
    model: str,
    recipe: str = "tiny-prune",
    corpus: str = "",
    tokenizer: str = "",
    cloze: str = "",
    overrides: list[str] = [],  # noqa: B006
):
    """Prune a trained model, finetune it, and compare it with what it was.

    Args:
        model: Path or address of a checkpoint folder.
        recipe: Name or path of the pruning recipe.
        corpus: File, folder, address or data set name; the recipe's when empty.
        tokenizer: Tokenizer file or folder; the model's when empty.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.
        overrides: Settings that replace the recipe's, as `Group.key=value`.
    """
    given = {"corpus": corpus, "tokenizer": tokenizer, "model": model, "cloze": cloze}
    steps = Steps(overrides, look_up([recipe], overrides, **given))
    dense = imported(model)
    data = steps.prepare(recipe, tokenizer=tokenizer, model=dense).outputs["data"]
    pruned = steps.prune(recipe, model=dense, data=data).outputs["pruned"]
    models = {"dense": dense, "pruned": pruned}
    steps.report(recipe, models, **steps.compare(recipe, models, data, cloze))
