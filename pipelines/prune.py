"""Model -> pruned model, compared with the dense one."""

from kfp import dsl

from components.prune.component import prune as prune_model
from components.report.component import report
from pipelines.steps.steps import Steps, imported


def prune(
    steps: Steps,
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
    sources = {"corpus": corpus, "tokenizer": tokenizer, "model": model, "cloze": cloze}
    steps.look_up(recipe, overrides, **sources)

    dense = imported(model)
    data = steps.prepare(tokenizer=tokenizer, model=dense).outputs["data"]
    pruned = steps.add(prune_model, model=dense, data=data).outputs["pruned"]
    steps.group(judge, dense=dense, pruned=pruned, data=data, cloze=cloze)


def judge(
    steps: Steps,
    dense: dsl.Input[dsl.Model],
    pruned: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    cloze: str,
) -> None:
    """A sub-pipeline: evaluate and export both models, and report on them."""
    steps.add(report, **steps.compare({"dense": dense, "pruned": pruned}, data, cloze))
