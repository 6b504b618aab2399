"""Model -> INT8 model on Triton."""

from kfp import dsl

from components.finetune.component import finetune
from components.report.component import report
from pipelines.steps.steps import Steps, imported, quantization, rehearse_and_release


def qat(
    steps: Steps,
    model: str,
    recipe: str = "tiny-qat",
    finetune_recipe: str = "smollm2-chat",
    corpus: str = "",
    chat: str = "",
    tokenizer: str = "",
    cloze: str = "",
    production: str = "",
    overrides: list[str] = [],  # noqa: B006
) -> None:
    """Quantize a trained model to INT8, and deploy it if it passes the gate.

    Args:
        model: Path or address of a checkpoint folder, dense or pruned.
        recipe: Name or path of the quantization recipe.
        finetune_recipe: Name or path of the recipe that finetunes on the conversations.
        corpus: File, folder, address or data set name; the recipe's when empty.
        chat: File, folder, address or data set name of conversations, on which the model is
            finetuned first.
        tokenizer: Tokenizer file or folder; the model's when empty.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.
        production: Address of the releases; a model that passes the gate against the live one goes
            live. Nothing is released when empty.
        overrides: Settings that replace the recipe's, as `Group.key=value`.
    """
    sources = {"corpus": chat or corpus, "tokenizer": tokenizer, "model": model, "cloze": cloze}
    sources |= {"finetune_recipe": finetune_recipe} if chat else {}
    steps.look_up(recipe, overrides, **sources)

    dense = imported(model)
    data = steps.prepare(tokenizer=tokenizer, model=dense).outputs["data"]
    if chat:
        dense = steps.add(finetune, model=dense, data=data).outputs["finetuned"]
    int8 = steps.group(quantization, model=dense, data=data).outputs  # analyze, quantize
    steps.group(
        judge,
        dense=dense,
        int8=int8["quantized"],
        sensitivity=int8["sensitivity"],
        data=data,
        cloze=cloze,
        production=production,
    )


def judge(
    steps: Steps,
    dense: dsl.Input[dsl.Model],
    int8: dsl.Input[dsl.Model],
    sensitivity: dsl.Input[dsl.Dataset],
    data: dsl.Input[dsl.Dataset],
    cloze: str,
    production: str,
) -> None:
    """A sub-pipeline: evaluate and export both models, deploy the last, and report on them."""
    results = steps.compare({"dense": dense, "int8": int8}, data, cloze)
    deployed = rehearse_and_release(steps, int8, results, data, cloze, production)
    steps.add(report, **results, sensitivity=sensitivity, deployed=deployed)
