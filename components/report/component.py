"""Everything a run has made -> one HTML page."""

from kfp import dsl

from components.images import TRAIN


@dsl.component(base_image=TRAIN, install_kfp_package=False)
def report(
    recipe: str,
    overrides: list[str],
    dense_model: dsl.Input[dsl.Model],
    dense_evaluation: dsl.Input[dsl.Dataset],
    dense_export: dsl.Input[dsl.Model],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    pruned_model: dsl.Input[dsl.Model] = None,
    pruned_evaluation: dsl.Input[dsl.Dataset] = None,
    pruned_export: dsl.Input[dsl.Model] = None,
    int8_model: dsl.Input[dsl.Model] = None,
    int8_evaluation: dsl.Input[dsl.Dataset] = None,
    int8_export: dsl.Input[dsl.Model] = None,
    sensitivity: dsl.Input[dsl.Dataset] = None,
):
    """Measure the latency of the exported graphs side by side and write the report.

    Args:
        recipe: Name or path of the recipe (group Generation).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        dense_model: Checkpoint folder before compression.
        dense_evaluation: Its evaluation.
        dense_export: Its ONNX folder.
        pruned_model: Checkpoint folder after pruning.
        pruned_evaluation: Its evaluation.
        pruned_export: Its ONNX folder.
        int8_model: Checkpoint folder after quantization.
        int8_evaluation: Its evaluation.
        int8_export: Its ONNX folder.
        sensitivity: The analysis of the linear layers.
        page: Self-contained HTML with the table, the pictures and sample generations.
        metrics: The table's figures.
    """
    from pathlib import Path

    from components.stage import record, stage
    from lathe.report.page import report

    dense = (dense_model, dense_evaluation, dense_export)
    pruned = (pruned_model, pruned_evaluation, pruned_export)
    int8 = (int8_model, int8_evaluation, int8_export)
    parts = {"dense": dense, "pruned": pruned, "int8": int8}
    with stage(recipe, overrides) as settings:
        folders = {k: tuple(Path(a.path) for a in v) for k, v in parts.items() if v[0]}
        ranked = Path(sensitivity.path) if sensitivity else None
        result = report(settings, folders, Path(page.path), ranked)
        record(result, metrics, page)
