"""Build the TrainJob (Kubeflow Trainer 2.3) of a training command, from its typed models.

The runtime defines the command (`lathe`), so that another runtime can have another backend; the
TrainJob defines its arguments. The runtime also defines what a TrainJob cannot set:
`restartPolicy: Never`, `backoffLimit: 0` and `maxRestarts: 0` (restarts are up to
`lathe_launch.cluster.trainjob`), gang scheduling (`podGroupPolicy`, where no Kueue queue admits a
job as a whole) and the pods' PriorityClass.
"""

import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from kubeflow_trainer_api import models as m  # type: ignore[import-untyped]

from lathe_base.config.settings import LaunchSettings
from lathe_base.errors import Code, UserError
from lathe_base.provenance.keys import MOUNTED
from lathe_base.provenance.surroundings import IMAGE, PIPELINE
from lathe_launch.cluster.api import (
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
from lathe_launch.cluster.placement import place
from lathe_launch.shape import POD_GRACE_SECONDS, Shape

log = logging.getLogger("lathe")

RUNTIME = "lathe-torch"
STORE_SECRET = "lathe-s3"
STORE_KEYS = {
    "AWS_ACCESS_KEY_ID": "accesskey",
    "AWS_SECRET_ACCESS_KEY": "secretkey",
    "AWS_SESSION_TOKEN": "sessiontoken",
}
"""Variables, and the keys of the Secret; temporary keys alone have a session token, and with a
workload's identity there is no Secret."""
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
    """Find the launcher's pod by the environment that Kubeflow Pipelines, or the downward API,
    sets.

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
            "run as a pipeline step, or set POD_NAME and POD_NAMESPACE with the downward API",
            Code.NOT_FOUND,
        )
    containers = {container.name: container.image for container in pod.spec.containers}
    step_image = (
        containers.get("main") or pod.spec.containers[0].image
    )  # Argo calls a step's `main`
    run_id = (pod.metadata.labels or {}).get("pipeline/runid") or pod.metadata.name
    image = os.environ.get("LATHE_TRAIN_IMAGE") or step_image
    return Launcher(pod.metadata.name, pod.metadata.uid, run_id, image)


def work_label(
    command: Sequence[str], shape: Shape, settings: LaunchSettings, launcher: Launcher
) -> str:
    """The value of the label `WORK`. It only depends on the work and the run, so that a retried
    step finds the TrainJob; an attempt with more memory is the same work."""
    machines = settings.model_dump(exclude={"memory_per_node"})
    # The image too: after an upgrade, a step does not adopt the work of the version before.
    work = [launcher.run_id, launcher.image, list(command), asdict(shape), machines]
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:10]


def attempt_name(stage: str, last: str | None) -> str:
    """A unique name, or the one that follows `last`, the previous attempt's.

    It has fewer than 20 characters because names of pods and services are derived from it.
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
    runtime: TrainJob | None = None,
) -> TrainJob:
    """The object to create.

    Args:
        failures: number of earlier attempts that failed.
        runtime: the TrainingRuntime, whose tolerations the pods keep.

    Raises:
        UserError: `priority` without a `queue`.
    """
    labels = LABELS | {
        "lathe/run-id": _label(launcher.run_id),
        "lathe/stage": _label(command[0]),
        WORK: work_label(command, shape, settings, launcher),
    }
    template = _template(labels, settings, runtime)
    env = _environment(launcher.image)
    # Trainer refuses variables in a patch of the container that it runs, and takes them here.
    env += template["spec"]["containers"][0].pop("env", [])
    # It also requires one variable per name: the recipe's replaces the launcher's.
    env = list({variable["name"]: variable for variable in env}.values())
    job = m.TrainerV1alpha1TrainJob(
        api_version=f"{GROUP}/{VERSION}",
        kind="TrainJob",
        metadata=m.IoK8sApimachineryPkgApisMetaV1ObjectMeta(
            name=name,
            labels=dict(settings.labels) | labels | _queue(settings),
            annotations=dict(settings.annotations)
            | {FAILURES: str(failures), DEADLINE: deadline.isoformat(timespec="seconds")},
            owner_references=[
                m.IoK8sApimachineryPkgApisMetaV1OwnerReference.from_dict(launcher.owner)
            ],
        ),
        spec=m.TrainerV1alpha1TrainJobSpec(
            # Of the namespace, so that two installations do not share one.
            runtime_ref=m.TrainerV1alpha1RuntimeRef(
                api_group=GROUP, kind="TrainingRuntime", name=runtime_name(settings)
            ),
            # A launcher that was killed cannot end it at its deadline.
            active_deadline_seconds=max(1, int((deadline - datetime.now(UTC)).total_seconds())),
            trainer=m.TrainerV1alpha1Trainer(
                image=launcher.image,
                args=list(command),
                num_nodes=shape.nodes,
                num_proc_per_node=shape.processes_per_node,
                resources_per_node=_resources(settings),
                env=[m.IoK8sApiCoreV1EnvVar.from_dict(variable) for variable in env],
            ),
            runtime_patches=[_patch(template)],
        ),
    )
    return dict(job.to_dict())


