"""The resources that tasks request from the cluster, all in one place.

The local runner ignores them.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from kfp import kubernetes
from kfp.dsl import PipelineTask

from components import artifacts
from components.images import PADDLE
from components.step import Step
from lathe_base.config.settings import Placements
from lathe_base.config.settings.placement import StepPlacement
from lathe_base.config.settings.types import bytes_of
from lathe_base.provenance.keys import MOUNTED, TRUSTED_MOUNTED
from lathe_base.provenance.surroundings import IMAGE
from pipelines.steps.finished import Finished, Outputs, can_be_taken
from pipelines.steps.sizes import GIB, LIMIT, Sizes, quantity

QUEUE = "kueue.x-k8s.io/queue-name"
SECRET, CONFIG_MAP = "lathe-s3", "lathe-store"
KEYS = {
    "accesskey": "AWS_ACCESS_KEY_ID",
    "secretkey": "AWS_SECRET_ACCESS_KEY",
    "sessiontoken": "AWS_SESSION_TOKEN",
}
"""Only temporary keys have a session token; none is needed with workload identity."""
STORE = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION"}
WEBHOOK, TRACKING, SIGNING = "lathe-webhook", "lathe-tracking", "lathe-signing"
TRUST = "lathe-verification-keys"
WEBHOOK_KEYS = {"url": "LATHE_WEBHOOK", "ui": "LATHE_KFP_UI"}
TRACKED = {"mlflow": "MLFLOW_TRACKING_URI", "model-registry": "LATHE_MODEL_REGISTRY"}
SERVICE_ACCOUNT = "lathe-pipeline"
POD_FIELDS = {
    "POD_NAME": "metadata.name",
    "POD_UID": "metadata.uid",
    "POD_NAMESPACE": "metadata.namespace",
    "KFP_RUN_ID": "metadata.labels['pipeline/runid']",
}
RETRIES = 2
HOUR = 3600
CORES, MEMORY_GIB, SHARED_MEMORY_GIB = 4, 32, 8
"""Memory per GPU if the model's size is unknown."""
CPU_MEMORY_GIB, WAITING_SHARED_MEMORY_GIB = 8, 2


@dataclass(frozen=True)
class Pool:
    """The machines that the steps of a pipeline run on, and the training engine.

    Attributes:
        nodes: nodes per training run; with several, the task starts a TrainJob.
        gpus: GPUs per node; with 0, no task requests any.
        node_pool: value of the node label lathe/node-pool, for tasks with GPUs.
        queue: Kueue LocalQueue that admits tasks with GPUs.
        engine: Compress.engine; `paddle` if any recipe of the run sets it.
        cpus: CPU cores requested by each step that computes; None depends on the step's machine.
        memory: memory request and limit of each step that computes; None estimates them.
        shared_memory: size limit of /dev/shm; None depends on the number of GPUs.
    """

    nodes: int = 1
    gpus: int = 1
    node_pool: str = "gpu"
    queue: str | None = None
    engine: str = "torch"
    cpus: int | None = None
    memory: str | None = None
    shared_memory: str | None = None


@dataclass(frozen=True)
class Variant:
    """The variant that a pipeline is compiled for.

    Attributes:
        placement: scheduling and pod settings of the steps.
        inputs: what `look_up` returns; None if a step of the run is to look them up.
        code: digest of the code of each component, part of its cache key unless its image is
            referenced by digest.
        sizes: estimated resource needs; None if the model is not known.
        shards: number of shards in which the corpus is tokenized, one step each.
        finished: outputs of the steps that an earlier run finished; they are reused.
        notify: whether to post to the webhook when the run ends.
    """

    pool: Pool = Pool()
    placement: Placements = field(default_factory=Placements)
    inputs: Mapping[str, Any] | None = None
    code: Mapping[str, str] = field(default_factory=dict)
    sizes: Sizes | None = None
    shards: int = 1
    finished: Mapping[str, Outputs] = field(default_factory=dict)
    notify: bool = False

    @property
    def overrides(self) -> list[str]:
        """The pool, shards and placement as recipe overrides, for the process that launches the
        workers.

        The engine is not included: the recipes of a run may use different ones.
        """
        pool, sizes = self.pool, self.sizes
        settings: dict[str, object] = {"nodes": pool.nodes, "gpus_per_node": pool.gpus}
        settings |= {"queue": pool.queue, "node_pool": pool.node_pool if pool.gpus else None}
        settings |= {"cpus_per_node": pool.cpus, "memory_per_node": pool.memory}
        settings |= {"shards": self.shards if self.shards > 1 else None}
        if pool.nodes > 1 and sizes:
            settings["cpus_per_node"] = pool.cpus or CORES * pool.gpus or 1
            shared = bytes_of(pool.shared_memory) / GIB if pool.shared_memory else 0.0
            settings["memory_per_node"] = pool.memory or quantity(LIMIT * sizes.training + shared)
        found = [f"Launch.{key}={value}" for key, value in settings.items() if value is not None]
        # The run's other recipes need the placement for their TrainJobs. JSON is valid YAML.
        given = self.placement.model_dump(exclude_unset=True)
        return found + [f"Launch.{key}={json.dumps(value)}" for key, value in given.items()]


