"""Trials of a search -> the best model that meets the target within the budget."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step(
    "cpu",
    hours=2,
)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def choose(
    recipe: str,
    target: str,
    budget: str,
    designs: dsl.Input[dsl.Artifact],
    dense_evaluation: dsl.Input[dsl.Dataset],
    dense_export: dsl.Input[dsl.Model],
    models: dsl.Input[list[dsl.Model]],
    evaluations: dsl.Input[list[dsl.Dataset]],
    exports: dsl.Input[list[dsl.Model]],
    chosen: dsl.Output[dsl.Model],
    evaluation: dsl.Output[dsl.Dataset],
    exported: dsl.Output[dsl.Model],
    trials: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    overrides: list[str] = [],  # noqa: B006
):
    """Compare every model with the dense one and copy the best.

    Args:
        recipe: Name or path of the recipe (group Gate).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        target: TARGET=SHARE of the dense model: latency, prefill, bytes or parameters.
        budget: accuracy=-POINTS, or perplexity=RELATIVE INCREASE.
        designs: JSON file of the component `design`.
        dense_evaluation: Evaluation of the model before compression.
        dense_export: Its ONNX folder.
        models: Quantized checkpoint folders, in the order of the designs.
        evaluations: Their evaluations.
        exports: Their ONNX folders.
        chosen: The best checkpoint folder.
        evaluation: Its evaluation.
        exported: Its ONNX folder.
        trials: Folder with the figures of all models as JSON.
        page: Size, speed and quality of all models, as a chart and a table.
        metrics: The best model's figures.
    """
    import shutil
    from pathlib import Path

    from components.artifacts import copy, local, record
    from components.stage import stage
    from lathe.search import design, proposals, result

    with stage(recipe, overrides) as settings:
        dense, out = local(dense_evaluation, dense_export), Path(trials.path)
        parts, plan = (models, evaluations, exports), proposals.read_proposals(*local(designs))
        aim, made = design.parse_goal(target, budget), [local(*part) for part in parts]
        choice = result.choose(settings, aim, plan, dense, *made, out)
        shutil.copyfile(out / result.PAGE, page.path)
        index = choice.trials.index(result.require_met(choice))
        for part, output in zip(parts, (chosen, evaluation, exported), strict=True):
            copy(part[index], output)
        record(choice.best, metrics, chosen, evaluation, exported, trials, page)
