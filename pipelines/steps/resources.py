"""The resources that tasks request from the cluster, all in one place.

Amounts, GPUs and nodes are values that the first step of the run returns
(`components.machines.requests`). Secrets, volumes and labels, which Pipelines cannot take from a
run's parameters, are part of the compiled pipeline. The local runner ignores all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kfp import kubernetes
from kfp.dsl import PipelineTask
from kfp.dsl.pipeline_channel import PipelineChannel

from components import artifacts
from components.images import PADDLE
from components.machines import SHARED_MEMORY_GIB
from components.step import Step
from lathe_base.config.settings import Placements
from lathe_base.config.settings.placement import StepPlacement
from lathe_base.provenance.keys import MOUNTED, TRUSTED_MOUNTED
from lathe_base.provenance.surroundings import IMAGE
from lathe_launch.usage import CPU_HOUR, GPU_HOUR

Outputs = dict[str, Any]
"""Name of a step's output -> address of the artifact, or value of the parameter."""

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
TRACKED |= {"gpu-hour-price": GPU_HOUR, "cpu-hour-price": CPU_HOUR}
SERVICE_ACCOUNT = "lathe-pipeline"
POD_FIELDS = {
    "POD_NAME": "metadata.name",
    "POD_UID": "metadata.uid",
    "POD_NAMESPACE": "metadata.namespace",
    "KFP_RUN_ID": "metadata.labels['pipeline/runid']",
}
RETRIES = 2
HOUR = 3600
WAITING_SHARED_MEMORY = "2Gi"
MAX_GPUS = 8
"""GPUs per node for which /dev/shm is large enough; the kubelet limits it to the pod's memory."""


@dataclass(frozen=True)
class Variant:
    """What a pipeline is compiled with; everything else is a parameter of its runs.

    Attributes:
        placement: scheduling and pod settings of the steps.
        engine: Compress.engine; `paddle` if any recipe of the run sets it.
        shared_memory: size limit of /dev/shm in steps that compute; None is enough for each kind.
        inputs: the outputs of the component `inputs`, if they are known; None if a step of the run
            is to find them.
        code: digest of the code in the images, part of cache keys unless an image is referenced by
            digest.
        shards: number of shards in which the corpus is tokenized, one step each.
        finished: outputs of the steps that an earlier run finished; they are reused.
        has_chats: whether the run's text is conversations, on which it finetunes its model.
        machines: defaults of those parameters of its runs that say what they request; the others
            keep those of `pipelines.compiler.compile.MACHINES`.
    """

    placement: Placements = field(default_factory=Placements)
    engine: str = "torch"
    shared_memory: str | None = None
    inputs: Mapping[str, Any] | None = None
    code: str = ""
    shards: int = 1
    finished: Mapping[str, Outputs] = field(default_factory=dict)
    has_chats: bool = False
    machines: Mapping[str, Any] = field(default_factory=dict)


def place(
    task: PipelineTask, step: Step, variant: Variant, resolved: Mapping[str, Any]
) -> PipelineTask:
    """Apply what a component declares about its step.

    Args:
        resolved: outputs of the component `inputs`.
    """
    if step.by_engine and variant.engine == "paddle":
        task.set_container_image(PADDLE)
    if step.machine == "waiting":  # whatever the model
        task.set_cpu_request("100m").set_memory_request("512Mi")
    elif variant.inputs is None:
        _request(task, step.machine, variant.placement, resolved)
    _mount(task, step, variant)
    _schedule(task, step, variant.placement)
    kubernetes.add_pod_label(task, "app.kubernetes.io/name", "lathe")
    kubernetes.add_pod_label(task, "app.kubernetes.io/part-of", "lathe")
    kubernetes.add_pod_label(task, "lathe/stage", task.component_spec.name)
    kubernetes.set_timeout(task, int(step.hours * HOUR))
    if not step.is_cached:
        task.set_caching_options(False)
    if step.retries is not None:  # such as a release, which must not be tried twice
        return task.set_retry(step.retries)
    # Argo measures the maximum backoff duration from the start of the first attempt: when it has
    # passed, Argo starts no further attempt and stops the current one.
    seconds = int((RETRIES + 1) * step.hours * HOUR)
    return task.set_retry(
        RETRIES, backoff_duration="30s", backoff_factor=2.0, backoff_max_duration=f"{seconds}s"
    )


