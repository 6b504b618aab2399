"""All results of a run -> one HTML page."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("waiting", hours=1, is_cached=False, trusts=True, seconds=6)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def report(
    recipe: str,
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
    deployed: dsl.Input[dsl.Model] = None,
    overrides: list[str] = [],  # noqa: B006
):
    """Measure the latency of the exported graphs side by side and write the report.

    Args:
        recipe: Name or path of the recipe (group Gate).
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
        deployed: The rehearsal of the deployment, for its sample texts.
        page: Self-contained HTML page with the table, charts and sample texts.
        metrics: The table's figures.
    """
    from pathlib import Path

    from components.artifacts import local, record, run_usage
    from components.stage import stage
    from lathe.report.report import report_run
    from lathe.report.summary import Candidate, format_name

    with stage(recipe, overrides) as settings:
        table = (
            ("dense", dense_model, dense_evaluation, dense_export),
            ("pruned", pruned_model, pruned_evaluation, pruned_export),
            (format_name(*local(int8_export)), int8_model, int8_evaluation, int8_export),
        )
        candidates = [Candidate(name, *local(*parts)) for name, *parts in table if parts[0]]
        analysis, rehearsal = local(sensitivity, deployed)
        output, usage = Path(page.path), run_usage(page)
        rows = report_run(settings, candidates, output, analysis, rehearsal, usage=usage)
        record({f"{r.name}.{k}": v for r in rows for k, v in r.figures().items()}, metrics, page)
