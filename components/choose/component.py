"""Several INT8 models -> the best one that meets a target within a budget."""

from kfp import dsl

from components.images import TRAIN
from components.supervise import supervised


@supervised
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def choose(
    recipe: str,
    overrides: list[str],
    target: str,
    budget: str,
    ratios: list[float],
    dense_evaluation: dsl.Input[dsl.Dataset],
    dense_export: dsl.Input[dsl.Model],
    models: dsl.Input[list[dsl.Model]],
    evaluations: dsl.Input[list[dsl.Dataset]],
    exports: dsl.Input[list[dsl.Model]],
    chosen: dsl.Output[dsl.Model],
    exported: dsl.Output[dsl.Model],
    trials: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Compare every model with the dense one and copy the best.

    Args:
        recipe: Name or path of the recipe (group Gate).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        target: latency, prefill, bytes or parameters, and a share of the dense model's.
        budget: accuracy=-POINTS, or perplexity=RELATIVE INCREASE.
        ratios: What was pruned of each model.
        dense_evaluation: Evaluation of the model before compression.
        dense_export: Its ONNX folder.
        models: INT8 checkpoint folders, in the order of `ratios`.
        evaluations: Their evaluations.
        exports: Their ONNX folders.
        chosen: The best checkpoint folder.
        exported: Its ONNX folder.
        trials: Folder with the figures of all models as JSON.
        page: What each costs and is worth, in a picture and a table.
        metrics: The best model's figures.
    """
    import shutil
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.search import goal, judge, result

    with stage(recipe, overrides) as settings:
        aim, out = goal.parse_goal(target, budget), Path(trials.path)
        candidates = judge.gather(ratios, local(*models), local(*evaluations), local(*exports))
        found = judge.choose(settings, aim, local(dense_evaluation, dense_export), candidates, out)
        shutil.copyfile(out / result.PAGE, page.path)
        index = found.trials.index(result.require_met(found))
        for source, copy in ((models[index], chosen), (exports[index], exported)):
            shutil.copytree(*local(source), copy.path)
            copy.metadata.update(source.metadata)
        record(found.best, metrics, chosen, exported, trials, page)
