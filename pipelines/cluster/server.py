"""Connects to the Kubeflow Pipelines server configured in the environment, and to the Kubernetes
API with the user's kube context."""

import base64
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import kfp
import kfp_server_api
import urllib3
from kfp.client.token_credentials_base import TokenCredentialsBase
from kubernetes import client as kubernetes  # type: ignore[import-untyped]
from kubernetes.config import ConfigException  # type: ignore[import-untyped]

from lathe_base.errors import Code, StageError, UserError, printable
from lathe_base.storage.network import authorities, proxy_for
from lathe_launch.cluster.api import Cluster, load_kubeconfig

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
TIMEOUT = (5, 30)
"""Seconds to connect, and between two bytes of an answer; the generated client ignores floats."""
SIGN_IN_TIMEOUT = (5, 10)
KUBE_TIMEOUT = (10, 10)
KUBE_PATIENCE_SECONDS = 30.0
KUBE_ROLE = "lathe-submit"
POD_TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")
IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
CREDENTIALS = ("LATHE_KFP_TOKEN_FILE", "LATHE_KFP_COOKIES")
REFUSALS = {
    401: "the server rejects these credentials",
    403: "permission denied",
}
REFUSAL_FIELDS = ("Namespace", "Verb", "Resource")
"""Fields of the request in Pipelines' own message of a 403."""
EQUALS = 1  # the number of a filter's operation
SIGN_IN = "check LATHE_KFP_TOKEN_FILE or LATHE_KFP_COOKIES: `--help` lists the ways to sign in"


