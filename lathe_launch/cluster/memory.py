"""More memory for a TrainJob whose worker ran out of it, if the namespace and the nodes have it."""

import math
from dataclasses import replace

from kubernetes.utils.quantity import parse_quantity  # type: ignore[import-untyped]

from lathe_base.config.settings import LaunchSettings
from lathe_base.config.settings.types import parse_bytes
from lathe_base.errors import Code, StageError
from lathe_launch.cluster.api import WORK, Cluster
from lathe_launch.cluster.nodes import takes
from lathe_launch.cluster.reasons import has_ended

FACTOR = 1.5
MIB = 2**20
KEYS = ("requests.memory", "limits.memory", "memory")
"""Keys of a quota to which a pod's memory counts."""
PATIENCE_SECONDS = 20.0


def more_memory(amount: str) -> str:
    """`FACTOR` times a Kubernetes quantity of memory, rounded up to MiB, or to GiB if that is the
    same."""
    mib = math.ceil(FACTOR * parse_bytes(amount) / MIB)
    return f"{mib // 1024}Gi" if mib % 1024 == 0 else f"{mib}Mi"


def require_room(cluster: Cluster, settings: LaunchSettings, amount: str, work: str) -> None:
    """Check that the quotas and the nodes allow every worker this much memory.

    Args:
        work: label of the pods that it would replace.

    Raises:
        StageError: they do not.
        UserError: this account may not read them.
    """
    cluster = replace(cluster, patience=PATIENCE_SECONDS)
    wanted = parse_bytes(amount)
    replaced = [pod for pod in cluster.pods(f"{WORK}={work}") if not has_ended(pod)]
    freed = len(replaced) * parse_bytes(settings.memory_per_node)
    for quota in cluster.quotas():
        hard, used = quota.status.hard or {}, quota.status.used or {}
        for key in (key for key in KEYS if key in hard):
            left = parse_quantity(hard[key]) - parse_quantity(used.get(key, "0")) + freed
            if settings.nodes * wanted > left:
                raise StageError(
                    f"the quota {quota.metadata.name} has {hard[key]} {key}, of which "
                    f"{used.get(key, '0')} are used",
                    Code.NO_ROOM,
                )
    sizes = {
        node.metadata.name: parse_quantity((node.status.allocatable or {}).get("memory", "0"))
        for node in cluster.nodes()
        if takes(node, settings, settings.node_pool, bool(settings.gpus_per_node))
    }
    if sum(size // wanted for size in sizes.values()) < settings.nodes:
        there = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in sizes.items())
        raise StageError(
            f"of the nodes that it may run on, too few have it: {there or 'none'}", Code.NO_ROOM
        )
