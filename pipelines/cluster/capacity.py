"""Checks whether the cluster has room for a pipeline: the namespace's quota, and free capacity on
nodes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from typing import Any

from kfp.dsl.graph_component import GraphComponent
from kubernetes import client as kubernetes  # type: ignore[import-untyped]
from kubernetes.utils.quantity import parse_quantity  # type: ignore[import-untyped]

from components.machines import Pool, starts_trainjob
from components.plan import TRAINS
from lathe_base.checks import NOT_CHECKED, Check, Finding, State
from lathe_base.config.settings import LaunchSettings, Placements
from lathe_base.errors import Code, StageError, UserError
from lathe_launch.cluster.api import Cluster
from lathe_launch.cluster.nodes import doubts, pool_labels, takes
from lathe_launch.shape import require_whole_gpus
from pipelines.compiler.compile import step_containers

Amounts = dict[str, Decimal]
"""Resource name -> amount: cpu in cores, memory in bytes, GPUs."""
GIB = 1 << 30
PARAMETER = re.compile(r"pipelinechannel--(?:inputs-)?(\w+)'")
"""A parameter in a container's resources, with the name of an output of the component `inputs`."""
TRAINJOB = "the TrainJob"
COMPUTE = ("cpu", "memory", "ephemeral-storage")
"""Resources that every pod has to request, or limit, where a quota has them."""
COUNTS = ("pods", "count/pods")
OF_RUN = "count/workflows.argoproj.io"
OF_TRAINJOB = (
    "count/trainjobs.trainer.kubeflow.org",
    "count/jobsets.jobset.x-k8s.io",
    "count/jobs.batch",
    "count/services",
    "services",
)
"""Keys of a quota for the objects of which a TrainJob has one each: JobSet makes a Service."""
OBJECTS = ("count/", "configmaps", "secrets", "services", "persistentvolumeclaims")
"""Beginnings of the keys that count objects."""
MAIN, EXECUTOR = "main", "wait"
"""Argo's names of a step's own container and of the one beside it."""
WORKFLOW = "workflows.argoproj.io/workflow"


@dataclass(frozen=True)
class Need:
    """Resource requests of one kind of pod.

    Attributes:
        name: of the step, or of the TrainJob.
        pods: how many run at once.
        amounts: requests of each.
        limits: limits of each.
        extra: those of `Launch.extra_resources` in `amounts`.
    """

    name: str
    pods: int
    amounts: Amounts
    limits: Amounts = field(default_factory=dict)
    extra: Amounts = field(default_factory=dict)

    @property
    def gpus(self) -> Decimal:
        """Number of GPUs, for any GPU resource."""
        devices = self.amounts.keys() - self.extra.keys()
        return sum((self.amounts[name] for name in devices if "/" in name), Decimal(0))

    @property
    def stage(self) -> str:
        """The name in `Launch.steps`; a TrainJob has several."""
        return "pretrain" if self.name == TRAINJOB else self.name.partition("-")[0]

    def __str__(self) -> str:
        words = [f"{float(self.amounts.get('cpu', 0)):g} CPUs"]
        words.append(f"{self.amounts.get('memory', Decimal(0)) / GIB:.3g} GiB")
        if self.gpus:
            words.append(f"{self.gpus} GPUs")
        words += [f"{amount} {name}" for name, amount in self.extra.items()]
        return f"{self.name}: {f'{self.pods} pods with ' * (self.pods > 1)}{', '.join(words)}"


def resource_needs(
    pipeline: GraphComponent, launch: LaunchSettings, requests: Mapping[str, Any]
) -> list[Need]:
    """Resource requests of a pipeline's steps, without duplicates, and of its TrainJobs.

    Args:
        requests: values of the outputs of the component `inputs` that the steps' pods refer to.
    """
    needs: dict[tuple[tuple[str, Decimal], ...], Need] = {}
    for name, container in step_containers(pipeline).items():
        resources = container.get("resources", {})
        if amounts := _amounts(resources, "Request", requests):
            # Steps that request the same are one need, under the name of the first.
            key = tuple(sorted(amounts.items()))
            needs.setdefault(key, Need(name, 1, amounts, _amounts(resources, "Limit", requests)))
    all_needs = list(needs.values())
    if starts_trainjob(launch):
        pretrain_launch = launch.of_step("pretrain")
        worker = {"cpu": Decimal(pretrain_launch.cpus_per_node)}
        worker["memory"] = parse_quantity(pretrain_launch.memory_per_node)
        if pretrain_launch.gpus_per_node:
            worker[pretrain_launch.gpu_resource] = Decimal(pretrain_launch.gpus_per_node)
        asked = pretrain_launch.extra_resources.items()
        extra = {name: parse_quantity(str(amount)) for name, amount in asked}
        worker |= extra
        all_needs.append(Need(TRAINJOB, launch.nodes, worker, worker, extra))
    return all_needs


