"""Connects to the Kubeflow Pipelines server configured in the environment."""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import kfp
import kfp_server_api
import urllib3
from kfp.client import ServiceAccountTokenVolumeCredentials

from lathe_base.errors import StageError, UserError
from lathe_base.storage.network import authorities, proxy_for
from lathe_launch.cluster.kubeconfig import load_kubeconfig
from pipelines.cluster.kube_context import open_cluster

VARIABLES = {
    "LATHE_KFP_ENDPOINT": "address of the UI or the API server (also: KFP_ENDPOINT); default: the "
    "kube context's cluster",
    "LATHE_KFP_TOKEN_FILE": "file with a bearer token, read again for every request; default in a "
    "pod: the projected service-account token",
    "LATHE_KFP_COOKIES": "cookies of a browser session, authservice_session=...",
    "LATHE_KFP_CA": "file with the server's certificate authority",
    "LATHE_KFP_NAMESPACE": "namespace of the steps; required in multi-user mode; default in "
    "single-user mode: kubeflow",
    "LATHE_KFP_CONTEXT": "kube context to use instead of the current one",
    "LATHE_KFP_UI": "address of the UI for printed links, if different",
}
HELP = "\n\n".join(["Environment:", *(f"{key}: {text}." for key, text in VARIABLES.items())])
"""Environment variables, for `--help`."""

KUBEFLOW = "kubeflow"
LOCAL_UI = "http://localhost:8080"
TO_UI = "kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80"
CONNECT_SECONDS = 5.0
POD_TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")
IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
SIGN_IN = "check LATHE_KFP_TOKEN_FILE or LATHE_KFP_COOKIES: `--help` lists the ways to sign in"


class TokenFile(ServiceAccountTokenVolumeCredentials):
    """A bearer token in a file. While it is empty, as while a command writes it, requests fail like
    those to a server that does not answer."""

    def _get_token(self) -> str:
        if token := super()._get_token():
            return str(token)
        raise urllib3.exceptions.HTTPError(f"{self._token_path} is empty")


class Client(kfp.Client):
    """KFP's client with access to every service (`client.runs`, ...), authenticated.

    Attributes:
        namespace: of the user, for requests; None for a server in single-user mode.
            steps_namespace: namespace of the steps' pods.
    """

    namespace: str | None = None
    steps_namespace: str = KUBEFLOW

    def _load_config(self, *arguments: Any) -> Any:
        """KFP's connection settings, plus what it does not support: proxies and certificate
        authorities from the environment and the kubeconfig file."""
        settings = super()._load_config(*arguments)
        if not endpoint() and not IN_CLUSTER.is_file():
            load_kubeconfig(settings, os.environ.get("LATHE_KFP_CONTEXT"))
            settings.host += "/" + self._KUBE_PROXY_PATH.format(KUBEFLOW)
            return settings
        trusted = authorities() or os.environ.get("SSL_CERT_FILE")
        settings.ssl_ca_cert = settings.ssl_ca_cert or trusted
        if proxy := proxy_for(settings.host):
            settings.proxy, settings.proxy_headers = proxy
        return settings

    def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
        """Check health once: the original takes 25 s to notice a wrong token."""
        return self.healthzs.healthz_service_get_healthz(_request_timeout=CONNECT_SECONDS)

    def page(self, path: str) -> str:
        """Address of a page of the UI, such as `runs/details/<id>`."""
        address = os.environ.get("LATHE_KFP_UI") or (endpoint() if self.has_pages() else LOCAL_UI)
        return f"{address.rstrip('/')}/#/{path}"

    @cache  # noqa: B019 (one client a process)
    def has_pages(self) -> bool:
        """Whether the endpoint is the UI's. The API server has no pages, and through the kube
        context no address is usable in a browser."""
        if not endpoint():
            return False
        with suppress(kfp_server_api.ApiException, urllib3.exceptions.HTTPError):
            answer = self.runs.api_client.call_api(
                "/", "GET", auth_settings=["Bearer"], _preload_content=False,
                _return_http_data_only=True, _request_timeout=CONNECT_SECONDS,
            )  # fmt: skip
            return "html" in str(answer.headers.get("Content-Type", ""))
        return False


def run_state(run: Any) -> str:
    """The run's state; CANCELED for a terminated run, which Pipelines calls FAILED."""
    was_told = any(s.state == "CANCELING" for s in run.state_history or [])
    return "CANCELED" if run.state == "FAILED" and was_told else run.state or ""


