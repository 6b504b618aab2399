"""Model -> pruned model, compared with the dense one."""

from components.prune.component import prune as prune_model
from pipelines.steps.groups import judge_pruned
from pipelines.steps.steps import Steps, imported, look_up


def prune(
    model: str,
    recipe: str = "tiny-prune",
    corpus: str = "",
    tokenizer: str = "",
    cloze: str = "",
    overrides: list[str] = [],  # noqa: B006
) -> None:
    """Prune a trained model, finetune it, and compare it with the original.

    Args:
        model: Path or address of a checkpoint folder.
        recipe: Name or path of the pruning recipe.
        corpus: File, folder, address or data set name; the recipe's when empty.
        tokenizer: Tokenizer file or folder; the model's when empty.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.
        overrides: Settings that replace the recipe's, as `Group.key=value`.
    """
    given = {"corpus": corpus, "tokenizer": tokenizer, "model": model, "cloze": cloze}
    found = look_up(recipe, overrides, **given)
    steps = Steps(overrides, found)

    dense = imported(model)
    data = steps.prepare(recipe, tokenizer=tokenizer, model=dense).outputs["data"]
    pruned = steps.add(prune_model, recipe, model=dense, data=data).outputs["pruned"]
    judge_pruned(  # evaluate and export both, report
        recipe=recipe,
        overrides=overrides,
        dense=dense,
        pruned=pruned,
        data=data,
        cloze=cloze,
        weights=found["weights"],
        scored=found["scored"],
    )
