"""Model -> INT8 model on Triton."""

from pipelines.steps.groups import judge_quantized, quantization
from pipelines.steps.steps import Steps, imported, look_up


def qat(
    model: str,
    recipe: str = "tiny-qat",
    corpus: str = "",
    tokenizer: str = "",
    cloze: str = "",
    production: str = "",
    overrides: list[str] = [],  # noqa: B006
) -> None:
    """Quantize a trained model to INT8, and deploy it if it passes the gate.

    Args:
        model: Path or address of a checkpoint folder, dense or pruned.
        recipe: Name or path of the quantization recipe.
        corpus: File, folder, address or data set name; the recipe's when empty.
        tokenizer: Tokenizer file or folder; the model's when empty.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.
        production: Address of the releases; a model that passes the gate against the live one goes
            live. Nothing is released when empty.
        overrides: Settings that replace the recipe's, as `Group.key=value`.
    """
    given = {"corpus": corpus, "tokenizer": tokenizer, "model": model, "cloze": cloze}
    found = look_up(recipe, overrides, **given)
    steps = Steps(overrides, found)

    dense = imported(model)
    data = steps.prepare(recipe, tokenizer=tokenizer, model=dense).outputs["data"]
    quantized = quantization(  # sensitivity analysis, then QAT
        recipe=recipe, overrides=overrides, model=dense, data=data, weights=found["weights"]
    ).outputs
    judge_quantized(  # evaluate and export both, gate, deploy, report
        recipe=recipe,
        overrides=overrides,
        dense=dense,
        int8=quantized["quantized"],
        sensitivity=quantized["sensitivity"],
        data=data,
        cloze=cloze,
        production=production,
        weights=found["weights"],
        scored=found["scored"],
    )
