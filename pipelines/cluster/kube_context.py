"""The Kubernetes API, accessed with the user's kube context."""

import os
from typing import Any

import urllib3
from kubernetes import client as kubernetes  # type: ignore[import-untyped]
from kubernetes import config

from lathe_base.errors import Code, StageError
from lathe_launch.cluster.api import Cluster, load_kubeconfig

PATIENCE_SECONDS = 30.0
TIMEOUT = (10, 10)
"""Seconds to connect, and between two bytes of an answer."""
ROLE = "lathe-submit"


def open_cluster(namespace: str) -> Cluster:
    """The cluster of LATHE_KFP_CONTEXT, or of the current kube context.

    Raises:
        StageError: there is no kube context.
    """
    settings = kubernetes.Configuration()
    settings.retries = False  # our own retries log it
    try:
        load_kubeconfig(settings, os.environ.get("LATHE_KFP_CONTEXT"))
    except config.ConfigException as error:
        raise StageError(f"no kube context: {error}", Code.UNAUTHORIZED) from None
    return Cluster(kubernetes.ApiClient(settings), namespace, ROLE, patience=PATIENCE_SECONDS)


def config_map(cluster: Cluster, name: str) -> dict[str, str]:
    """The data of a ConfigMap; empty if it does not exist or cannot be read."""
    core: Any = kubernetes.CoreV1Api(cluster.api)
    try:
        config = core.read_namespaced_config_map(name, cluster.namespace, _request_timeout=TIMEOUT)
    except (kubernetes.ApiException, urllib3.exceptions.HTTPError):
        return {}
    return dict(config.data or {})
