"""Bind a process to the CPUs beside its GPU.

On a machine with several sockets, a CPU of the other one starts kernels later, and pinned memory
that it has allocated is copied over the link between the sockets.
"""

import logging
import os
from pathlib import Path

import torch

log = logging.getLogger("lathe")

SYSTEM = Path("/sys")


def bind_to_gpu(device: torch.device) -> None:
    """Bind this process and its later threads to the CPUs of the GPU's NUMA node, as far as it may
    use them; nothing happens where the machine does not say which they are.

    `torchrun --numa-binding` does the same with the program numactl, which the image does not have.
    """
    properties = torch.cuda.get_device_properties(device)
    names = "pci_domain_id", "pci_bus_id", "pci_device_id"  # which torch's stubs do not have
    address = "{:04x}:{:02x}:{:02x}.0".format(*(getattr(properties, name) for name in names))
    try:
        node = int((SYSTEM / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
        listed = (SYSTEM / f"devices/system/node/node{node}/cpulist").read_text(
            encoding="ascii"
        )  # 0-3,8-11
    except OSError:  # no such files in this container, or one node, whose number is -1
        return
    near = set[int]()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        near |= set(range(int(first), int(last or first) + 1))
    allowed = os.sched_getaffinity(0)
    if near & allowed and not allowed <= near:
        os.sched_setaffinity(0, near & allowed)
        log.debug("bound to %d CPUs of NUMA node %d, beside %s", len(near & allowed), node, device)