def _amounts(resources: dict[str, Any], kind: str, known: Mapping[str, Any]) -> Amounts:
    """The requests or limits of a container; of an accelerator both are the same.

    Args:
        kind: Request or Limit.
        known: values of the outputs of `inputs`, to which an amount may refer.
    """
    accelerator = resources.get("accelerator", {})
    stated = {
        "cpu": resources.get(f"resourceCpu{kind}"),
        "memory": resources.get(f"resourceMemory{kind}"),
        accelerator.get("resourceType"): accelerator.get("resourceCount"),
    }
    values = {
        name: known[match[1]] if (match := PARAMETER.search(value)) else value
        for name, value in stated.items()
        if value
    }
    return {name: amount for name, v in values.items() if (amount := parse_quantity(v))}


def capacity_checks(
    cluster: Cluster, needs: list[Need], pool: Pool, placement: Placements
) -> list[Check]:
    """Checks of quota, nodes, placement and slices of GPUs; missing permissions are warnings."""

    @cache
    def pods() -> list[Need]:
        try:
            return with_sidecars(needs, cluster.pods(WORKFLOW))
        except (UserError, StageError):
            return needs

    slices = Check("whole GPUs", lambda: _whole_gpus(cluster, pool, placement))
    return [
        *([slices] if pool.gpus else []),
        Check("quota", lambda: _quota(cluster, pods()), severity="warning"),
        Check("nodes", lambda: _nodes(cluster, pods(), pool, placement), severity="warning"),
    ]


def with_sidecars(needs: list[Need], pods: list[Any]) -> list[Need]:
    """The needs with what Argo and a service mesh add to a step's pod, as in the newest one.

    Only of resources that the step itself has: a quota asks every container for the others.

    Args:
        pods: V1Pods of Argo's workflows in the namespace; without one, nothing is known.
    """
    steps = [pod for pod in pods if any(c.name == EXECUTOR for c in pod.spec.containers)]
    if not steps:
        return needs
    spec = max(steps, key=lambda pod: pod.metadata.creation_timestamp).spec
    inits = spec.init_containers or []
    beside = [c for c in spec.containers if c.name != MAIN]
    beside += [c for c in inits if c.restart_policy == "Always"]
    before = [c for c in inits if c.restart_policy != "Always"]

    def of(container: Any, kind: str, name: str) -> Decimal:
        amounts = (container.resources and getattr(container.resources, kind)) or {}
        return Decimal(parse_quantity(amounts.get(name, "0")))

    def total(amounts: Amounts, kind: str) -> Amounts:
        # As the scheduler counts: all that run together, or the largest one before them.
        return {
            name: max([sum((of(c, kind, name) for c in beside), amount),
                       *(of(c, kind, name) for c in before)])
            for name, amount in amounts.items()
        }  # fmt: skip

    return [
        need
        if need.name == TRAINJOB
        else replace(
            need, amounts=total(need.amounts, "requests"), limits=total(need.limits, "limits")
        )
        for need in needs
    ]


def _whole_gpus(cluster: Cluster, pool: Pool, placement: Placements) -> str:
    """Check that no step requests several slices; without permission to list nodes, by the
    resource's name only."""
    try:
        nodes = _listed(cluster, "list_node")
    except UserError:
        nodes = []
    resources = set()
    for name in TRAINS:
        settings = placement.of_step(name)
        labels = pool_labels(nodes, settings, pool.node_pool)
        require_whole_gpus(pool.gpus, settings, labels)
        resources.add(settings.gpu_resource)
    return ", ".join(sorted(resources))


def _quota(cluster: Cluster, needs: list[Need]) -> Iterator[Finding]:
    quotas = _listed(cluster, "list_namespaced_resource_quota", cluster.namespace)
    refused = [finding for quota in quotas for need in needs for finding in _refused(quota, need)]
    refused += [finding for quota in quotas for finding in _counts(quota, needs)]
    names = ", ".join(quota.metadata.name for quota in quotas) or "none"
    # The most severe violation: broken comes before warning.
    yield min(refused, key=lambda one: one.state, default=Finding("quota", "ok", names))


def _nodes(
    cluster: Cluster, needs: list[Need], pool: Pool, placement: Placements
) -> Iterator[Finding]:
    nodes = _listed(cluster, "list_node")
    # Parts of the recipe's placement that no node satisfies, then of single steps' own.
    has_gpus = bool(pool.gpus)
    findings = doubts(nodes, placement, has_gpus)
    for name, step_placement in placement.steps.items():
        said = {finding.said for finding in findings}
        asks = has_gpus and "gpu_resource" in step_placement.model_fields_set
        findings += [
            replace(finding, said=finding.said.replace("Launch.", f"Launch.steps.{name}.", 1))
            for finding in doubts(nodes, placement.of_step(name), asks)
            if finding.said not in said
        ]
    if not findings and placement != Placements():
        findings = [Finding("placement", "ok")]
    yield from findings
    try:
        running, caveat = _listed(cluster, "list_pod_for_all_namespaces"), ""
    except UserError:
        running, caveat = [], " (not counting running pods, which you have no permission to list)"
    yield from _room(nodes, running, needs, pool, placement, caveat)


