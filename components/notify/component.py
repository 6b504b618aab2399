"""Posts a notification when a run has ended, if it is wanted."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("waiting", hours=0.25, is_cached=False)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def notify(
    pipeline: str,
    is_wanted: bool,
    notice: dsl.Output[dsl.Artifact],
    status: dsl.PipelineTaskFinalStatus,
):
    """Post the result of the run to the address in LATHE_WEBHOOK.

    Args:
        pipeline: Name of the pipeline.
        is_wanted: Whether to post it.
        notice: The posted JSON; absent if it is not wanted.
        status: Final state of the other steps, filled in by Pipelines.
    """
    import os

    from components.stage import log_plainly
    from lathe.report.notice import make_notice
    from lathe_base.tracking.webhook import post
    from lathe_launch.cluster.workflow import final_state

    log_plainly()
    if not is_wanted:
        return
    run, ui = os.environ["KFP_RUN_ID"], os.environ.get("LATHE_KFP_UI", "").rstrip("/")
    run_address = notice.uri.partition(run)[0] + run + "/"
    state = final_state(status.state, status.pipeline_job_resource_name, status.pipeline_task_name)
    page = f"{ui}/#/runs/details/{run}" if ui else ""
    told = make_notice(pipeline, run, state, run_address, page)
    told.write(notice.path)
    post(told)
