"""Settings of where a run takes place: parallel layout, machines, and placement of pods on a
cluster, with overrides for steps."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lathe_base.config.settings.types import (
    Amount,
    KubernetesLabel,
    KubernetesName,
    LabelValue,
    NonNegative,
    Positive,
    Processes,
    Settings,
    ShardingStage,
    parse_bytes,
)

NODE_POOL = "lathe/node-pool"
GPU = "nvidia.com/gpu"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
USER = 10001
"""The user of the images."""

Effect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
OTHER_PODS = ("serve", "janitor")
"""Names in `Launch.steps` of pods that are not steps of a pipeline."""

FROM_THE_STORE = frozenset(
    {
        *("AWS_ENDPOINT_URL", "AWS_REGION"),
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    }
)
OWN_MOUNTS = ("/tmp", "/dev", "/models", "/var/run/lathe", "/var/run/secrets", "/proc", "/sys")
OWN_OBJECTS = ("lathe-signing", "lathe-verification-keys")
"""Secrets and ConfigMaps that steps always mount; a second volume for the same object would get
the same name."""
SHARED_MEMORY = "8Gi"


def _matches(pattern: str, what: str) -> AfterValidator:
    def check(value: str) -> str:
        # A label's key: a DNS name of 253 characters, a slash, and a name of 63.
        if len(value) > 317 or not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} is not {what}")
        return value

    return AfterValidator(check)


def _is_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,200}", name):
        raise ValueError(f"{name!r} is not the name of a variable")
    if name in FROM_THE_STORE:
        raise ValueError(f"{name} comes from the ConfigMap lathe-store or the Secret lathe-s3")
    return name


def _has_exceptions(env: dict[str, str]) -> dict[str, str]:
    # Without exceptions, a step would ask the proxy for Pipelines' own services too.
    names = {name.upper() for name in env}
    if names & {"HTTPS_PROXY", "HTTP_PROXY"} and "NO_PROXY" not in names:
        raise ValueError(
            "a proxy also needs NO_PROXY with the addresses of Pipelines' services and the "
            "Kubernetes API, such as .svc,.cluster.local,10.0.0.0/8"
        )
    return env


def _is_mount(path: str) -> str:
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ":" in path or ".." in pure.parts or pure == PurePosixPath("/"):
        raise ValueError("must be an absolute path below /, without ':' and '..'")
    if any(pure.is_relative_to(mount) for mount in OWN_MOUNTS):
        raise ValueError(f"pods already mount {', '.join(OWN_MOUNTS)}")
    return path


def _is_folder(address: str) -> str:
    parts = address.removeprefix("file:///").rstrip("/").split("/")
    if not address.startswith("file:///") or {"", ".", ".."} & set(parts):
        raise ValueError("not the address of a folder, file:///path")
    return address.rstrip("/")


def _is_node_affinity(value: dict[str, Any]) -> dict[str, Any]:
    if value and set(value) != {"nodeAffinity"}:
        raise ValueError(
            "only nodeAffinity is supported, because Pipelines has no other affinity for its steps"
        )
    inner = value.get("nodeAffinity", {})
    if not isinstance(inner, dict) or not set(inner) <= {REQUIRED, PREFERRED}:
        raise ValueError(f"nodeAffinity only has the keys {REQUIRED} and {PREFERRED}")
    return value


LabelKey = Annotated[
    str,
    _matches(
        r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?",
        "the key of a label",
    ),
]
ExtendedResource = Annotated[
    str,
    _matches(r"[a-z0-9.-]{1,253}/[A-Za-z0-9_.-]{1,63}", "a resource, such as nvidia.com/gpu"),
    Field(json_schema_extra={"format": "resource, such as nvidia.com/gpu"}),
]
NodeResource = Annotated[
    str,
    _matches(
        r"hugepages-[0-9]+[MG]i|[a-z0-9.-]{1,253}/[A-Za-z0-9_.-]{1,63}",
        "a resource, such as rdma/hca or hugepages-2Mi",
    ),
    Field(json_schema_extra={"format": "resource, such as rdma/hca"}),
]


# --- placement of pods ---


class Toleration(Settings):
    """A taint that pods tolerate, as Kubernetes writes it."""

    key: LabelKey | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str | None = None
    effect: Effect | None = None
    tolerationSeconds: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # The rules of Kubernetes' API server, which would refuse the pods in the middle of a run.
        if self.operator == "Exists" and self.value:
            raise ValueError("a toleration whose operator is Exists has no value")
        if self.operator == "Equal" and not self.key:
            raise ValueError("a toleration without a key needs the operator Exists")
        if self.tolerationSeconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds needs the effect NoExecute")
        return self

    @property
    def manifest(self) -> dict[str, Any]:
        """As Kubernetes' API has it."""
        return self.model_dump(exclude_none=True)