def _listed(cluster: Cluster, method: str, *arguments: str) -> list[Any]:
    core = kubernetes.CoreV1Api(cluster.api)
    try:
        return list(cluster.ask(getattr(core, method), *arguments).items)
    except UserError as error:
        raise UserError(f"{NOT_CHECKED}{error.what}", error.hint, error.code) from None


def _refused(quota: Any, need: Need) -> Iterator[Finding]:
    hard = quota.status.hard or {}
    asked: Amounts = dict.fromkeys(COUNTS, Decimal(1))
    for prefix, amounts in (("requests.", need.amounts), ("limits.", need.limits)):
        asked |= {f"{prefix}{name}": amount for name, amount in amounts.items()}
    asked |= {name: need.amounts[name] for name in COMPUTE if name in need.amounts}
    total = {key: amount * need.pods for key, amount in asked.items()}
    if need.name == TRAINJOB:
        total |= dict.fromkeys(OF_TRAINJOB, Decimal(1))
    for key, wanted in total.items():
        yield from _exceeded(quota, key, wanted, str(need))
    for key in hard:
        prefix, _, name = key.rpartition(".")
        if name in COMPUTE and prefix in ("requests", "limits", "") and key not in total:
            kind = "limit" if prefix == "limits" else "request"
            said = f"{quota.metadata.name} has {key}, and {need.name} has no {name} {kind}"
            hint = "such pods are rejected unless a LimitRange of the namespace has a default"
            yield Finding("quota", "warning", said, hint)


def _counts(quota: Any, needs: list[Need]) -> Iterator[Finding]:
    """What a run itself exceeds, and the limits of other objects that are reached."""
    yield from _exceeded(quota, OF_RUN, Decimal(1), "a run is one")
    known = (OF_RUN, *COUNTS, *(OF_TRAINJOB if any(n.name == TRAINJOB for n in needs) else ()))
    for key in quota.status.hard or {}:
        if key.startswith(OBJECTS) and key not in known:
            for finding in _exceeded(quota, key, Decimal(1), "a run may need one more"):
                yield replace(finding, state="warning")


def _exceeded(quota: Any, key: str, wanted: Decimal, what: str) -> Iterator[Finding]:
    """The finding if a quota does not have so much left."""
    hard, used = quota.status.hard or {}, quota.status.used or {}
    if key not in hard:
        return
    # Broken if the whole quota is too small; otherwise other runs have to end first.
    allowed = parse_quantity(hard[key])
    if wanted > allowed - parse_quantity(used.get(key, "0")):
        said = f"{quota.metadata.name}: {hard[key]} {key}, {used.get(key, 0)} used"
        state: State = "broken" if wanted > allowed else "warning"
        hint = "raise it in manifests/base/limits.yaml, or wait for other runs"
        yield Finding("quota", state, f"{said}, and {what}", hint, Code.NO_ROOM)


def _room(
    nodes: list[Any],
    running: list[Any],
    needs: list[Need],
    pool: Pool,
    placement: Placements,
    caveat: str,
) -> Iterator[Finding]:
    free = {node.metadata.name: _free(node, running) for node in nodes}
    short = False
    for need in needs:
        step_placement = placement.of_step(need.stage)
        node_pool = pool.node_pool if need.gpus else None
        usable = [
            n.metadata.name for n in nodes if takes(n, step_placement, node_pool, bool(need.gpus))
        ]
        places = 0  # pods with these requests that fit
        for name in usable:
            # How often the requests fit into what is left, by the scarcest resource.
            amounts = need.amounts | ({"pods": Decimal(1)} if "pods" in free[name] else {})
            shares = [free[name].get(key, Decimal(0)) // n for key, n in amounts.items() if n]
            places += max(0, int(min(shares, default=Decimal(1))))
        if places < need.pods:
            short = True
            in_pool = node_pool and not step_placement.chooses_nodes
            nodes_found = f"{len(usable)} node{'' if len(usable) == 1 else 's'}"
            where = f"pool {node_pool}" if in_pool else nodes_found
            said = f"{need}: room for {places} on {where}{caveat}"
            hint = (
                "pods wait until nodes are added or other pods end; or request less (GPUS=, NODES=)"
            )
            yield Finding("room on nodes", "warning", said, hint)
    if not short:
        names = ", ".join(node.metadata.name for node in nodes)
        yield Finding("room on nodes", "ok", f"{names}{caveat}")


def _free(node: Any, running: list[Any]) -> Amounts:
    """What the node has left, pods included; a pod's sidecars and overhead count as it does."""
    free = {name: parse_quantity(value) for name, value in (node.status.allocatable or {}).items()}
    for pod in running:
        if pod.spec.node_name != node.metadata.name or pod.status.phase in ("Succeeded", "Failed"):
            continue
        sidecars = [c for c in pod.spec.init_containers or [] if c.restart_policy == "Always"]
        requests = [(c.resources and c.resources.requests) or {}
                    for c in (*pod.spec.containers, *sidecars)]  # fmt: skip
        for request in (*requests, pod.spec.overhead or {}, {"pods": "1"}):
            for name, value in request.items():
                if name in free:
                    free[name] -= parse_quantity(value)
    return free
