"""What NCCL chooses and what it last did, in the log and the folder of a run.

Without RDMA devices NCCL falls back to TCP, at a fraction of the speed, and says so only in a log
of its own. A process that waits in a collective for another says nothing until the timeout.
"""

import logging
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

log = logging.getLogger("lathe")

TCP = "Socket"  # NCCL's name of it
RDMA_HINT = (
    "if the nodes have RDMA devices, request them with Launch.extra_resources "
    "(docs/how-to/cluster-nodes.md#rdma-between-nodes)"
)
FLIGHT_OPERATIONS = 2000  # that it keeps
DEVICES = Path("/dev/infiniband")
LOCKED_BYTES = 2**30
"""Memory that RDMA must be able to lock, at least: its buffers are some tens of MB a connection."""


def log_network(device: torch.device, rank: int, size: int) -> str | None:
    """Start NCCL, in all processes, and say which network it has chosen; warn if it is TCP between
    nodes, or RDMA without memory that it may lock.

    NCCL reads `NCCL_DEBUG` when it starts. If the user has set it, NCCL's own log says everything.

    Returns:
        NCCL's name of the network, in the first process; None if it is not known.
    """
    if device.type != "cuda" or size == 1 or "NCCL_DEBUG" in os.environ:
        return None
    with TemporaryDirectory() as folder:
        said = Path(folder) / "nccl"
        variables = {"DEBUG": "INFO", "DEBUG_SUBSYS": "INIT,NET", "DEBUG_FILE": str(said)}
        os.environ |= {f"NCCL_{name}": value for name, value in variables.items()}
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
        for name in variables:
            del os.environ[f"NCCL_{name}"]
        text = said.read_text(encoding="utf-8", errors="replace") if said.is_file() else ""
    if rank != 0:
        return None
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = locked if DEVICES.exists() else resource.RLIM_INFINITY
    return describe_network(text, node_count(size), limit)


def node_count(size: int) -> int:
    """Number of nodes on which `size` processes run, as their launcher says."""
    return size // int(os.environ.get("LOCAL_WORLD_SIZE", size))


def describe_network(text: str, nodes: int, locked: int) -> str | None:
    """Log what NCCL's own log says about the network, and return its name; None if it says none.

    Args:
        locked: bytes that this process may lock, or RLIM_INFINITY.
    """
    chosen = re.findall(
        r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$", text, re.M
    )
    named = re.findall(r"NCCL INFO NET/\S+ : Using(.+)$", text, re.M)
    if not chosen:
        return None
    network: str = chosen[-1].strip()
    devices = named[-1].strip() if named else "devices not named"
    log.info("NCCL's network between nodes: %s (%s)", network, devices)
    if nodes == 1:
        return network
    if network == TCP:
        log.warning(
            "NCCL exchanges data between nodes over TCP, which is several times slower than RDMA: "
            "%s",
            RDMA_HINT,
        )
    if locked not in (resource.RLIM_INFINITY, -1) and locked < LOCKED_BYTES:
        log.warning(
            "processes may lock %d MiB of memory (ulimit -l), and RDMA needs more: set "
            "LimitMEMLOCK=infinity for the nodes' container runtime",
            locked // 2**20,
        )
    return network


@contextmanager
def flight_recorder(folder: Path) -> Iterator[None]:
    """Let NCCL keep the last collectives of every process, and write them to `folder` when one has
    not ended within its timeout. Variables that the user has set are left alone.

    Source: torch's flight recorder (docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial),
    whose `torchfrtrace` compares the files of all ranks.
    """
    if not torch.cuda.is_available():
        yield
        return
    variables = {
        "TORCH_FR_BUFFER_SIZE": str(FLIGHT_OPERATIONS),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.resolve() / "rank_"),  # and the rank's number
    }
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ |= ours
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