class Volume(Settings):
    """A volume that pods mount: a claim, a ConfigMap or a Secret in the namespace."""

    claim: KubernetesLabel | None = None
    config_map: KubernetesLabel | None = None
    secret: KubernetesLabel | None = None
    mount_path: Annotated[str, AfterValidator(_is_mount)]
    optional: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(name is not None for name in (self.claim, self.config_map, self.secret)) != 1:
            raise ValueError("a volume needs exactly one of claim, config_map and secret")
        if self.name in OWN_OBJECTS:
            raise ValueError(f"{self.name} is always mounted")
        if self.claim and self.optional:
            raise ValueError("a claim cannot be optional")
        return self

    @property
    def name(self) -> str:
        """Name of the object, which Pipelines also uses for the volume."""
        return self.claim or self.config_map or self.secret or ""

    @property
    def source(self) -> dict[str, Any]:
        """As Kubernetes' API has it."""
        if self.claim:
            return {"persistentVolumeClaim": {"claimName": self.claim}}
        if self.config_map:
            return {"configMap": {"name": self.config_map, "optional": self.optional}}
        return {"secret": {"secretName": self.secret, "optional": self.optional}}


def _are_apart(volumes: list[Volume]) -> list[Volume]:
    paths = [PurePosixPath(volume.mount_path) for volume in volumes]
    names = [volume.name for volume in volumes]
    if len(set(paths)) < len(paths) or len(set(names)) < len(names):
        raise ValueError("two volumes have the same mount path, or objects of the same name")
    return volumes


class Placement(Settings):
    """Placement and resources of pods."""

    node_selector: dict[LabelKey, LabelValue] = Field(default={})
    """Labels that a pod's node must have; with `affinity`, overrides `node_pool`."""
    tolerations: list[Toleration] = Field(default=[])
    """Tolerations of pods, in addition to those for GPUs and `lathe/node-pool`: a list of `key`,
    `operator`, `value`, `effect` and `tolerationSeconds`."""
    affinity: Annotated[dict[str, Any], AfterValidator(_is_node_affinity)] = Field(default={})
    """Kubernetes' `nodeAffinity`, required and preferred."""
    gpu_resource: ExtendedResource = GPU
    """Kubernetes resource name of a GPU, such as nvidia.com/mig-3g.40gb or amd.com/gpu."""
    run_as_user: Annotated[int, Field(gt=0, lt=2**31)] | None = USER
    """User id of the pods' processes; null leaves it to the cluster, as OpenShift requires, and in
    a TrainJob's pods to its runtime."""
    labels: dict[LabelKey, LabelValue] = Field(default={})
    """Labels of every pod, such as those for cost accounting."""
    annotations: dict[LabelKey, str] = Field(default={})
    """Annotations of every pod."""
    env: Annotated[
        dict[Annotated[str, AfterValidator(_is_variable)], str], AfterValidator(_has_exceptions)
    ] = Field(default={})
    """Environment variables of every container; visible to everybody who can read the run."""
    image_pull_secrets: list[KubernetesName] = Field(default=[])
    """Secrets with registry credentials, in addition to those of the service account."""
    volumes: Annotated[list[Volume], AfterValidator(_are_apart)] = Field(default=[])
    """Volumes of every container: a list with one of `claim`, `config_map` and `secret` and a
    `mount_path` each; `optional` allows the ConfigMap or Secret to be missing."""

    @property
    def chooses_nodes(self) -> bool:
        """Whether these settings override `node_pool`."""
        return bool(self.node_selector or self.affinity)

    @property
    def gpu_taint(self) -> str:
        """The vendor's taint on GPU nodes, the same for all kinds of GPU slices."""
        return f"{self.gpu_resource.partition('/')[0]}/gpu"

    def selector(self, node_pool: str | None) -> dict[str, str]:
        """Required node labels, including that of the pool unless these settings override it."""
        if node_pool and not self.chooses_nodes:
            return {NODE_POOL: node_pool}
        return dict(self.node_selector)

    def tolerated(self, node_pool: str | None, has_gpus: bool) -> list[dict[str, Any]]:
        """Tolerations of a pod: for the taints of the pool and of GPUs, plus those given."""
        # The taints of the pool and of GPUs have any value, so the operator is Exists.
        taints = [NODE_POOL] * bool(node_pool) + [self.gpu_taint] * has_gpus
        tolerations = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints]
        return [
            *tolerations,
            *(t.manifest for t in self.tolerations if t.manifest not in tolerations),
        ]