def endpoint() -> str:
    """The server's address as given by the user; empty if it is found through the kube context."""
    address = os.environ.get("LATHE_KFP_ENDPOINT") or os.environ.get("KFP_ENDPOINT") or ""
    return address if "://" in address or not address else f"https://{address}"


def connect() -> Client:
    """A client of the configured server, which has answered a request.

    Raises:
        UserError: no address, a missing file, no answer, no namespace for a server in multi-user
            mode, or rejected credentials.
    """
    variable = os.environ.get
    token, authority = variable("LATHE_KFP_TOKEN_FILE"), variable("LATHE_KFP_CA")
    for key, path in (("LATHE_KFP_TOKEN_FILE", token), ("LATHE_KFP_CA", authority)):
        if path and not Path(path).is_file():
            raise UserError(f"{key}={path}: no such file", "check the path")
        if path and not Path(path).stat().st_size:  # of a redirected command that failed
            raise UserError(
                f"{key}={path}: the file is empty",
                "create it again: docs/how-to/cluster-runs.md#sign-in",
            )
    if not endpoint() and not has_kube_context():
        raise UserError(
            "no Kubeflow Pipelines: LATHE_KFP_ENDPOINT is not set, and there is no kube context",
            "set LATHE_KFP_ENDPOINT to the address of the UI, or KUBECONFIG",
        )
    if not endpoint() and not IN_CLUSTER.is_file():
        open_cluster(KUBEFLOW)  # says what is wrong with the kube context; KFP's client does not
    if not token and POD_TOKEN.is_file():
        token = str(POD_TOKEN)
    with answers():
        warnings.filterwarnings("ignore", category=FutureWarning, module="kfp")
        # It logs every retry. The clients of KFP and Kubernetes reset the level of its parent.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        client = Client(
            host=endpoint() or None,
            credentials=TokenFile(token) if token else None,
            cookies=variable("LATHE_KFP_COOKIES"),
            ssl_ca_cert=authority,
            kube_context=variable("LATHE_KFP_CONTEXT"),
            namespace=KUBEFLOW,
        )
        _choose_namespace(client, client.get_kfp_healthz().multi_user)
        # The health check needs no authentication; this does.
        client.experiments.experiment_service_list_experiments(
            page_size=1, namespace=client.namespace
        )
    return client


def is_configured() -> bool:
    """Whether a server is configured."""
    return bool(endpoint()) or has_kube_context()


def _choose_namespace(client: Client, is_multi_user: bool | None) -> None:
    namespace = os.environ.get("LATHE_KFP_NAMESPACE")
    if is_multi_user is None:
        raise UserError(
            f"{_asked()}: answers, but not as Kubeflow Pipelines: perhaps with a login page",
            SIGN_IN,
        )
    if is_multi_user and not namespace:
        raise UserError(
            f"{_asked()} is in multi-user mode, but LATHE_KFP_NAMESPACE is not set",
            "set LATHE_KFP_NAMESPACE to the namespace that manifests/ was applied to, such as "
            "lathe",
        )
    client.namespace = namespace if is_multi_user else None
    client.steps_namespace = namespace or KUBEFLOW


def has_kube_context() -> bool:
    """Whether this is a pod, or a kubeconfig exists."""
    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    return IN_CLUSTER.is_file() or any(Path(f).is_file() for f in files.split(os.pathsep) if f)


@contextmanager
def answers() -> Iterator[None]:
    """Turn exceptions of requests within the block into one clear error.

    Raises:
        UserError: rejected credentials, or no answer.
        StageError: the server's own error.
    """
    try:
        yield
    except kfp_server_api.ApiException as error:
        if error.status in (401, 403):
            raise UserError(
                f"{_asked()}: the server rejects these credentials ({error.status})", SIGN_IN
            ) from None
        raise StageError(f"{_asked()}: {error.status} {_message(error)}") from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        if "CERTIFICATE_VERIFY_FAILED" in str(reason):
            raise UserError(
                f"{_asked()}: its certificate is not signed by a trusted authority",
                "set LATHE_KFP_CA to the certificate file of the authority that signed it",
            ) from None
        raise UserError(
            f"{_asked()}: no answer: {reason}",
            "check LATHE_KFP_ENDPOINT or LATHE_KFP_CONTEXT, and the network (for a port-forward: "
            "kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80)",
        ) from None


def _asked() -> str:
    return endpoint() or "Kubeflow Pipelines through the kube context"


def _message(error: kfp_server_api.ApiException) -> str:
    try:
        body = json.loads(error.body)
    except (TypeError, ValueError):
        return str(error.reason)
    return str(body.get("message") or body.get("error") or error.reason)
