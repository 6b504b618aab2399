"""Text, or a model and conversations -> trained, pruned and INT8 models -> Triton."""

from kfp import dsl

from components.finetune.component import finetune
from components.pretrain.component import pretrain
from components.prune.component import prune
from components.report.component import report
from pipelines.steps.steps import Steps, imported, quantization, rehearse_and_release


def full(
    steps: Steps,
    recipe: str = "tiny",
    prune_recipe: str = "tiny-prune",
    qat_recipe: str = "tiny-qat",
    corpus: str = "",
    chat: str = "",
    tokenizer: str = "",
    model: str = "",
    cloze: str = "",
    production: str = "",
    overrides: list[str] = [],  # noqa: B006
) -> None:
    """Train a GPT, prune it, quantize it to INT8, and deploy it if it passes the gate.

    Args:
        recipe: Name or path of the recipe that trains, evaluates, exports and serves.
        prune_recipe: Name or path of the pruning recipe.
        qat_recipe: Name or path of the quantization recipe.
        corpus: File, folder, address or data set name; the recipe's when empty.
        chat: File, folder, address or data set name of conversations, on which the model is
            finetuned; with it there is no pretraining.
        tokenizer: Tokenizer file or folder; the recipe's when empty.
        model: Checkpoint folder with the initial weights; random weights when empty.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.
        production: Address of the releases; a model that passes the gate against the live one goes
            live. Nothing is released when empty.
        overrides: Settings that replace every recipe's, as `Group.key=value`.
    """
    recipes = {"prune_recipe": prune_recipe, "qat_recipe": qat_recipe}
    sources = {"corpus": chat or corpus, "tokenizer": tokenizer, "cloze": cloze}
    sources |= {"model" if chat else "init": model}
    steps.look_up(recipe, overrides, **recipes, **sources)

    # Conversations finetune a model, and are rendered by its template; text trains one.
    if chat:
        start = imported(model)
        data = steps.prepare(tokenizer=tokenizer, model=start).outputs["data"]
        dense = steps.add(finetune, model=start, data=data).outputs["finetuned"]
    else:
        data = steps.prepare(tokenizer=tokenizer).outputs["data"]
        dense = steps.add(pretrain, data=data, init=model).outputs["model"]
    pruned = steps.add(prune, model=dense, data=data).outputs["pruned"]
    int8 = steps.group(quantization, model=pruned, data=data).outputs  # analyze, quantize
    steps.group(
        judge,
        dense=dense,
        pruned=pruned,
        int8=int8["quantized"],
        sensitivity=int8["sensitivity"],
        data=data,
        cloze=cloze,
        production=production,
    )


def judge(
    steps: Steps,
    dense: dsl.Input[dsl.Model],
    pruned: dsl.Input[dsl.Model],
    int8: dsl.Input[dsl.Model],
    sensitivity: dsl.Input[dsl.Dataset],
    data: dsl.Input[dsl.Dataset],
    cloze: str,
    production: str,
) -> None:
    """A sub-pipeline: evaluate and export all three models, deploy the last, and report on them."""
    results = steps.compare({"dense": dense, "pruned": pruned, "int8": int8}, data, cloze)
    deployed = rehearse_and_release(steps, int8, results, data, cloze, production)
    steps.add(report, **results, sensitivity=sensitivity, deployed=deployed)