def with_webhook(task: PipelineTask) -> PipelineTask:
    """A task that may post to the webhook."""
    return kubernetes.use_secret_as_env(task, WEBHOOK, WEBHOOK_KEYS, optional=True)


def launch_step_name(task: PipelineTask) -> Any:
    """The name of a step in `Launch.steps`: `evaluate` for `evaluate-int8`."""
    return task.component_spec.name.partition("-")[0]


def _request(
    task: PipelineTask, machine: str, placement: Placements, resolved: Mapping[str, Any]
) -> None:
    """Request the amounts of a kind of machine, except those that are given for the step."""
    explicit = placement.steps.get(launch_step_name(task)) or StepPlacement()
    cpus = str(explicit.cpus) if explicit.cpus else resolved[f"{machine}_cpus"]
    memory = explicit.memory or resolved[f"{machine}_memory"]
    limit = explicit.memory or resolved[f"{machine}_memory_limit"]
    task.set_cpu_request(cpus).set_memory_request(memory).set_memory_limit(limit)
    values = [cpus, memory, limit]
    if machine not in ("cpu", "text"):
        settings, gpus = placement.of_step(launch_step_name(task)), resolved[f"{machine}_gpus"]
        # A string: Pipelines 2.17 would read another type as empty, and request no GPU.
        task.set_accelerator_type(settings.gpu_resource).set_accelerator_limit(gpus)
        values.append(gpus)
        kubernetes.add_toleration_json(task, resolved[f"{machine}_tolerations"])
        if not settings.chooses_nodes:
            kubernetes.add_node_selector_json(task, resolved[f"{machine}_node_selector"])
    # KFP 2.17 overlooks them within conditions and loops.
    task.register_pipeline_channels([v for v in values if isinstance(v, PipelineChannel)])


def _mount(task: PipelineTask, step: Step, variant: Variant) -> None:
    """Shared memory for worker processes, store credentials, the addresses of MLflow and the model
    registry, keys, and the image and the pod's identity in the environment."""
    # The size is compiled in, whereas a run may have any number of GPUs: a limit, not a request.
    gpus = {"training": MAX_GPUS, "node": MAX_GPUS, "gpu": 1}.get(step.machine)
    usual = f"{SHARED_MEMORY_GIB * gpus}Gi" if gpus else WAITING_SHARED_MEMORY
    size = usual if step.machine == "waiting" else variant.shared_memory or usual
    kubernetes.empty_dir_mount(task, "shm", "/dev/shm", medium="Memory", size_limit=size)
    kubernetes.use_secret_as_env(task, SECRET, KEYS, optional=True)
    kubernetes.use_config_map_as_env(task, CONFIG_MAP, STORE)
    kubernetes.use_config_map_as_env(task, TRACKING, TRACKED, optional=True)
    kubernetes.use_secret_as_volume(task, SIGNING, str(MOUNTED), optional=True)
    if step.trusts:
        kubernetes.use_config_map_as_volume(task, TRUST, str(TRUSTED_MOUNTED), optional=True)
    task.set_env_variable(IMAGE, task.container_spec.image)
    if variant.placement.store:
        task.set_env_variable(artifacts.STORE, variant.placement.store)
    for variable, path in POD_FIELDS.items():
        kubernetes.use_field_path_as_env(task, variable, path)


def _schedule(task: PipelineTask, step: Step, placement: Placements) -> None:
    """Apply the placement of the task's step, and run it as a non-root user."""
    settings = placement.of_step(launch_step_name(task))
    kubernetes.set_security_context(task, run_as_user=settings.run_as_user, run_as_non_root=True)
    for key, value in settings.node_selector.items():
        kubernetes.add_node_selector(task, label_key=key, label_value=value)
    # Those for GPUs come with the run: see `_request`.
    for toleration in settings.tolerated(None, has_gpus=False):
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