def runtime_name(settings: LaunchSettings) -> str:
    """Name of the TrainingRuntime."""
    return settings.runtime or RUNTIME


def _queue(settings: LaunchSettings) -> dict[str, str]:
    if settings.priority and not settings.queue:
        raise UserError(
            f"Launch.priority={settings.priority} orders jobs within a queue, but Launch.queue is "
            "not set",
            "set Launch.queue to a Kueue LocalQueue, or remove Launch.priority",
            Code.MISSING_OPTION,
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
        amounts[settings.gpu_resource] = str(settings.gpus_per_node)
    amounts |= {name: str(amount) for name, amount in settings.extra_resources.items()}
    quantity = m.IoK8sApimachineryPkgApiResourceQuantity
    quantities = {name: quantity(amount) for name, amount in amounts.items()}
    return m.IoK8sApiCoreV1ResourceRequirements(limits=quantities, requests=quantities)


def _environment(image: str) -> list[dict[str, Any]]:
    """Environment variables for the workers: the store and the run from this process's environment,
    and the store's keys by reference."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    # The root file system is read-only; libraries write their caches below HOME.
    passed |= {"HOME": "/tmp", IMAGE: image}
    variables: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in passed.items()
    ]
    for name, key in STORE_KEYS.items():
        reference = {"name": STORE_SECRET, "key": key, "optional": True}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return variables


def _template(
    labels: dict[str, str], settings: LaunchSettings, runtime: TrainJob | None
) -> dict[str, Any]:
    """Scheduling and security settings of the pods, over the runtime's.

    Trainer merges them as a strategic merge patch: volumes, mounts and pull secrets by name or
    path, maps key by key; a list of tolerations replaces the runtime's, so it repeats them.
    """
    shared_memory = {"medium": "Memory", "sizeLimit": settings.shared_memory_limit}
    context: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    context |= dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), settings.run_as_user)
    node = {
        "name": CONTAINER,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "scratch", "mountPath": "/tmp"},
            {"name": "signing-key", "mountPath": str(MOUNTED), "readOnly": True},
        ],
    }
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": POD_GRACE_SECONDS,
        "securityContext": context,
        "volumes": [
            {"name": "shared-memory", "emptyDir": shared_memory},
            {"name": "scratch", "emptyDir": {}},
            {"name": "signing-key", "secret": {"secretName": SIGNING_SECRET, "optional": True}},
        ],
        "containers": [node],
    }
    template = {
        "metadata": {"labels": labels | {"app.kubernetes.io/component": "train"}},
        "spec": spec,
    }
    # Where the pods may run, and as whom.
    place(template, settings, settings.node_pool, bool(settings.gpus_per_node))
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    # The runtime's own pods; empty if it is not known.
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"] if runtime else []
    inherited = jobs[0]["template"]["spec"]["template"]["spec"] if jobs else {}
    if "tolerations" in spec:
        kept = [one for one in inherited.get("tolerations", []) if one not in spec["tolerations"]]
        spec["tolerations"] = [*kept, *spec["tolerations"]]
    # Trainer merges node selectors: a TrainJob cannot remove a label of its runtime.
    others = inherited.get("nodeSelector", {}).keys() - spec.get("nodeSelector", {}).keys()
    if settings.chooses_nodes and others:
        log.warning(
            "runtime %s also requires the node label %s: change it there (make manifests RECIPE=)",
            *(runtime_name(settings), ", ".join(sorted(others))),
        )
    if settings.priority_class not in (None, inherited.get("priorityClassName")):
        log.warning(
            "Launch.priority_class=%s is ignored by TrainJobs: set it in runtime %s "
            "(make manifests RECIPE=), or order jobs with Launch.queue and Launch.priority",
            settings.priority_class,
            runtime_name(settings),
        )
    return template


def _patch(template: dict[str, Any]) -> Any:
    job = m.TrainerV1alpha1JobTemplatePatch(
        spec=m.TrainerV1alpha1JobSpecPatch(
            template=m.TrainerV1alpha1PodTemplatePatch.from_dict(template)
        )
    )
    jobs = m.TrainerV1alpha1JobSetSpecPatch(
        replicated_jobs=[m.TrainerV1alpha1ReplicatedJobPatch(name=REPLICATED_JOB, template=job)]
    )
    return m.TrainerV1alpha1RuntimePatch(
        manager="lathe/launch",
        training_runtime_spec=m.TrainerV1alpha1TrainingRuntimeSpecPatch(
            template=m.TrainerV1alpha1JobSetTemplatePatch(spec=jobs)
        ),
    )


def _label(text: str) -> str:
    """The text reduced to a valid label value."""
    # 63 characters that begin and end with a letter or a digit.
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.")
