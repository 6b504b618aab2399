"""The Kubernetes API, as the user's kube context reaches it."""

import os
from typing import Any

import urllib3
import yaml
from kubernetes import client as kubernetes  # type: ignore[import-untyped]
from kubernetes import config

from lathe.errors import StageError
from lathe.launch.cluster.api import Cluster

PATIENCE_SECONDS = 30.0
ROLE = "lathe-submit"


def open_cluster(namespace: str) -> Cluster:
    """The cluster of LATHE_KFP_CONTEXT, or of the current kube context.

    Raises:
        StageError: there is no kube context.
    """
    try:
        api = config.new_client_from_config(context=os.environ.get("LATHE_KFP_CONTEXT"))
    except (config.ConfigException, yaml.YAMLError) as error:
        raise StageError(f"no kube context: {' '.join(str(error).split())}") from None
    return Cluster(api, namespace, ROLE, patience=PATIENCE_SECONDS)


def config_map(cluster: Cluster, name: str) -> dict[str, str]:
    """The data of a ConfigMap; empty where it does not exist, or may not be read."""
    core: Any = kubernetes.CoreV1Api(cluster.api)
    try:
        found = core.read_namespaced_config_map(name, cluster.namespace, _request_timeout=10)
    except (kubernetes.ApiException, urllib3.exceptions.HTTPError):
        return {}
    return dict(found.data or {})
