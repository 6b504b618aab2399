"""Build the TrainJob (Kubeflow Trainer 2.3) of a training command, from its typed models.

The runtime defines the command (`lathe`), so that another runtime can have another backend; the
TrainJob defines its arguments. The runtime also defines what a TrainJob cannot set:
`restartPolicy: Never`, `backoffLimit: 0` and `maxRestarts: 0` (restarts are up to
`lathe.launch.cluster.trainjob`), gang scheduling (`podGroupPolicy`, where no Kueue queue admits a
job as a whole), the pods' PriorityClass, service account (workers do not use the Kubernetes API)
and image pull secrets.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from kubeflow_trainer_api import models as m  # type: ignore[import-untyped]

from lathe.config.settings import LaunchSettings
from lathe.errors import UserError
from lathe.launch.cluster.api import (
    CONTAINER,
    DEADLINE,
    FAILURES,
    GROUP,
    LABELS,
    REPLICATED_JOB,
    VERSION,
    WORK,
    Cluster,
    TrainJob,
)
from lathe.launch.shape import POD_GRACE_SECONDS, Shape
from lathe.provenance.keys import MOUNTED
from lathe.provenance.surroundings import IMAGE, PIPELINE

RUNTIME = "lathe-torch"
USER = 10001
STORE_SECRET = "lathe-s3"
STORE_KEYS = {
    "AWS_ACCESS_KEY_ID": "accesskey",
    "AWS_SECRET_ACCESS_KEY": "secretkey",
    "AWS_SESSION_TOKEN": "sessiontoken",
}
"""Variables, and the keys of the Secret; temporary keys alone have a session token."""
SIGNING_SECRET = "lathe-signing"
PASSED_ON = (
    *("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"),
    *("LATHE_NETWORK_TIMEOUT", "LATHE_NETWORK_PATIENCE", "AWS_S3_ADDRESSING_STYLE"),
    *("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy"),
    *("KFP_RUN_ID", PIPELINE),
)


@dataclass(frozen=True)
class Launcher:
    """The pod that this process runs in, which owns the TrainJob, and its pipeline run."""

    pod: str
    uid: str
    run_id: str
    image: str

    @property
    def owner(self) -> dict[str, str]:
        """The owner reference of the launcher's pod."""
        return {"apiVersion": "v1", "kind": "Pod", "name": self.pod, "uid": self.uid}


def find_launcher(cluster: Cluster) -> Launcher:
    """Find it by the environment that Kubeflow Pipelines, or a downward API, gives a pod.

    The image is LATHE_TRAIN_IMAGE, else the pod's own; the run is the pod's label, else the pod.

    Raises:
        UserError: this process does not run in a pod.
    """
    name = os.environ.get("KFP_POD_NAME") or os.environ.get("POD_NAME")
    pod = cluster.pod(name) if name else None
    if pod is None:
        raise UserError(
            f"there is no pod {name or ''} of this process in namespace {cluster.namespace}, and "
            "a TrainJob must belong to one, or nothing would delete it after a crash",
            "run as a step of a pipeline, or set POD_NAME and POD_NAMESPACE by the downward API",
        )
    containers = {container.name: container.image for container in pod.spec.containers}
    own_image = containers.get("main") or pod.spec.containers[0].image  # Argo calls a step's `main`
    run_id = (pod.metadata.labels or {}).get("pipeline/runid") or pod.metadata.name
    image = os.environ.get("LATHE_TRAIN_IMAGE") or own_image
    return Launcher(pod.metadata.name, pod.metadata.uid, run_id, image)


def work_of(
    command: Sequence[str], shape: Shape, settings: LaunchSettings, launcher: Launcher
) -> str:
    """The value of the label `WORK`. It depends on the work and the run only, so that a retry of
    the step finds the TrainJob."""
    work = [launcher.run_id, launcher.image, list(command), asdict(shape), settings.model_dump()]
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:10]


def name_of_attempt(stage: str, last: str | None) -> str:
    """A name that nothing has had before, or the one that follows `last`, the attempt before.

    It has fewer than 20 characters, as names of pods and services are made from it.
    """
    first, _, number = (last or f"{stage}-{secrets.token_hex(3)}-0").rpartition("-")
    return f"{first}-{int(number) + 1}"


def build(
    command: Sequence[str],
    shape: Shape,
    settings: LaunchSettings,
    launcher: Launcher,
    name: str,
    deadline: datetime,
    failures: int = 0,
) -> TrainJob:
    """The object to create; `failures` is the number of earlier attempts that failed.

    Raises:
        UserError: `priority` without a `queue`.
    """
    labels = LABELS | {
        "lathe/run-id": _label(launcher.run_id),
        "lathe/stage": _label(command[0]),
        WORK: work_of(command, shape, settings, launcher),
    }
    job = m.TrainerV1alpha1TrainJob(
        api_version=f"{GROUP}/{VERSION}",
        kind="TrainJob",
        metadata=m.IoK8sApimachineryPkgApisMetaV1ObjectMeta(
            name=name,
            labels=labels | _queue(settings),
            annotations={FAILURES: str(failures), DEADLINE: deadline.isoformat(timespec="seconds")},
            owner_references=[
                m.IoK8sApimachineryPkgApisMetaV1OwnerReference.from_dict(launcher.owner)
            ],
        ),
        spec=m.TrainerV1alpha1TrainJobSpec(
            runtime_ref=m.TrainerV1alpha1RuntimeRef(name=settings.runtime or RUNTIME),
            active_deadline_seconds=max(1, int((deadline - datetime.now(UTC)).total_seconds())),
            trainer=m.TrainerV1alpha1Trainer(
                image=launcher.image,
                args=list(command),
                num_nodes=shape.nodes,
                num_proc_per_node=shape.processes_per_node,
                resources_per_node=_resources(settings),
                env=_environment(launcher.image),
            ),
            runtime_patches=[_patch(labels, settings)],
        ),
    )
    return dict(job.to_dict())


