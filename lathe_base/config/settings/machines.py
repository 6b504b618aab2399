"""Settings of parallelism, and of the machines to run on."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lathe_base.config.settings.base import Settings
from lathe_base.config.settings.placement import NodeResource, Placements
from lathe_base.config.settings.types import (
    Amount,
    KubernetesLabel,
    KubernetesName,
    LabelValue,
    NonNegative,
    Positive,
    Processes,
    ShardingStage,
    parse_bytes,
)

SHARED_MEMORY = "8Gi"


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
    """Name of the ClusterTrainingRuntime; null means that of the training engine."""
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
