"""Shows what a run has made at the top of its graph, and posts it if that is wanted."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("waiting", hours=0.25, is_cached=False)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def notify(
    pipeline: str,
    is_wanted: bool,
    page: dsl.Output[dsl.HTML],
    notice: dsl.Output[dsl.Artifact],
    status: dsl.PipelineTaskFinalStatus,
):
    """Copy the report of the run to its graph's first level, and post the result to the address in
    LATHE_WEBHOOK.

    Args:
        pipeline: Name of the pipeline.
        is_wanted: Whether to post it.
        page: The run's report; without one, its state and the figures that it has.
        notice: The posted JSON; absent if it is not wanted.
        status: Final state of the other steps, filled in by Pipelines.
    """
    import os
    from pathlib import Path

    from components.stage import log_plainly
    from lathe.report.results import make_notice, make_page
    from lathe_base.tracking.webhook import post
    from lathe_launch.cluster.status import final_state

    log_plainly()
    run, ui = os.environ["KFP_RUN_ID"], os.environ.get("LATHE_KFP_UI", "").rstrip("/")
    run_address = page.uri.partition(run)[0] + run + "/"
    state = final_state(status.state, status.pipeline_job_resource_name, status.pipeline_task_name)
    run_page = f"{ui}/#/runs/details/{run}" if ui else ""
    told = make_notice(pipeline, run, state, run_address, run_page)
    Path(page.path).write_text(make_page(told), encoding="utf-8")
    if is_wanted:
        told.write(notice.path)
        post(told)
