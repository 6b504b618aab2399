"""Measures an all-reduce between two nodes: `python -m lathe_launch.cluster.all_reduce`.

`make doctor ALL_REDUCE=1` runs it in a temporary pod. Its TrainJob is made as a training's, with
the same runtime, network policies and devices; it belongs to that pod, and is deleted with it at
the latest. What the first worker prints is passed on, with its result, a `Finding`, as JSON.
"""

from typing import Annotated

import typer

from lathe_base.checks import Check, run_checks
from lathe_base.config.settings import LaunchSettings
from lathe_base.config.settings.placement import REQUIRED
from lathe_base.console import log_to_stderr
from lathe_launch.cluster.follow import Patience
from lathe_launch.cluster.trainjob import run
from lathe_launch.shape import Shape

STAGE = "all-reduce"
DEADLINE_HOURS = 0.25
PATIENCE = Patience(scheduling=300.0)


def two_nodes(settings: LaunchSettings) -> LaunchSettings:
    """The settings of the TrainJob: those of a training, with two pods on different nodes."""
    settings = settings.of_step("pretrain")
    selector = {"labelSelector": {"matchLabels": {"lathe/stage": STAGE}}}
    apart = {REQUIRED: [selector | {"topologyKey": "kubernetes.io/hostname"}]}
    return settings.model_copy(
        update={
            "nodes": 2,
            "restarts": 0,
            "deadline_hours": DEADLINE_HOURS,
            # Said as a label, since settings with an affinity override the pool.
            "node_selector": settings.selector(settings.node_pool),
            "affinity": settings.affinity | {"podAntiAffinity": apart},
        }
    )


def main(
    seconds: Annotated[float, typer.Option(help="Seconds to repeat the all-reduce for.")],
    launch: Annotated[str, typer.Option(help="The recipe's Launch group, as JSON.")] = "{}",
) -> None:
    """Measure an all-reduce between two nodes, and print what was found."""
    log_to_stderr()
    settings = two_nodes(LaunchSettings.model_validate_json(launch))
    gpus = settings.gpus_per_node
    command = [STAGE, "--json", f"--seconds={seconds:g}", "-o", f"Launch.gpus_per_node={gpus}"]

    def measure() -> None:
        run(command, Shape(2, max(1, gpus)), settings, PATIENCE)

    for finding in run_checks([Check(STAGE, measure)]):
        if finding.state != "ok":  # a result is in the worker's own line
            print(finding.line(), flush=True)


if __name__ == "__main__":
    typer.run(main)