# KFP calls a pipeline's function with its inputs only, so whatever else its tasks depend on has to
# come from the context.
_VARIANT: ContextVar[Variant] = ContextVar("variant")


@contextmanager
def compiling(variant: Variant) -> Iterator[None]:
    """Compile the pipelines traced inside for this variant."""
    token = _VARIANT.set(variant)
    try:
        yield
    finally:
        _VARIANT.reset(token)


def compiled_variant() -> Variant:
    """The variant that is being compiled."""
    return _VARIANT.get()


def task_of(component: Any, **inputs: Any) -> PipelineTask | Finished:
    """A task on the machine that its component declares, or the outputs of an earlier run that
    finished it."""
    variant = _VARIANT.get()
    found = variant.finished.get(component.name)
    if found and can_be_taken(component, found):
        return Finished(component, found)
    return placed(_with_code(component)(**inputs), component.step)


def placed(task: PipelineTask, step: Step) -> PipelineTask:
    """Apply what a component declares about its step."""
    if step.by_engine and _VARIANT.get().pool.engine == "paddle":
        task.set_container_image(PADDLE)
    _on_machine(task, step)
    if step.trusts:
        kubernetes.use_config_map_as_volume(task, TRUST, str(TRUSTED_MOUNTED), optional=True)
    if not step.is_cached:
        task.set_caching_options(False)
    return task if step.retries is None else task.set_retry(step.retries)


def _on_machine(task: PipelineTask, step: Step) -> PipelineTask:
    """Request the machine; multi-node training is only started and followed by the task."""
    pool, sizes = _VARIANT.get().pool, _VARIANT.get().sizes
    if step.machine == "waiting" or (step.machine == "training" and pool.nodes > 1):
        task.set_cpu_request("100m").set_memory_request("512Mi")
        return _common_settings(task, step.hours, f"{WAITING_SHARED_MEMORY_GIB}Gi")
    if step.machine in ("training", "training node"):
        return _working(task, step.hours, pool.gpus, sizes.training if sizes else None)
    gpus = min(1, pool.gpus) if step.machine == "gpu" else 0
    gib = sizes.holding(step.copies, bool(gpus)) if sizes else None
    return _working(task, step.hours, gpus, gib)


def _with_code(component: Any) -> Any:
    """The component with its code's digest among its arguments, unless its image is referenced by
    digest. Pipelines' cache key includes the arguments; KFP's executor ignores unknown ones."""
    digest = _VARIANT.get().code.get(component.python_func.__name__)
    images = [component.component_spec.implementation.container.image]
    images += [PADDLE] if _VARIANT.get().pool.engine == "paddle" else []
    if digest is None or all("@sha256:" in image for image in images):
        return component
    clone = copy.deepcopy(component)
    container = clone.component_spec.implementation.container
    container.args = [*container.args, "--code", digest]
    return clone


def with_webhook(task: PipelineTask, step: Step) -> PipelineTask:
    """A task that posts to the webhook."""
    kubernetes.use_secret_as_env(task, WEBHOOK, WEBHOOK_KEYS, optional=True)
    return placed(task, step)


