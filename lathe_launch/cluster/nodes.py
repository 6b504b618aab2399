"""Finds the nodes that pods can be scheduled on, and explains why none fit: by labels and taints,
for a pool of GPUs, and for a worker that needs more memory."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import urllib3
from kubernetes import client, config  # type: ignore[import-untyped]
from kubernetes.utils.quantity import parse_quantity  # type: ignore[import-untyped]

from lathe_base.checks import Finding
from lathe_base.config.settings import LaunchSettings, Placement
from lathe_base.config.settings.placement import NODE_POOL, REQUIRED
from lathe_base.config.settings.types import parse_bytes
from lathe_base.errors import Code, StageError, UserError
from lathe_launch.cluster.api import WORK, Cluster, load_kubeconfig
from lathe_launch.cluster.reasons import has_ended
from lathe_launch.shape import require_whole_gpus

HARD = ("NoSchedule", "NoExecute")  # PreferNoSchedule keeps no pod off
LABELS = "kubectl get nodes --show-labels"
TIMEOUT = (10, 10)
"""Seconds to connect, and between two bytes of an answer."""
MEMORY_FACTOR = 1.5
MEMORY_KEYS = ("requests.memory", "limits.memory", "memory")
"""Keys of a quota to which a pod's memory counts."""
PATIENCE_SECONDS = 20.0
MIB = 2**20
Node = Any  # the client's models have no types


def takes(node: Node, settings: Placement, node_pool: str | None, has_gpus: bool) -> bool:
    """Whether the scheduler may put a pod with this placement on a node, ignoring free capacity."""
    return (
        not (node.spec and node.spec.unschedulable)
        and has_labels(node, settings.selector(node_pool))
        and has_affinity(node, settings.affinity)
        and not untolerated(node, settings.tolerated(node_pool, has_gpus))
    )


def has_labels(node: Node, selector: Mapping[str, str]) -> bool:
    """Whether a node has all these labels."""
    return selector.items() <= _labels(node).items()


def has_affinity(node: Node, affinity: Mapping[str, Any]) -> bool:
    """Whether a node meets one of the required terms of `nodeAffinity`, if there are any."""
    required = affinity.get("nodeAffinity", {}).get(REQUIRED, {})
    terms = required.get("nodeSelectorTerms", [])
    fields = {"metadata.name": node.metadata.name}
    for term in terms:
        demands = [(one, _labels(node)) for one in term.get("matchExpressions", [])]
        demands += [(one, fields) for one in term.get("matchFields", [])]
        if demands and all(_holds(one, values) for one, values in demands):
            return True
    return not terms


def untolerated(node: Node, tolerations: Iterable[Mapping[str, Any]]) -> list[str]:
    """The taints that keep off pods with these tolerations."""
    return [
        taint.key
        for taint in _taints(node)
        if taint.effect in HARD and not any(tolerates(one, taint) for one in tolerations)
    ]


def tolerates(toleration: Mapping[str, Any], taint: Any) -> bool:
    """Whether a toleration matches a taint."""
    return (
        toleration.get("key") in (None, taint.key)
        and toleration.get("effect") in (None, taint.effect)
        and (
            toleration.get("operator") == "Exists"
            or (toleration.get("value") or "") == (taint.value or "")
        )
    )


