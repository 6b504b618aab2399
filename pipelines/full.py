"""Text -> trained, pruned and INT8 models -> Triton."""

from pipelines.steps import Steps


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
):
    """Train a GPT, prune it, quantize it to INT8, and deploy it when it is still good.

    Args:
        recipe: Name or path of the recipe that trains, evaluates, exports and serves.
        prune_recipe: Name or path of the pruning recipe.
        qat_recipe: Name or path of the quantization recipe.
        corpus: File, folder, address, data set name, or newest:PLACE; the recipe's when empty.
        tokenizer: Tokenizer file or folder; the recipe's when empty.
        model: Checkpoint folder whose weights to start from; random weights when empty.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.
        production: Address of the releases, among which a model that is as good as the live one
            goes live; none does when empty.
        overrides: Settings that replace every recipe's, as `Group.key=value`.
    """
    steps = Steps(overrides)
    data = steps.prepare(recipe, corpus=corpus, tokenizer=tokenizer).outputs["data"]
    dense = steps.pretrain(recipe, data=data, init=model).outputs["model"]
    pruned = steps.prune(prune_recipe, model=dense, data=data).outputs["pruned"]
    ranked = steps.analyze(qat_recipe, model=pruned, data=data).outputs["sensitivity"]
    int8 = steps.quantize(qat_recipe, model=pruned, data=data, sensitivity=ranked).outputs[
        "quantized"
    ]
    variants = {"dense": dense, "pruned": pruned, "int8": int8}
    results = steps.compare(recipe, variants, data, cloze)
    steps.ship(recipe, data, results | {"sensitivity": ranked}, cloze, production)
