"""Check the Kubernetes API: permissions, Trainer, JobSet, the pipeline root."""

from datetime import UTC, datetime, timedelta
from typing import Any

from kubernetes import client  # type: ignore[import-untyped]
from kubernetes.client import ApiException  # type: ignore[import-untyped]

from lathe_base.config.settings import LaunchSettings
from lathe_base.errors import Code, UserError
from lathe_launch.cluster.api import GROUP, JOBSETS, RUNTIMES, Cluster
from lathe_launch.cluster.manifest import attempt_name, build, find_launcher
from lathe_launch.shape import Shape

LAUNCHER = "kfp-launcher"
TIMEOUT = (10, 10)
RIGHTS: dict[tuple[str, str, str], tuple[str, ...]] = {
    (GROUP, "trainjobs", ""): ("create", "get", "list", "patch", "delete"),
    (GROUP, RUNTIMES, ""): ("get",),
    ("jobset.x-k8s.io", "jobsets", ""): ("get",),
    ("kueue.x-k8s.io", "workloads", ""): ("list",),
    ("argoproj.io", "workflowtaskresults", ""): ("create", "patch"),
    ("argoproj.io", "workflows", ""): ("get",),
    ("", "pods", ""): ("get", "list", "watch"),
    ("", "pods/log", ""): ("get",),
    ("", "events", ""): ("list",),
    ("", "resourcequotas", ""): ("list",),
    ("", "nodes", ""): ("list",),
    ("", "configmaps", LAUNCHER): ("get",),
    ("", "secrets", "lathe-s3"): ("get",),
}
"""The Kubernetes API permissions that a step needs: group, resource, name, verbs."""
APPLY = "apply the manifests again: kubectl apply --server-side -k manifests/overlays/..."
INSTALL = "install Kubeflow Trainer, which brings JobSet: docs/how-to/cluster-install.md#operators"


def check_rights(cluster: Cluster) -> str:
    """Check that this pod's service account has the permissions that steps need."""
    if missing := _missing(cluster):
        raise UserError(
            f"the service account lacks permission to {', '.join(missing)}", APPLY, Code.FORBIDDEN
        )
    return f"{cluster.api.configuration.host}, {sum(map(len, RIGHTS.values()))} rights"


def require_account(cluster: Cluster, account: str, hint: str) -> str:
    """Check that another service account of the namespace exists and may do what steps do.

    Raises:
        UserError: it does not exist, lacks permissions, or these questions are not allowed.
    """
    reading = client.CoreV1Api(cluster.api).read_namespaced_service_account
    if cluster.ask(reading, account, cluster.namespace, unless=404) is None:
        raise UserError(
            f"the namespace {cluster.namespace} has no service account {account}, which runs made "
            "in the UI have by default",
            hint,
            Code.NOT_FOUND,
        )
    user = f"system:serviceaccount:{cluster.namespace}:{account}"
    if missing := _missing(cluster, user):
        raise UserError(
            f"the service account {account} lacks permission to {', '.join(missing)}",
            hint,
            Code.FORBIDDEN,
        )
    return account


def _missing(cluster: Cluster, user: str = "") -> list[str]:
    """The permissions of `RIGHTS` that a user does not have; by default this process's own."""
    reviews = client.AuthorizationV1Api(cluster.api)
    missing = []
    for (group, what, name), verbs in RIGHTS.items():
        resource, _, subresource = what.partition("/")
        of_resource = {"namespace": cluster.namespace, "group": group, "resource": resource}
        of_resource |= {"subresource": subresource, "name": name}
        for verb in verbs:
            spec: dict[str, Any] = {"resourceAttributes": of_resource | {"verb": verb}}
            review = {"apiVersion": "authorization.k8s.io/v1", "spec": spec}
            if user:
                spec["user"] = user
                review |= {"kind": "LocalSubjectAccessReview"}
                review |= {"metadata": {"namespace": cluster.namespace}}
                asking = reviews.create_namespaced_local_subject_access_review
                answer = cluster.ask(asking, cluster.namespace, review)
            else:
                review |= {"kind": "SelfSubjectAccessReview"}
                answer = cluster.ask(reviews.create_self_subject_access_review, review)
            if not answer.status.allowed:
                missing.append(f"{verb} {what}" + (f".{group}" if group else ""))
    return missing


def check_trainer(cluster: Cluster, settings: LaunchSettings) -> str:
    """Let the API server and Trainer's webhook validate a TrainJob, which is not created."""
    shape = Shape(settings.nodes, max(1, settings.gpus_per_node))
    deadline = datetime.now(UTC) + timedelta(hours=1)
    stage = "pretrain"
    settings, name = settings.of_step(stage), attempt_name(stage, None)
    job = build([stage], shape, settings, find_launcher(cluster), name, deadline)
    custom = client.CustomObjectsApi(cluster.api)
    group, version = job["apiVersion"].split("/")
    resource = (group, version, cluster.namespace, "trainjobs")
    _require_definition(cluster, custom.list_namespaced_custom_object, *resource, limit=1)
    cluster.ask(custom.create_namespaced_custom_object, *resource, job, dry_run="All")
    return f"a TrainJob of runtime {job['spec']['runtimeRef']['name']} is accepted (dry run)"


def check_jobset(cluster: Cluster) -> str:
    """Ask for a JobSet that does not exist."""
    custom = client.CustomObjectsApi(cluster.api)
    group, version, plural = JOBSETS
    resource = (group, version, cluster.namespace, plural, "lathe-doctor")
    _require_definition(cluster, custom.get_namespaced_custom_object, *resource)
    return ""


def _require_definition(cluster: Cluster, call: Any, *arguments: Any, **options: Any) -> None:
    """The API answers 404 for an object that does not exist, too, but as JSON."""
    try:
        call(*arguments, _request_timeout=TIMEOUT, **options)
    except ApiException as error:
        if error.status == 404 and "page not found" in str(error.body):
            raise UserError(
                f"the cluster has no {arguments[3]}.{arguments[0]}", INSTALL, Code.NOT_INSTALLED
            ) from None
        if error.status != 404:
            cluster.explain(error)


PIPELINES_ROOT = "minio://mlpipeline/v2/artifacts"
"""Pipelines' own default, used if the ConfigMap names none, as in single-user mode."""


def pipeline_root(cluster: Cluster) -> str:
    """The pipeline root of this namespace's runs.

    Raises:
        UserError: the namespace has no ConfigMap of Pipelines.
    """
    read = client.CoreV1Api(cluster.api).read_namespaced_config_map
    config = cluster.ask(read, LAUNCHER, cluster.namespace, unless=404)
    if not config:
        raise UserError(
            f"namespace {cluster.namespace} has no ConfigMap {LAUNCHER}", APPLY, Code.NOT_INSTALLED
        )
    root = (config.data or {}).get("defaultPipelineRoot") or PIPELINES_ROOT
    return str(root).partition("?")[0]