def _working(task: PipelineTask, hours: float, gpus: int, gib: float | None) -> PipelineTask:
    """Request resources for a task that computes: GPUs of the pool, or CPU cores of any node.

    Args:
        gib: estimated memory in GiB; None if the model is unknown, which sets no limit.
    """
    pool, sizes = _VARIANT.get().pool, _VARIANT.get().sizes
    own = _VARIANT.get().placement.steps.get(stage_of(task)) or StepPlacement()
    cores = str(CORES * gpus) if gpus else sizes.cpus if sizes else str(CORES)
    task.set_cpu_request(str(own.cpus or pool.cpus or cores))
    shared = pool.shared_memory or f"{SHARED_MEMORY_GIB * gpus or WAITING_SHARED_MEMORY_GIB}Gi"
    if memory := own.memory or pool.memory:
        task.set_memory_request(memory).set_memory_limit(memory)
        shared = min(shared, str(bytes_of(memory) // 4), key=bytes_of)
    elif gib is not None:
        # Files in /dev/shm count towards the memory limit.
        limit = LIMIT * gib + bytes_of(shared) / GIB
        task.set_memory_request(quantity(gib)).set_memory_limit(quantity(limit))
    else:
        task.set_memory_request(f"{MEMORY_GIB * gpus or CPU_MEMORY_GIB}Gi")
    if gpus:
        resource = _VARIANT.get().placement.of_step(stage_of(task)).gpu_resource
        task.set_accelerator_type(resource).set_accelerator_limit(gpus)
        if pool.queue:
            kubernetes.add_pod_label(task, QUEUE, pool.queue)
    return _common_settings(task, hours, shared, gpus)


def stage_of(task: PipelineTask) -> Any:
    """The name of a step in `Launch.steps`: `evaluate` for `evaluate-int8`."""
    return task.component_spec.name.partition("-")[0]


def _common_settings(
    task: PipelineTask, hours: float, shared_memory: str, gpus: int = 0
) -> PipelineTask:
    """Apply the settings of every task: shared memory for worker processes, store credentials, the
    addresses of MLflow and the model registry, the signing key, the image and the pod's identity in
    the environment, labels, placement, retries and a timeout."""
    kubernetes.empty_dir_mount(task, "shm", "/dev/shm", medium="Memory", size_limit=shared_memory)
    kubernetes.use_secret_as_env(task, SECRET, KEYS, optional=True)
    kubernetes.use_config_map_as_env(task, CONFIG_MAP, STORE)
    kubernetes.use_config_map_as_env(task, TRACKING, TRACKED, optional=True)
    kubernetes.use_secret_as_volume(task, SIGNING, str(MOUNTED), optional=True)
    task.set_env_variable(IMAGE, task.container_spec.image)
    if store := _VARIANT.get().placement.store:
        task.set_env_variable(artifacts.STORE, store)
    for variable, path in POD_FIELDS.items():
        kubernetes.use_field_path_as_env(task, variable, path)
    _scheduled(task, _VARIANT.get().pool.node_pool if gpus else None, bool(gpus))
    kubernetes.add_pod_label(task, "app.kubernetes.io/name", "lathe")
    kubernetes.add_pod_label(task, "app.kubernetes.io/part-of", "lathe")
    kubernetes.add_pod_label(task, "lathe/stage", task.component_spec.name)
    kubernetes.set_timeout(task, int(hours * HOUR))
    # Argo measures the maximum backoff duration from the start of the first attempt: when it has
    # passed, Argo starts no further attempt and stops the current one.
    seconds = int((RETRIES + 1) * hours * HOUR)
    return task.set_retry(
        RETRIES, backoff_duration="30s", backoff_factor=2.0, backoff_max_duration=f"{seconds}s"
    )


def _scheduled(task: PipelineTask, node_pool: str | None, has_gpus: bool) -> None:
    """Apply the placement of the task's step, and run it as a non-root user."""
    settings = _VARIANT.get().placement.of_step(stage_of(task))
    kubernetes.set_security_context(task, run_as_user=settings.run_as_user, run_as_non_root=True)
    for key, value in settings.selector(node_pool).items():
        kubernetes.add_node_selector(task, label_key=key, label_value=value)
    for toleration in settings.tolerated(node_pool, has_gpus):
        seconds = toleration.pop("tolerationSeconds", None)
        kubernetes.add_toleration(task, **toleration, toleration_seconds=seconds)
    if settings.affinity:
        kubernetes.add_node_affinity_json(task, settings.affinity["nodeAffinity"])
    for key, value in settings.labels.items():
        kubernetes.add_pod_label(task, key, value)
    for key, value in settings.annotations.items():
        kubernetes.add_pod_annotation(task, key, value)
    for key, value in settings.env.items():
        task.set_env_variable(key, value)
    if settings.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, settings.image_pull_secrets)
    for volume in settings.volumes:
        if volume.claim:
            kubernetes.mount_pvc(task, volume.claim, volume.mount_path)
        elif volume.config_map:
            kubernetes.use_config_map_as_volume(
                task, volume.config_map, volume.mount_path, volume.optional
            )
        elif volume.secret:
            kubernetes.use_secret_as_volume(task, volume.secret, volume.mount_path, volume.optional)
