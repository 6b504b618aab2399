"""Checks, from within a pod, that pipeline steps have what they need: `python -m
lathe_launch.cluster.doctor`.

`make doctor` runs it in a throw-away pod with the identity, labels, secrets and network of a step.
It prints a line of JSON for every check, a `Finding`.
"""

import functools
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
import urllib3
from kubernetes import client  # type: ignore[import-untyped]
from kubernetes.client import ApiException  # type: ignore[import-untyped]

from lathe_base.checks import Check, Finding, State, run_checks
from lathe_base.config.settings import LaunchSettings
from lathe_base.errors import Code, UserError
from lathe_base.provenance.keys import load_signer, signing_key
from lathe_base.storage.network import PATIENCE
from lathe_base.storage.probe import StoreProbe
from lathe_launch.cluster.api import GROUP, JOBSETS, RUNTIMES, Cluster, connect
from lathe_launch.cluster.manifest import attempt_name, build, find_launcher
from lathe_launch.shape import Shape, visible_gpus

SECONDS = 10.0
PATIENCE_SECONDS = 20.0
LAUNCHER = "kfp-launcher"
TIMEOUT = (10, 10)
"""Seconds to connect, and between two bytes of an answer."""
RIGHTS: dict[tuple[str, str, str], tuple[str, ...]] = {
    (GROUP, "trainjobs", ""): ("create", "get", "list", "patch", "delete"),
    (GROUP, RUNTIMES[-1], ""): ("get",),
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
PIPELINES_ROOT = "minio://mlpipeline/v2/artifacts"
"""Pipelines' own default, used if the ConfigMap names none, as in single-user mode."""
NETWORK = "a network policy or a service is missing: docs/reference/cluster.md#network-policies"


def check_names(hosts: list[str]) -> str:
    """Resolve the names of the services that steps use."""
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise UserError(
                f"{host}: {error.strerror or error}",
                "check the policy lathe-dns: names do not resolve, in "
                "docs/how-to/troubleshooting.md#network-and-object-store",
                Code.UNREACHABLE,
            ) from None
    return ", ".join(hosts)


def check_http(address: str) -> str:
    """Check that Pipelines' API is healthy."""
    url = f"{address.rstrip('/')}/apis/v2beta1/healthz"
    try:
        status = urllib3.PoolManager(timeout=SECONDS, retries=False).request("GET", url).status
    except urllib3.exceptions.HTTPError as error:
        raise UserError(f"{url}: no answer: {error}", NETWORK, Code.UNREACHABLE) from None
    if status != 200:
        raise UserError(
            f"{url}: answers {status}", "kubectl -n kubeflow get pods", Code.SERVER_ERROR
        )
    return address


def check_port(address: str) -> str:
    """Connect to `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), SECONDS).close()
    except OSError as error:
        raise UserError(f"{address}: no answer: {error}", NETWORK, Code.UNREACHABLE) from None
    return address


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
    stage = "pretrain"  # for its entry in Launch.steps
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


def check_signing() -> str:
    """Read the key that steps sign with, if there is one."""
    key = signing_key()
    if key is None:
        return "no Secret lathe-signing: attestations are not signed"
    return f"the public key's id is {load_signer(key).public_key.keyid}"


def check_gpus(wanted: int) -> str:
    """Count the GPUs that torch sees."""
    gpus = visible_gpus()
    if gpus < wanted:
        raise UserError(
            f"torch finds {gpus} of {wanted} GPUs",
            "use CUDA images (make images FLAVOUR=cuda, make push), and run `nvidia-smi` on the "
            "node",
            Code.NO_GPU,
        )
    return f"torch finds {gpus}"


def check_store(root: str) -> Iterator[Finding]:
    """Try every kind of request that Lathe sends to the object store, up to the first failure."""
    for name, operation in StoreProbe(root).operations().items():
        # One at a time: each relies on what the one before has written.
        (finding,) = run_checks([Check(f"object store: {name}", operation)])
        if name == "conditional put" and finding.state == "ok" and finding.said:
            hint = "publish one release at a time, or use a store with conditional puts"
            finding = Finding(finding.check, "warning", finding.said, hint)
        yield finding
        if finding.state == "broken":
            return


def checks(
    root: str, pipelines: str, metadata: str, settings: LaunchSettings, gpus: int
) -> list[Check]:
    """What a step needs, in order of dependency.

    Args:
        metadata: host:port of Pipelines' metadata store; empty if it has none.
    """
    store = urlsplit(os.environ.get("AWS_ENDPOINT_URL") or "https://s3.amazonaws.com").hostname
    hosts = [store or "", urlsplit(pipelines).hostname or ""]
    hosts += [metadata.rpartition(":")[0]] if metadata else []
    cluster = functools.cache(lambda: replace(connect(), patience=PATIENCE_SECONDS))
    api = "Kubernetes API"
    # One node trains in the step's own pod, and needs neither Trainer nor JobSet.
    severity: State = "broken" if settings.nodes > 1 else "warning"
    return [
        Check("names", lambda: check_names(list(dict.fromkeys(hosts)))),
        Check("Pipelines' API", lambda: check_http(pipelines)),
        *([Check("Pipelines' metadata store", lambda: check_port(metadata))] if metadata else []),
        Check(api, lambda: check_rights(cluster()), NETWORK),
        Check("Trainer", lambda: check_trainer(cluster(), settings), INSTALL, severity, api),
        Check("JobSet", lambda: check_jobset(cluster()), INSTALL, severity, api),
        Check("object store", lambda: check_store(root or pipeline_root(cluster())), NETWORK),
        Check("signing key", check_signing),
        *([Check("GPUs", lambda: check_gpus(gpus))] if gpus else []),
    ]


def main(
    pipelines: Annotated[str, typer.Option(help="Address of Pipelines' API.")],
    metadata: Annotated[str, typer.Option(help="host:port of the metadata store, if any.")] = "",
    root: Annotated[str, typer.Option(help="Pipeline root. Default: the namespace's.")] = "",
    gpus: Annotated[int, typer.Option(help="Number of GPUs that torch should find.")] = 0,
    launch: Annotated[str, typer.Option(help="The recipe's Launch group, as JSON.")] = "{}",
) -> None:
    """Check what the steps of a pipeline need, and print what was found."""
    settings = LaunchSettings.model_validate_json(launch)
    os.environ[PATIENCE] = "0"  # a store that is away now is what it has to tell
    for finding in run_checks(checks(root, pipelines, metadata, settings, gpus)):
        print(finding.line(), flush=True)


if __name__ == "__main__":
    typer.run(main)