class TokenFile(TokenCredentialsBase):
    """The token in a file, read again for every request; the one before while it is rewritten."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def refresh_api_key_hook(self, config: Any) -> None:
        """Called by the generated client before every request."""
        with suppress(OSError):
            if token := self._path.read_text(encoding="utf-8").strip():
                config.api_key["authorization"] = token


class Client(kfp.Client):
    """KFP's client with access to every service (`client.runs`, ...), authenticated.

    Attributes:
        namespace: of the user, for requests; None for a server in single-user mode.
            steps_namespace: namespace of the steps' pods.
    """

    namespace: str | None = None
    steps_namespace: str = KUBEFLOW

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        rest = self.runs.api_client.rest_client
        request = rest.request

        def limited(*arguments: Any, _request_timeout: Any = None, **named: Any) -> Any:
            return request(*arguments, _request_timeout=_request_timeout or TIMEOUT, **named)

        rest.request = limited  # the generated client waits for ever by default

    def _load_config(self, *arguments: Any) -> Any:
        """KFP's connection settings, plus what it does not support: proxies and certificate
        authorities from the environment and the kubeconfig file."""
        settings = super()._load_config(*arguments)
        # A silent server is asked twice, not four times: TIMEOUT is half a minute.
        settings.retries = urllib3.Retry(3, read=1)
        if not endpoint() and not IN_CLUSTER.is_file():
            # Through the Kubernetes API's own proxy to the service, as KFP does.
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
        return self.healthzs.healthz_service_get_healthz(_request_timeout=SIGN_IN_TIMEOUT)

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
                _return_http_data_only=True, _request_timeout=SIGN_IN_TIMEOUT,
            )  # fmt: skip
            return "html" in str(answer.headers.get("Content-Type", ""))
        return False


def token_expiry() -> datetime | None:
    """When the token of LATHE_KFP_TOKEN_FILE expires; None without one, or if it does not say."""
    if not (path := os.environ.get("LATHE_KFP_TOKEN_FILE")):
        return None
    try:
        _, payload, _ = Path(path).read_text(encoding="utf-8").strip().split(".")
        # Base64 in tokens has no padding, which Python requires.
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return datetime.fromtimestamp(claims["exp"], UTC)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None  # not a JSON Web Token; the server says whether it is valid


def pages(request: Callable[..., Any], field: str, **options: Any) -> Iterator[Any]:
    """All objects of one of the API's listings.

    Raises:
        StageError: a page that names one before it as the next.
    """
    token, seen = "", {""}
    while True:
        page = request(page_token=token, **options)
        yield from getattr(page, field) or []
        token = page.next_page_token
        if not token:
            return
        if token in seen:
            raise StageError(
                f"Pipelines lists {field} without an end: a page is the next of itself or of a "
                "later one",
                Code.SERVER_ERROR,
            )
        seen.add(token)


def find(listing: Callable[..., Any], field: str, name: str, **options: Any) -> list[Any]:
    """All objects with a display name from a listing request of the API."""
    predicate = {"operation": EQUALS, "key": "display_name", "stringValue": name}
    return list(pages(listing, field, filter=json.dumps({"predicates": [predicate]}), **options))


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
            raise UserError(f"{key}={path}: no such file", "check the path", Code.NOT_FOUND)
        if path and not Path(path).stat().st_size:  # of a redirected command that failed
            raise UserError(
                f"{key}={path}: the file is empty",
                "create it again: docs/how-to/cluster-runs.md#sign-in",
                Code.UNAUTHORIZED,
            )
    if not endpoint() and not has_kube_context():
        raise UserError(
            "no Kubeflow Pipelines: LATHE_KFP_ENDPOINT is not set, and there is no kube context",
            "set LATHE_KFP_ENDPOINT to the address of the UI, or KUBECONFIG",
            Code.MISSING_OPTION,
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
            credentials=TokenFile(Path(token)) if token else None,
            cookies=variable("LATHE_KFP_COOKIES"),
            ssl_ca_cert=authority,
            kube_context=variable("LATHE_KFP_CONTEXT"),
            namespace=KUBEFLOW,
        )
        _choose_namespace(client, client.get_kfp_healthz().multi_user)
        # The health check needs no authentication; this does, so that a wrong token is told here.
        client.experiments.experiment_service_list_experiments(
            page_size=1, namespace=client.namespace
        )
    return client


def is_configured() -> bool:
    """Whether a server is configured."""
    return bool(endpoint()) or has_kube_context()


def _choose_namespace(client: Client, is_multi_user: bool | None) -> None:
    namespace = os.environ.get("LATHE_KFP_NAMESPACE")
    if is_multi_user is None:  # the client has made an empty answer of some other page
        raise UserError(
            f"{_asked()}: answers, but not as Kubeflow Pipelines: perhaps with a login page",
            SIGN_IN,
            Code.SERVER_ERROR,
        )
    if is_multi_user and not namespace:
        raise UserError(
            f"{_asked()} is in multi-user mode, but LATHE_KFP_NAMESPACE is not set",
            "set LATHE_KFP_NAMESPACE to the namespace that manifests/ was applied to, such as "
            "lathe",
            Code.MISSING_OPTION,
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
        if error.status in (401, 403):  # not signed in, or not allowed
            what = f"{_asked()}: {REFUSALS[error.status]} ({error.status}): {_message(error)}"
            raise UserError(
                what, _cure(error), Code.UNAUTHORIZED if error.status == 401 else Code.FORBIDDEN
            ) from None
        raise StageError(
            f"{_asked()}: {error.status} {_message(error)}", Code.SERVER_ERROR
        ) from None
    except ValueError as error:  # http.client refuses a header with a line break
        if "header value" not in str(error):
            raise
        names = [name for name in CREDENTIALS if os.environ.get(name)] or ["the kube context"]
        raise UserError(  # whose own message would contain the secret
            f"{' or '.join(names)}: has a line break within",
            "write the token on one line",
            Code.UNAUTHORIZED,
        ) from None
    except ConfigException as error:  # the kubeconfig's exec plugin, asked for another token
        raise StageError(f"no kube context: {error}", Code.UNAUTHORIZED) from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        if "CERTIFICATE_VERIFY_FAILED" in str(reason):
            raise UserError(
                f"{_asked()}: its certificate is not signed by a trusted authority",
                "set LATHE_KFP_CA to the certificate file of the authority that signed it",
                Code.UNTRUSTED,
            ) from None
        raise UserError(
            f"{_asked()}: no answer: {reason}",
            "check LATHE_KFP_ENDPOINT or LATHE_KFP_CONTEXT, and the network (for a port-forward: "
            "kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80)",
            Code.UNREACHABLE,
        ) from None


def _asked() -> str:
    return endpoint() or "Kubeflow Pipelines through the kube context"


def _cure(error: kfp_server_api.ApiException) -> str:
    """What helps against a 401 or 403: it depends on who answers, and to whom."""
    message = _message(error)
    # Not signed in: where from depends on how the server is reached.
    if error.status == 401:
        if endpoint():
            return SIGN_IN
        return "renew the kube context's credentials: `kubectl auth whoami` must work"
    # The Kubernetes API refused, before Pipelines was reached.
    if "services/proxy" in message or "services " in message:
        return (
            f"let this user get and create services/proxy in namespace {KUBEFLOW}, or set "
            "LATHE_KFP_ENDPOINT"
        )
    if "RBAC: access denied" in message:  # Istio's whole answer
        return (
            "the service mesh admits signed-in users only: set LATHE_KFP_ENDPOINT to the gateway, "
            "and LATHE_KFP_TOKEN_FILE or LATHE_KFP_COOKIES"
        )
    # Pipelines' own answer names what this user may not do.
    names = {
        key: (re.search(rf"\b{key}:([\w.-]+)", message) or [""] * 2)[1] for key in REFUSAL_FIELDS
    }
    namespace = names["Namespace"] or os.environ.get("LATHE_KFP_NAMESPACE") or KUBEFLOW
    what = f"{names['Verb'] or 'use'} {names['Resource'] or 'Pipelines'}"
    return (
        f"sign in as a user who may {what} in namespace {namespace}, or bind the Role lathe-submit "
        "of manifests/base/access to this one"
    )


def _message(error: kfp_server_api.ApiException) -> str:
    """The server's own sentence."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body
    try:
        answer = json.loads(body)
        text = answer.get("message") or answer.get("error")
    except (TypeError, ValueError, AttributeError):  # not JSON: of a proxy, perhaps a page
        text = "" if "<" in (body or "") else body
    return printable(" ".join(str(text or error.reason).split()), 600)


def open_cluster(namespace: str) -> Cluster:
    """The cluster of LATHE_KFP_CONTEXT, or of the current kube context.

    Raises:
        StageError: there is no kube context.
    """
    settings = kubernetes.Configuration()
    settings.retries = False  # our own retries log it
    try:
        load_kubeconfig(settings, os.environ.get("LATHE_KFP_CONTEXT"))
    except ConfigException as error:
        raise StageError(f"no kube context: {error}", Code.UNAUTHORIZED) from None
    return Cluster(
        kubernetes.ApiClient(settings), namespace, KUBE_ROLE, patience=KUBE_PATIENCE_SECONDS
    )


def config_map(cluster: Cluster, name: str) -> dict[str, str]:
    """The data of a ConfigMap; empty if it does not exist or cannot be read."""
    core: Any = kubernetes.CoreV1Api(cluster.api)
    try:
        config = core.read_namespaced_config_map(
            name, cluster.namespace, _request_timeout=KUBE_TIMEOUT
        )
    except (kubernetes.ApiException, urllib3.exceptions.HTTPError):
        return {}
    return dict(config.data or {})
