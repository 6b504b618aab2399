"""The command that measures the links between the processes of a training."""

import sys
from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import Overrides, load
from lathe_base.console import show


@app.command("all-reduce", epilog="Example: lathe all-reduce -o Distributed.dp_degree=2")
def all_reduce(
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds to repeat it for.")] = 20.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as a line of JSON, for `make doctor`.")
    ] = False,
    override: Overrides = None,
) -> None:
    """Measure the bus bandwidth of an all-reduce between the processes of a training.

    By default between all GPUs of this machine, with NCCL; between CPU processes with gloo. The bus
    bandwidth is that of nccl-tests: bytes / seconds x 2 (n - 1) / n for n processes. `make doctor
    ALL_REDUCE=1` runs it between two nodes of a cluster.
    """
    settings = load("tiny", override)
    from lathe.backends import start_workers
    from lathe.train.bandwidth import measure_all_reduce
    from lathe.train.workers import join_workers

    if start_workers(sys.argv[1:], settings):
        return
    with join_workers(settings) as workers:
        result = measure_all_reduce(workers, seconds)
        if not workers.is_first:
            return
    finding = result.finding()
    if as_json:
        print(finding.line(), flush=True)
        return
    show(
        processes=result.processes,
        nodes=result.nodes,
        device=result.device,
        network=result.network,
        seconds_per_call=result.seconds,
        bus_bandwidth=f"{result.bus / 1e9:.2f} GB/s",
        links=None if result.link is None else f"{result.link / 1e9:.0f} GB/s by data sheet",
        warning=f"{finding.said}; {finding.hint}" if finding.state != "ok" else None,
    )
