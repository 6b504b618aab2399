"""How training is divided among processes, and the machines that they run on."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lathe.config.settings.base import Settings
from lathe.config.settings.placement import Placements
from lathe.config.settings.types import (
    Amount,
    KubernetesLabel,
    KubernetesName,
    LabelValue,
    NonNegative,
    Processes,
    bytes_of,
)

SHARED_MEMORY = "8Gi"


class Sharding(Settings):
    """Data parallelism that divides the training state as well (FSDP, ZeRO). PaddleFleetX's group,
    with its keys."""

    sharding_degree: Processes = 1
    """Data-parallel ranks among which the training state is divided."""
    sharding_stage: Literal[1, 2, 3] = 1
    """What is divided: the optimizer's state (1), gradients too (2), weights too (3)."""
    sharding_offload: bool = False
    """Whether to keep the divided state in CPU memory rather than on the GPU, which is slow; no
    effect on a CPU."""


class DistributedSettings(Settings):
    """How many processes train, and in which role: the product of the four degrees.

    PaddleFleetX's group; `grace_seconds` is Lathe's own.
    """

    dp_degree: Processes | Literal["auto"] = "auto"
    """Replicas that each train on a part of the batch; `auto` uses every GPU there is,
    or without GPUs as few replicas as possible."""
    mp_degree: Processes = 1
    """Tensor parallelism: ranks among which every linear layer is divided."""
    pp_degree: Processes = 1
    """Pipeline parallelism: ranks among which the layers are divided."""
    sharding: Sharding = Sharding()
    """Division of the training state among data-parallel ranks."""
    grace_seconds: Annotated[int, Field(gt=0, le=24 * 3600)] = 30
    """Seconds that workers get to save and end, before they are killed; in the pods of a TrainJob
    it is 290, of the 300 that Kubernetes gives the pod."""


class LaunchSettings(Placements):
    """The machines that training runs on, and where a cluster's pods run. The group is Lathe's own.

    Several nodes are groups of processes on this machine or, within a cluster, the pods of a
    Kubeflow TrainJob. The keys from `node_selector` to `steps` are about all pods: those of steps,
    of TrainJobs, of the server, of the janitor and of `make doctor`.
    """

    nodes: Processes = 1
    """Number of nodes; each runs the same number of processes."""
    gpus_per_node: Annotated[int, Field(ge=0, le=1024)] = 0
    """GPUs of each node; 0 asks a cluster for none, and elsewhere counts those of this machine."""
    node_pool: LabelValue | None = None
    """Value of the node label `lathe/node-pool` that the pods require; null takes any node, and a
    `node_selector` or an `affinity` replaces it."""
    runtime: KubernetesName | None = None
    """Name of the ClusterTrainingRuntime; null is that of the engine that trains."""
    cpus_per_node: Annotated[int, Field(gt=0, le=2**16)] = 4
    """CPU cores of each pod, as request and limit."""
    memory_per_node: Amount = "32Gi"
    """Memory of each pod, in bytes, as request and limit; it includes `shared_memory`."""
    shared_memory: Amount | None = None
    """Size limit of /dev/shm in each pod, in bytes, which counts as its memory; null is 8Gi, or a
    quarter of `memory_per_node` where that is less."""
    queue: KubernetesLabel | None = None
    """Kueue LocalQueue that the TrainJob waits in; null starts it at once."""
    priority: KubernetesName | None = None
    """Kueue WorkloadPriorityClass, which orders the jobs of a queue; it needs `queue`."""
    shards: Annotated[int, Field(ge=1, le=256)] = 1
    """Steps of a pipeline that tokenize a shard of the corpus each; the data set is the same."""
    deadline_hours: Annotated[float, Field(gt=0, le=10 * 365 * 24)] = 240.0
    """Hours from the launcher's start, waiting included, after which the job is ended."""
    restarts: NonNegative = 2
    """Times to start again after a failure; a preemption does not count, and after a user's
    mistake there is no restart."""
    notify: bool = False
    """Whether a run of a pipeline on a cluster ends with a notice to the address in the Secret
    `lathe-webhook`."""

    @model_validator(mode="after")
    def _shared_memory_fits(self) -> Self:
        if self.shared_memory and bytes_of(self.shared_memory) >= bytes_of(self.memory_per_node):
            raise ValueError(
                f"shared_memory, {self.shared_memory}, counts as memory, and memory_per_node is "
                f"{self.memory_per_node}"
            )
        return self

    @property
    def shared_memory_limit(self) -> str:
        """Size limit of /dev/shm, as Kubernetes writes it."""
        if self.shared_memory:
            return self.shared_memory
        quarter = bytes_of(self.memory_per_node) // 4
        return SHARED_MEMORY if bytes_of(SHARED_MEMORY) <= quarter else str(quarter)

    def of_step(self, name: str) -> Self:
        """The settings for one step, its TrainJob included."""
        own, found = self.steps.get(name), super().of_step(name)
        amounts = {"cpus_per_node": own.cpus, "memory_per_node": own.memory} if own else {}
        return found.model_copy(update={key: value for key, value in amounts.items() if value})