class StepPlacement(Placement):
    """Overrides for one step: keys that are not given are the group's."""

    cpus: Annotated[int, Field(gt=0, le=2**16)] | None = None
    """CPU cores."""
    memory: Amount | None = None
    """Memory, as request and limit."""


class Placements(Placement):
    """Placement of all pods, with overrides for single steps."""

    service_account: KubernetesName | None = None
    """Service account of steps and of a TrainJob's pods; null means `lathe-pipeline` for steps,
    and the runtime's for a TrainJob's pods."""
    priority_class: KubernetesName | None = None
    """PriorityClass of the pods of the server, the janitor and the training runtimes, in the
    manifests that `make manifests RECIPE=` writes; Pipelines does not support it for steps."""
    store: Annotated[str, AfterValidator(_is_folder)] | None = None
    """Address file:///... on a claim in `volumes` that all pods mount, for the models and data
    sets of runs on a cluster; null means Pipelines' own store."""
    steps: dict[KubernetesName, StepPlacement] = Field(default={})
    """Overrides for single steps, by name: `Launch.steps.evaluate.cpus`, `memory`, and every key
    from `node_selector` to `volumes`."""

    @model_validator(mode="after")
    def _store_is_mounted(self) -> Self:
        # A step's own volumes replace the others, so the claim has to be among them too.
        volumes_by_key = {"volumes": self.volumes}
        for name, step in self.steps.items():
            if "volumes" in step.model_fields_set and name not in OTHER_PODS:
                volumes_by_key[f"steps.{name}.volumes"] = step.volumes
        for key, volumes in volumes_by_key.items():
            mounts = [volume.mount_path.rstrip("/") for volume in volumes if volume.claim]
            if self.store and not any(
                f"{self.store}/".startswith(f"file://{mount}/") for mount in mounts
            ):
                raise ValueError(
                    f"store is {self.store}, but no claim in {key} is mounted there: add "
                    f"{{claim: NAME, mount_path: ...}}"
                )
        return self

    def of_step(self, name: str) -> Self:
        """The settings for one step."""
        step = self.steps.get(name)
        set_fields = {key: getattr(step, key) for key in step.model_fields_set} if step else {}
        # `cpus` and `memory` are not settings of a placement; `LaunchSettings.of_step` takes them.
        known = {key: value for key, value in set_fields.items() if key in Placement.model_fields}
        return self.model_copy(update=known | {"steps": {}})


# --- parallel layout and machines ---


class Sharding(Settings):
    """Data parallelism with sharded training state (FSDP, ZeRO). The group and its keys are
    PaddleFleetX's."""

    sharding_degree: Processes = 1
    """Number of data-parallel ranks that the training state is sharded over."""
    sharding_stage: ShardingStage = 1
    """ZeRO stage: shard the optimizer state (1), also gradients (2), also weights (3)."""
    sharding_offload: bool = False
    """Whether to keep the sharded state in CPU memory instead of on the GPU, which is slow; no
    effect on CPUs."""


class DistributedSettings(Settings):
    """Parallel layout: the number of processes is the product of the four degrees.

    PaddleFleetX's group; `grace_seconds` is Lathe's own.
    """

    dp_degree: Processes | Literal["auto"] = "auto"
    """Data parallelism: number of replicas; `auto` uses all GPUs, or without GPUs as few replicas
    as possible."""
    mp_degree: Processes = 1
    """Tensor parallelism: number of ranks that every linear layer is split over."""
    pp_degree: Processes = 1
    """Pipeline parallelism: number of ranks that the layers are split over."""
    sharding: Sharding = Sharding()
    """Sharding of the training state over data-parallel ranks."""
    grace_seconds: Annotated[int, Field(gt=0, le=24 * 3600)] = 30
    """Seconds that workers have to save and exit before they are killed; in TrainJob pods it is
    290, of the 300 that Kubernetes allows."""
    timeout_minutes: Annotated[float, Field(gt=0, le=7 * 24 * 60)] = 30.0
    """Minutes that a process waits for others in a collective before the training fails. While the
    first process works alone, as when it writes the model, others wait as long as it responds."""


