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
from typing import Annotated
from urllib.parse import urlsplit

import typer
import urllib3

from lathe_base.checks import Check, Finding, State, run_checks
from lathe_base.config.settings import LaunchSettings
from lathe_base.errors import Code, UserError
from lathe_base.provenance.keys import load_signer, signing_key
from lathe_base.storage.network import PATIENCE
from lathe_base.storage.probe import StoreProbe
from lathe_launch.cluster.access import (
    INSTALL,
    check_jobset,
    check_rights,
    check_trainer,
    pipeline_root,
)
from lathe_launch.cluster.api import connect
from lathe_launch.shape import visible_gpus

SECONDS = 10.0
PATIENCE_SECONDS = 20.0
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
    # One node trains in the step's own pod.
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
