"""Model -> cloze accuracy and perplexity, example by example."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "gpu",
    hours=6,
    reads="scored",
    by_engine=True,
    seconds=10,
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def evaluate(
    recipe: str,
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    evaluation: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    reference: dsl.Input[dsl.Model] = None,
    cloze: str = "",
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Score a model: strict LAMBADA accuracy and WikiText-style perplexity.

    Args:
        recipe: Name or path of the recipe (group Offline_Eval).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        model: Checkpoint folder to score.
        data: Token data set with the held-out text and cloze examples.
        reference: Reference checkpoint folder for top-1 agreement and KL divergence; torch engine
            only.
        cloze: LAMBADA-format JSONL file; the data set's held-out examples when empty.
        evaluation: Folder with metrics.json, examples.jsonl and blocks.jsonl.
        metrics: Accuracy and perplexity with their standard errors.
        contents: Content identifiers of the initial weights and the examples, by address; the step
            fails if the contents differ.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe import backends
    from lathe_base.artifacts.remote import input_path

    with stage(recipe, overrides, contents) as settings:
        examples = input_path(cloze) if cloze else None
        is_torch = settings.Compress.engine == "torch"
        folder, corpus, beside = local(model, data, reference if is_torch else None)
        result = backends.of(settings).evaluate(
            settings, folder, Path(evaluation.path), corpus, examples, reference=beside
        )
        record(result.metrics(), metrics, evaluation)
