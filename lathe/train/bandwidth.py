"""Bandwidth of an all-reduce between the processes of a training, beside that of their links."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lathe.train.nccl import RDMA_HINT, TCP, node_count
from lathe.train.speed import known_gpu, ring_bandwidth
from lathe.train.workers import Workers
from lathe_base.checks import Finding
from lathe_base.errors import Code, UserError

CHECK = "all-reduce"
GPU_BYTES, CPU_BYTES = 2**30, 2**26
"""Size of the tensor: large enough that latency does not count."""
CALLS = 5  # between two readings of the clock
SLOW = 0.5
"""Part of the links' bandwidth below which something is likely to be wrong with them."""


@dataclass(frozen=True)
class AllReduce:
    """A measured all-reduce.

    Attributes:
        device: name of the GPU; `CPU` without one.
        network: NCCL's network between nodes, see `Workers`.
        size: bytes of the tensor.
        seconds: of one call, by the slowest process.
        link: bytes/s that the links should give, by the GPU's data sheet; None if it is unknown.
    """

    processes: int
    nodes: int
    device: str
    network: str | None
    size: int
    seconds: float
    link: float | None

    @property
    def bus(self) -> float:
        """Bus bandwidth in bytes/s: size / seconds * 2 (n - 1) / n for n processes, the rate at
        which data crosses the slowest link, which does not depend on n.

        Source: nccl-tests, github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
        """
        return self.size / self.seconds * 2 * (self.processes - 1) / self.processes

    def finding(self) -> Finding:
        """The result, with a warning for TCP between nodes and for slow links."""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        via = f", {self.network}" if self.network and self.nodes > 1 else ""
        said = (
            f"{self.bus / 1e9:.1f} GB/s bus bandwidth between {self.processes} "
            f"processes{nodes} ({self.device}{via})"
        )
        if self.link is not None:
            said += f"; the links should give {self.link / 1e9:.0f} GB/s"
        if self.network == TCP and self.nodes > 1:
            return Finding(CHECK, "warning", f"NCCL uses TCP between nodes: {said}", RDMA_HINT)
        if self.link is not None and self.bus < SLOW * self.link:
            hint = (
                "see which devices NCCL uses (NCCL_DEBUG=INFO in Launch.env), and that every GPU "
                "has a network port of its own"
            )
            return Finding(CHECK, "warning", said, hint)
        return Finding(CHECK, "ok", said)


def measure_all_reduce(workers: Workers, seconds: float) -> AllReduce:
    """Repeat an all-reduce of float32 between all processes for about this many seconds.

    Raises:
        UserError: there is only one process.
    """
    if workers.size == 1:
        raise UserError(
            "an all-reduce needs at least two processes, and there is one",
            "start more: -o Distributed.dp_degree=2",
            Code.LAYOUT,
        )
    is_gpu = workers.device.type == "cuda"
    size = GPU_BYTES if is_gpu else CPU_BYTES
    values = torch.zeros(size // 4, device=workers.device)
    dist.all_reduce(values)  # the first one connects the processes
    calls, total = 0, 0.0
    while total < seconds:
        if is_gpu:
            torch.cuda.synchronize(workers.device)
        dist.barrier(workers.files)
        begin = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(values)
        if is_gpu:
            torch.cuda.synchronize(workers.device)
        # The slowest process's time, also so that all stop at the same call.
        took = torch.tensor([time.perf_counter() - begin])
        dist.all_reduce(took, dist.ReduceOp.MAX, workers.files)
        total += took.item()
        calls += CALLS
    gpu, nodes = known_gpu(None) if is_gpu else None, node_count(workers.size)
    return AllReduce(
        processes=workers.size,
        nodes=nodes,
        device=torch.cuda.get_device_name(workers.device) if is_gpu else "CPU",
        network=workers.network,
        size=size,
        seconds=total / calls,
        link=ring_bandwidth(1, workers.size, workers.size // nodes, gpu) if gpu else None,
    )