def _holds(demand: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(demand["key"]), demand.get("values", [])
    match demand.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator if value and value.isdigit() and values:
            number, bound = int(value), int(values[0])
            return number > bound if operator == "Gt" else number < bound
    return False


def _labels(node: Node) -> dict[str, str]:
    return dict(node.metadata.labels or {})


def _taints(node: Node) -> list[Any]:
    return list((node.spec and node.spec.taints) or [])


def doubts(nodes: Sequence[Node], settings: Placement, has_gpus: bool) -> list[Finding]:
    """Labels, taints and resources of a placement that no node has, each with the existing ones.

    These are warnings, because an autoscaler may add other nodes.
    """
    findings = []
    for key, value in settings.node_selector.items():
        values = sorted({labels[key] for labels in map(_labels, nodes) if key in labels})
        if value not in values:
            there = f"{key} is {', '.join(values)}" if values else f"no node has {key}"
            findings.append(
                (f"Launch.node_selector: {key}={value}: no node has this label: {there}", LABELS)
            )
    if settings.affinity and not any(has_affinity(node, settings.affinity) for node in nodes):
        names = ", ".join(node.metadata.name for node in nodes)
        findings.append((f"Launch.affinity: none of {names} matches it", LABELS))
    taints = {_shown(taint): taint for node in nodes for taint in _taints(node)}
    for one in settings.tolerations:
        if not any(tolerates(one.manifest, taint) for taint in taints.values()):
            there = ", ".join(sorted(taints)) or "there is none"
            said = f"Launch.tolerations: {one.key}: no node has this taint: {there}"
            findings.append((said, "kubectl describe nodes | grep -A3 Taints"))
    # Taints that keep pods off all nodes that the settings select.
    chosen = [
        node
        for node in nodes
        if has_labels(node, settings.node_selector) and has_affinity(node, settings.affinity)
    ]
    allowed = settings.tolerated(None, has_gpus)
    if settings.chooses_nodes and chosen and all(untolerated(node, allowed) for node in chosen):
        keys = {key for node in chosen for key in untolerated(node, allowed)}
        names = ", ".join(node.metadata.name for node in chosen)
        shown = sorted(_shown(t) for node in chosen for t in _taints(node) if t.key in keys)
        said = f"Launch.tolerations: not tolerated on the chosen nodes, {names}: {', '.join(shown)}"
        hint = f"add {{key: {min(keys)}, operator: Exists}}, or choose other nodes"
        findings.append((said, hint))
    resources = {name for node in nodes for name in (node.status.allocatable or {}) if "/" in name}
    if has_gpus and settings.gpu_resource not in resources:
        there = ", ".join(sorted(resources)) or "there is none"
        said = f"Launch.gpu_resource: no node has {settings.gpu_resource}: {there}"
        hint = "install the vendor's device plugin, or use a resource that the nodes have"
        findings.append((said, f"{hint}; nodes do not list what a DeviceClass provides (DRA)"))
    return [Finding("placement", "warning", said, hint) for said, hint in findings]


def _shown(taint: Any) -> str:
    return f"{taint.key}{f'={taint.value}' if taint.value else ''}:{taint.effect}"


def pool_labels(nodes: Iterable[Node], settings: Placement, node_pool: str) -> list[dict[str, str]]:
    """The labels of the nodes on which pods with GPUs and this placement may run."""
    return [_labels(node) for node in nodes if takes(node, settings, node_pool, has_gpus=True)]


def node_pool_shortage(
    name: str,
    nodes: int,
    gpus: int,
    context: str | None = None,
    settings: Placement = Placement(),  # noqa: B008
) -> UserError | None:
    """The shortage of a pool for `nodes` pods with `gpus` GPUs each, which may share a node.

    GPUs in use count as available. A shortage may not be an error: autoscaled pools start empty.

    Args:
        name: that of the pool, unless the settings select nodes themselves.
        context: kube context; the current one if None.

    Raises:
        UserError: several slices of GPUs for one pod.
        StageError: the cluster did not list its nodes; the message has the reason.
    """
    listed, matching = _pool_nodes(name, context, settings)
    require_whole_gpus(gpus, settings, [_labels(node) for node in matching])
    # No node at all, then too few GPUs.
    if not matching and settings.chooses_nodes:
        said = "; ".join(doubt.said for doubt in doubts(listed, settings, has_gpus=True))
        return UserError(
            f"no node matches the recipe's Launch settings: {said or 'taints, or labels'}",
            "`make doctor` lists the nodes",
            Code.NO_ROOM,
        )
    if not matching:
        return UserError(
            f"node pool {name}: no node has the label {NODE_POOL}={name} and no taint other than "
            f"{settings.gpu_taint}",
            f"kubectl label node NODE {NODE_POOL}={name}, or use another pool (NODE_POOL=)",
            Code.NO_ROOM,
        )
    resource = settings.gpu_resource
    counts = [int((node.status.allocatable or {}).get(resource, 0)) for node in matching]
    if sum(count // gpus for count in counts) >= nodes:
        return None
    has = ", ".join(
        f"{node.metadata.name} has {count}" for node, count in zip(matching, counts, strict=True)
    )
    where = "chosen nodes" if settings.chooses_nodes else f"node pool {name}"
    return UserError(
        f"{where}: {nodes} pods with {gpus} GPUs each ({resource}) are requested, but {has}",
        "request fewer (NODES=, GPUS=), or another pool (NODE_POOL=)",
        Code.NO_ROOM,
    )


def gpu_memory(
    name: str,
    context: str | None = None,
    settings: Placement = Placement(),  # noqa: B008
) -> float | None:
    """Bytes of the smallest GPU of a pool, or of its smallest slice if the resource is a MIG slice;
    None if no node has the label.

    NVIDIA's GPU feature discovery labels nodes with `RESOURCE.memory` in MiB, for `nvidia.com/gpu`
    and for each kind of slice. A shared GPU, `RESOURCE.shared`, has the label of the whole GPU.

    Raises:
        StageError: see `node_pool_shortage`.
    """
    _, matching = _pool_nodes(name, context, settings)
    label = f"{settings.gpu_resource.removesuffix('.shared')}.memory"
    sizes = (_labels(node).get(label, "") for node in matching)
    return min((float(size) * 2**20 for size in sizes if size.isdigit()), default=None)


def _pool_nodes(
    name: str, context: str | None, settings: Placement
) -> tuple[list[Node], list[Node]]:
    """All nodes, and those of the pool."""
    try:
        configuration = client.Configuration()
        configuration.retries = False
        load_kubeconfig(configuration, context)
        api = client.CoreV1Api(client.ApiClient(configuration))
        listed = api.list_node(_request_timeout=TIMEOUT).items
    except config.ConfigException as error:
        raise StageError(f"no kube context: {error}", Code.UNAUTHORIZED) from None
    except client.ApiException as error:
        raise StageError(
            f"the cluster does not list its nodes: {error.reason}", Code.SERVER_ERROR
        ) from None
    except urllib3.exceptions.HTTPError as error:
        raise StageError(f"the cluster does not answer: {error}", Code.UNREACHABLE) from None
    pool_nodes = [node for node in listed if takes(node, settings, name, has_gpus=True)]
    return listed, pool_nodes


def more_memory(amount: str) -> str:
    """`MEMORY_FACTOR` times a Kubernetes quantity of memory, rounded up to MiB; in GiB if that is
    the same."""
    mib = math.ceil(MEMORY_FACTOR * parse_bytes(amount) / MIB)
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
    replaced = [pod for pod in cluster.pods(f"{WORK}={work}") if not has_ended(pod)]
    # The pods of the failed attempt that have not ended count as used until it is deleted.
    freed = len(replaced) * parse_bytes(settings.memory_per_node)
    pool, has_gpus = settings.node_pool, bool(settings.gpus_per_node)
    _require_memory(
        cluster, settings.nodes, amount, freed, lambda node: takes(node, settings, pool, has_gpus)
    )


def require_room_like(cluster: Cluster, pod: Any, amount: str) -> None:
    """Check that the quotas and the nodes allow another pod like this V1Pod, which has ended, with
    this much memory.

    Raises: see `require_room`.
    """
    plain = client.ApiClient().sanitize_for_serialization
    spec = pod.spec
    devices = [(c.resources and c.resources.limits) or {} for c in spec.containers]

    def fits(node: Node) -> bool:
        allocatable = node.status.allocatable or {}
        return (
            not (node.spec and node.spec.unschedulable)
            and has_labels(node, spec.node_selector or {})
            and has_affinity(node, plain(spec.affinity) or {})
            and not untolerated(node, plain(spec.tolerations) or [])
            and all(parse_quantity(allocatable.get(name, "0")) >= parse_quantity(count)
                    for limits in devices for name, count in limits.items() if "/" in name)
        )  # fmt: skip

    _require_memory(replace(cluster, patience=PATIENCE_SECONDS), 1, amount, 0, fits)


def _require_memory(
    cluster: Cluster, pods: int, amount: str, freed: float, fits: Callable[[Node], bool]
) -> None:
    """Check that the quotas, with `freed` bytes more, and the nodes that fit allow so many pods
    with this much memory each."""
    wanted, core = parse_bytes(amount), client.CoreV1Api(cluster.api)
    for quota in cluster.ask(core.list_namespaced_resource_quota, cluster.namespace).items:
        hard, used = quota.status.hard or {}, quota.status.used or {}
        for key in (key for key in MEMORY_KEYS if key in hard):
            left = parse_quantity(hard[key]) - parse_quantity(used.get(key, "0")) + freed
            if pods * wanted > left:
                raise StageError(
                    f"the quota {quota.metadata.name} has {hard[key]} {key}, of which "
                    f"{used.get(key, '0')} are used",
                    Code.NO_ROOM,
                )
    sizes = {
        node.metadata.name: parse_quantity((node.status.allocatable or {}).get("memory", "0"))
        for node in cluster.ask(core.list_node).items
        if fits(node)
    }
    # As if the nodes were empty: other pods may end, and the scheduler decides.
    if sum(size // wanted for size in sizes.values()) < pods:
        there = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in sizes.items())
        raise StageError(
            f"of the nodes that it may run on, too few have it: {there or 'none'}", Code.NO_ROOM
        )