def _queue(settings: LaunchSettings) -> dict[str, str]:
    if settings.priority and not settings.queue:
        raise UserError(
            f"Launch.priority={settings.priority} orders jobs within a queue, and there is none",
            "set Launch.queue to a Kueue LocalQueue, or take Launch.priority out",
        )
    labels = {
        "kueue.x-k8s.io/queue-name": settings.queue,
        "kueue.x-k8s.io/priority-class": settings.priority,
    }
    return {name: value for name, value in labels.items() if value}


def _resources(settings: LaunchSettings) -> Any:
    """Guaranteed QoS: requests equal limits; Trainer reads both."""
    amounts = {"cpu": str(settings.cpus_per_node), "memory": settings.memory_per_node}
    if settings.gpus_per_node:
        amounts["nvidia.com/gpu"] = str(settings.gpus_per_node)
    quantities = {name: _quantity(amount) for name, amount in amounts.items()}
    return m.IoK8sApiCoreV1ResourceRequirements(limits=quantities, requests=quantities)


def _environment(image: str) -> list[Any]:
    """What this process's environment says of the store and of the run and, by reference, the
    store's keys."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    passed |= {"HOME": "/tmp", IMAGE: image}
    variables = [m.IoK8sApiCoreV1EnvVar(name=name, value=value) for name, value in passed.items()]
    for name, key in STORE_KEYS.items():
        optional = True if key == "sessiontoken" else None
        reference = m.IoK8sApiCoreV1SecretKeySelector(name=STORE_SECRET, key=key, optional=optional)
        source = m.IoK8sApiCoreV1EnvVarSource(secret_key_ref=reference)
        variables.append(m.IoK8sApiCoreV1EnvVar(name=name, value_from=source))
    return variables


def _patch(labels: dict[str, str], settings: LaunchSettings) -> Any:
    """Scheduling and security settings that override the runtime's."""
    shared_memory = m.IoK8sApiCoreV1EmptyDirVolumeSource(
        medium="Memory", size_limit=_quantity(settings.shared_memory)
    )
    scratch = m.IoK8sApiCoreV1EmptyDirVolumeSource()
    signing = m.IoK8sApiCoreV1SecretVolumeSource(secret_name=SIGNING_SECRET, optional=True)
    pod = m.TrainerV1alpha1PodSpecPatch(
        node_selector=_node_selector(settings),
        tolerations=_tolerations(settings),
        termination_grace_period_seconds=POD_GRACE_SECONDS,
        security_context=m.IoK8sApiCoreV1PodSecurityContext(
            run_as_non_root=True,
            run_as_user=USER,
            run_as_group=USER,
            fs_group=USER,
            seccomp_profile=m.IoK8sApiCoreV1SeccompProfile(type="RuntimeDefault"),
        ),
        volumes=[
            m.IoK8sApiCoreV1Volume(name="shared-memory", empty_dir=shared_memory),
            m.IoK8sApiCoreV1Volume(name="scratch", empty_dir=scratch),
            m.IoK8sApiCoreV1Volume(name="signing-key", secret=signing),
        ],
        containers=[
            m.TrainerV1alpha1ContainerPatch(
                name=CONTAINER,
                security_context=m.IoK8sApiCoreV1SecurityContext(
                    allow_privilege_escalation=False,
                    read_only_root_filesystem=True,
                    capabilities=m.IoK8sApiCoreV1Capabilities(drop=["ALL"]),
                ),
                volume_mounts=[
                    m.IoK8sApiCoreV1VolumeMount(name="shared-memory", mount_path="/dev/shm"),
                    m.IoK8sApiCoreV1VolumeMount(name="scratch", mount_path="/tmp"),
                    m.IoK8sApiCoreV1VolumeMount(
                        name="signing-key", mount_path=str(MOUNTED), read_only=True
                    ),
                ],
            )
        ],
    )
    template = m.TrainerV1alpha1PodTemplatePatch(
        metadata=m.IoK8sApimachineryPkgApisMetaV1ObjectMeta(
            labels=labels | {"app.kubernetes.io/component": "train"}
        ),
        spec=pod,
    )
    job = m.TrainerV1alpha1JobTemplatePatch(spec=m.TrainerV1alpha1JobSpecPatch(template=template))
    jobs = m.TrainerV1alpha1JobSetSpecPatch(
        replicated_jobs=[m.TrainerV1alpha1ReplicatedJobPatch(name=REPLICATED_JOB, template=job)]
    )
    return m.TrainerV1alpha1RuntimePatch(
        manager="lathe/launch",
        training_runtime_spec=m.TrainerV1alpha1TrainingRuntimeSpecPatch(
            template=m.TrainerV1alpha1JobSetTemplatePatch(spec=jobs)
        ),
    )


def _node_selector(settings: LaunchSettings) -> dict[str, str] | None:
    return {"lathe/node-pool": settings.node_pool} if settings.node_pool else None


def _tolerations(settings: LaunchSettings) -> list[Any] | None:
    """Tolerations of the taints that reserve the pool and its GPUs."""
    taints = {
        "lathe/node-pool": settings.node_pool,
        "nvidia.com/gpu": settings.gpus_per_node or None,
    }
    return [
        m.IoK8sApiCoreV1Toleration(key=taint, operator="Exists", effect="NoSchedule")
        for taint, needed in taints.items()
        if needed
    ] or None


def _quantity(amount: str) -> Any:
    return m.IoK8sApimachineryPkgApiResourceQuantity(amount)


def _label(text: str) -> str:
    """The text cut to what is valid in a label."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.")
