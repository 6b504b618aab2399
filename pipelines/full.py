"""Text -> trained, pruned and INT8 models -> Triton."""

from components.pretrain.component import pretrain
from components.prune.component import prune
from pipelines.steps.groups import judge_pruned_and_quantized, quantization
from pipelines.steps.steps import Steps, look_up


def full(
    recipe: str = "tiny",
    prune_recipe: str = "tiny-prune",
    qat_recipe: str = "tiny-qat",
    corpus: str = "",
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
        tokenizer: Tokenizer file or folder; the recipe's when empty.
        model: Checkpoint folder with the initial weights; random weights when empty.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.
        production: Address of the releases; a model that passes the gate against the live one goes
            live. Nothing is released when empty.
        overrides: Settings that replace every recipe's, as `Group.key=value`.
    """
    given = {"corpus": corpus, "tokenizer": tokenizer, "init": model, "cloze": cloze}
    given |= {"prune_recipe": prune_recipe, "qat_recipe": qat_recipe}
    found = look_up(recipe, overrides, **given)
    steps = Steps(overrides, found)

    data = steps.prepare(recipe, tokenizer=tokenizer).outputs["data"]
    dense = steps.add(pretrain, recipe, data=data, init=model).outputs["model"]
    pruned = steps.add(prune, prune_recipe, model=dense, data=data).outputs["pruned"]
    quantized = quantization(  # sensitivity analysis, then QAT
        recipe=qat_recipe,
        overrides=overrides,
        model=pruned,
        data=data,
        weights=found["weights"],
    ).outputs
    judge_pruned_and_quantized(  # evaluate and export all three, gate, deploy, report
        recipe=recipe,
        overrides=overrides,
        dense=dense,
        pruned=pruned,
        int8=quantized["quantized"],
        sensitivity=quantized["sensitivity"],
        data=data,
        cloze=cloze,
        production=production,
        weights=found["weights"],
        scored=found["scored"],
    )
