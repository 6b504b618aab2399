"""Run one pipeline with KFP's local runner, each stage as a subprocess of this Python.

`pipelines.local.run` starts it as `python -m pipelines.local.runner NAME ROOT CACHE SHARDS INPUTS
ARGUMENTS`, where the last two are JSON.
"""

import json
import logging
import os
import sys
import warnings
from typing import Any

from kfp import local
from kfp.local import cache as kfp_cache
from kfp.local import subprocess_task_handler as kfp_subprocess

from lathe_base.provenance.surroundings import PIPELINE
from lathe_launch.parent import tied
from pipelines.compiler.compile import build, named
from pipelines.local.cache import CheckedCache
from pipelines.steps.resources import Variant


def run(
    name: str, root: str, cache: str, shards: int, inputs: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """Run pipeline `name`, with outputs in `root` and finished tasks cached in `cache`.

    Args:
        inputs: what the component `inputs` would return: `lathe.data.run_inputs.RunInputs`, and
            `components.plan.plan`.

    Raises:
        RuntimeError: a task failed.
    """
    # KFP warns of images without "python" in their names and of accelerators in local runs.
    warnings.filterwarnings("ignore", module="kfp")
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    has_chats = bool(arguments.get("chat"))
    pipeline = build(name, Variant(shards=shards, inputs=inputs, has_chats=has_chats))
    os.environ[PIPELINE] = named(name, pipeline)
    spec = pipeline.component_spec.implementation.graph
    for dag in [spec.root, *spec.components.values()]:
        for task in dag.dag.tasks.values():
            # Retries are for flaky nodes; here they would only delay the error.
            task.ClearField("retry_policy")
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=root,
        enable_caching=True,
        cache_root=cache,
    )
    # KFP has options for neither keys that depend on contents nor steps that end with this process.
    kfp_cache.LocalCache = CheckedCache
    run_subprocess = kfp_subprocess.run_local_subprocess

    def run_tied(full_command: list[str], env_vars: dict[str, str] | None = None) -> int:
        return int(run_subprocess(tied(full_command), env_vars))

    kfp_subprocess.run_local_subprocess = run_tied
    pipeline(**arguments)


if __name__ == "__main__":
    name, root, cache, shards, inputs, arguments = sys.argv[1:]
    run(name, root, cache, int(shards), json.loads(inputs), json.loads(arguments))
