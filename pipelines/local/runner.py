"""Run one pipeline with KFP's own local runner, every stage a subprocess of this Python.

`python -m pipelines.local.runner NAME ROOT CACHE SHARDS INPUTS ARGUMENTS` (the last two are JSON)
is the process that `pipelines.local.run` starts, reads and, if need be, ends.
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

from lathe.launch.parent import tied
from lathe.provenance.surroundings import PIPELINE
from pipelines.compiler.compile import build, named
from pipelines.compiler.resources import Variant
from pipelines.local.cache import CheckedCache


def run(
    name: str, root: str, cache: str, shards: int, inputs: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """Run pipeline `name`; outputs go to `root`, finished tasks are cached in `cache`.

    Args:
        inputs: what the run reads from outside; see `lathe.data.run_inputs.RunInputs`.

    Raises:
        RuntimeError: a task failed.
    """
    # "python" is not in the image's name; accelerators have no effect on a laptop.
    warnings.filterwarnings("ignore", module="kfp")
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    pipeline = build(name, Variant(shards=shards, inputs=inputs))
    os.environ[PIPELINE] = named(name, pipeline)
    spec = pipeline.component_spec.implementation.graph
    for dag in [spec.root, *spec.components.values()]:
        for task in dag.dag.tasks.values():
            task.ClearField(
                "retry_policy"
            )  # retries are for flaky nodes: show the error immediately
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=root,
        enable_caching=True,
        cache_root=cache,
    )
    # KFP has no option for either: keys that follow contents, and steps that end with this process.
    kfp_cache.LocalCache = CheckedCache
    kfp_subprocess.run_local_subprocess = _run_tied
    pipeline(**arguments)


def _run_tied(full_command: list[str], env_vars: dict[str, str] | None = None) -> int:
    return int(_run(tied(full_command), env_vars))


_run = kfp_subprocess.run_local_subprocess


if __name__ == "__main__":
    name, root, cache, shards, inputs, arguments = sys.argv[1:]
    run(name, root, cache, int(shards), json.loads(inputs), json.loads(arguments))