class LaunchSettings(Placements):
    """Machines for training, and placement of pods on a cluster. The group is Lathe's own.

    Several nodes are groups of processes on this machine or, on a cluster, pods of a Kubeflow
    TrainJob. The keys from `node_selector` to `steps` apply to all pods: those of steps,
    TrainJobs, the server, the janitor and `make doctor`.
    """

    nodes: Processes = 1
    """Number of nodes; all run the same number of processes."""
    gpus_per_node: Annotated[int, Field(ge=0, le=1024)] = 0
    """GPUs per node; 0 requests none on a cluster, and means all GPUs of this machine elsewhere."""
    node_pool: LabelValue | None = None
    """Value of the node label `lathe/node-pool` that pods require; null allows any node.
    Overridden by `node_selector` or `affinity`."""
    runtime: KubernetesName | None = None
    """Name of the TrainingRuntime in the namespace; null means that of the training engine."""
    cpus_per_node: Annotated[int, Field(gt=0, le=2**16)] = 4
    """CPU cores per pod, as request and limit."""
    memory_per_node: Amount = "32Gi"
    """Memory per pod, in bytes, as request and limit; includes `shared_memory`. A TrainJob that
    runs out of it is tried once more with 1.5 times as much, if the quota and the nodes have it."""
    shared_memory: Amount | None = None
    """Size limit of /dev/shm in each pod, in bytes, which counts as memory; null means 8Gi, or a
    quarter of `memory_per_node` if that is less."""
    extra_resources: dict[NodeResource, Positive | Amount] = Field(default={})
    """Further resources of each pod of a TrainJob, as request and limit: network devices for RDMA
    such as `rdma/hca: 8` or `vpc.amazonaws.com/efa: 4`, and `hugepages-2Mi: 5Gi`."""
    queue: KubernetesLabel | None = None
    """Kueue LocalQueue of the TrainJob; null starts it immediately."""
    priority: KubernetesName | None = None
    """Kueue WorkloadPriorityClass of the TrainJob; requires `queue`."""
    shards: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of pipeline steps that each tokenize one shard of the corpus; the resulting data set
    is the same."""
    deadline_hours: Annotated[float, Field(gt=0, le=10 * 365 * 24)] = 240.0
    """Hours after the launcher's start, including waiting time, after which the job is
    terminated."""
    restarts: NonNegative = 2
    """Number of restarts after a failure; preemptions do not count, and user errors are not
    retried."""
    notify: bool = False
    """Whether a pipeline run on a cluster posts its result to the address in the Secret
    `lathe-webhook`."""

    @model_validator(mode="after")
    def _shared_memory_fits(self) -> Self:
        if self.shared_memory and parse_bytes(self.shared_memory) >= parse_bytes(
            self.memory_per_node
        ):
            raise ValueError(
                f"shared_memory {self.shared_memory} counts as memory, but memory_per_node is only "
                f"{self.memory_per_node}"
            )
        return self

    @model_validator(mode="after")
    def _gpus_are_no_extra_resource(self) -> Self:
        if self.gpu_resource in self.extra_resources:
            raise ValueError(
                f"extra_resources has {self.gpu_resource}, which gpus_per_node requests"
            )
        return self

    @property
    def shared_memory_limit(self) -> str:
        """Size limit of /dev/shm, as Kubernetes writes it."""
        if self.shared_memory:
            return self.shared_memory
        quarter = parse_bytes(self.memory_per_node) // 4
        return SHARED_MEMORY if parse_bytes(SHARED_MEMORY) <= quarter else str(quarter)

    def of_step(self, name: str) -> Self:
        """The settings for one step, its TrainJob included."""
        step_machines, inherited = self.steps.get(name), super().of_step(name)
        amounts = (
            {"cpus_per_node": step_machines.cpus, "memory_per_node": step_machines.memory}
            if step_machines
            else {}
        )
        return inherited.model_copy(update={key: value for key, value in amounts.items() if value})
