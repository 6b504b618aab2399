"""The parts of the Kubernetes API that Lathe uses, and the user's kubeconfig, with the official
client.

Requests are retried for a while if the API server does not answer; a forbidden request raises a
`UserError` that names the verb, the resource, the account and the Role that would allow it.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import yaml
from kubernetes import client, config  # type: ignore[import-untyped]
from kubernetes.client import ApiException  # type: ignore[import-untyped]
from kubernetes.config.kube_config import (  # type: ignore[import-untyped]
    KubeConfigLoader,
    KubeConfigMerger,
)
from kubernetes.watch import Watch  # type: ignore[import-untyped]
from tenacity import RetryCallState, Retrying, stop_after_delay, wait_exponential_jitter
from urllib3.exceptions import HTTPError

from lathe_base.errors import Code, StageError, UserError, printable
from lathe_base.storage.network import as_proxy, authorities, proxy_for

log = logging.getLogger("lathe")

GROUP, VERSION = "trainer.kubeflow.org", "v1alpha1"
TRAINJOBS = (GROUP, VERSION, "trainjobs")
RUNTIMES = (GROUP, VERSION, "trainingruntimes")
JOBSETS = ("jobset.x-k8s.io", "v1alpha2", "jobsets")
WORKFLOWS = ("argoproj.io", "v1alpha1", "workflows")
LABELS = {"app.kubernetes.io/name": "lathe", "app.kubernetes.io/part-of": "lathe"}
REPLICATED_JOB = CONTAINER = "node"  # Trainer's names of where its torch policy applies
FAILURES, DEADLINE = "lathe/failures", "lathe/deadline"  # annotations of our TrainJobs
WORK = "lathe/work"  # label of our TrainJobs and their pods, the same for all attempts of a step
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_NAMESPACE = "lathe"
TRANSIENT = (0, 408, 429, 500, 502, 503, 504)
TIMEOUT = (10, 60)
"""Seconds to connect, and between two bytes of an answer; not more than a `Cluster`'s patience.
The generated client ignores floats that are not in a pair."""
REJECTED_SECONDS = 90.0
"""Seconds to retry a rejected token that was accepted before: the client reads a pod's renewed
token from its file once a minute."""
REJECTED_ATTEMPTS = 4
"""Number of attempts with a token that was never accepted."""

TrainJob = dict[str, Any]
Kind = tuple[str, str, str]
"""Group, version and plural of a kind of objects that Kubernetes itself does not have."""


@dataclass(frozen=True)
class Cluster:
    """One namespace of the cluster.

    Attributes:
        role: name in manifests/ of the Role that grants what this program does.
        patience: seconds for which unanswered requests are retried.
        was_accepted: set once the API server has accepted the token.
    """

    api: Any
    namespace: str
    role: str = "lathe-pipeline"
    patience: float = 600.0
    was_accepted: Event = field(default_factory=Event, repr=False, compare=False)

    def create(self, job: TrainJob) -> bool:
        """Create a TrainJob; returns False if one with this name exists."""
        creating = client.CustomObjectsApi(self.api).create_namespaced_custom_object
        return self.ask(creating, *self._place(TRAINJOBS), body=job, unless=409) is not None

    def get(self, kind: Kind, name: str) -> Any:
        """The namespace's object of this kind and name, or None. The JobSet that Trainer creates
        for a TrainJob has its name."""
        getting = client.CustomObjectsApi(self.api).get_namespaced_custom_object
        return self.ask(getting, *self._place(kind), name, unless=404)

    def matching(self, kind: Kind, labels: str) -> list[Any]:
        """The namespace's objects of this kind that match a label selector."""
        listing = client.CustomObjectsApi(self.api).list_namespaced_custom_object
        return list(self.ask(listing, *self._place(kind), label_selector=labels)["items"])

    def trainjobs(self, **more: str) -> list[TrainJob]:
        """The TrainJobs that Lathe created, with these labels too."""
        labels = (LABELS | more).items()
        return self.matching(TRAINJOBS, ",".join(f"{name}={value}" for name, value in labels))

    def set_owners(self, job: TrainJob, owners: list[dict[str, str]]) -> bool:
        """Replace a TrainJob's owners; returns False if it no longer exists."""
        patch = {"metadata": {"ownerReferences": owners}}
        patching = client.CustomObjectsApi(self.api).patch_namespaced_custom_object
        arguments = *self._place(TRAINJOBS), job["metadata"]["name"]
        return self.ask(patching, *arguments, body=patch, unless=404) is not None

    def delete(self, name: str) -> None:
        """Delete a TrainJob; garbage collection then terminates its JobSet and pods.

        Foreground deletion does not work: Trainer 2.3 keeps reconciling a TrainJob that waits for
        its dependents, and creates the JobSet again.
        """
        deleting = client.CustomObjectsApi(self.api).delete_namespaced_custom_object
        arguments = *self._place(TRAINJOBS), name
        self.ask(deleting, *arguments, propagation_policy="Background", unless=404)

    def runtime(self, name: str) -> Any:
        """The namespace's TrainingRuntime of this name, or None."""
        return self.get(RUNTIMES, name)

    def _place(self, kind: Kind) -> tuple[str, str, str, str]:
        group, version, plural = kind
        return group, version, self.namespace, plural

    def pod(self, name: str) -> Any:
        """A V1Pod, or None."""
        return self.ask(
            client.CoreV1Api(self.api).read_namespaced_pod, name, self.namespace, unless=404
        )

    def pods(self, labels: str | None = None) -> list[Any]:
        """The V1Pods that match a label selector."""
        listing = client.CoreV1Api(self.api).list_namespaced_pod
        return list(self.ask(listing, self.namespace, label_selector=labels).items)

    def warnings(self, prefix: str) -> list[str]:
        """Messages of the warning events about objects whose names have this prefix, newest last;
        empty without permission to list events."""
        events = self._events("type=Warning")
        mine = [event for event in events if event.involved_object.name.startswith(prefix)]
        return [f"{event.reason}: {event.message}" for event in mine]

    def last_event(self, kind: str, name: str) -> Any:
        """The newest event about an object, or None; also without permission to list events."""
        events = self._events(f"involvedObject.kind={kind},involvedObject.name={name}")
        return events[-1] if events else None

    def _events(self, fields: str) -> list[Any]:
        """The events that match a field selector, newest last."""
        listing = client.CoreV1Api(self.api).list_namespaced_event
        try:  # not with `ask`: events only explain, and are not worth waiting for
            answer = listing(self.namespace, field_selector=fields, _request_timeout=TIMEOUT)
        except (ApiException, HTTPError):
            return []
        return sorted(
            answer.items,
            key=lambda event: str(event.last_timestamp or event.metadata.creation_timestamp),
        )

    def watch_pods(self, labels: str, since: str | None, seconds: int) -> Iterator[dict[str, Any]]:
        """Yield events of `kubernetes.watch` for this many seconds; its exceptions pass through.

        Starts after the resource version `since`; if None, with the pods that exist.
        """
        yield from Watch().stream(
            client.CoreV1Api(self.api).list_namespaced_pod,
            self.namespace,
            label_selector=labels,
            resource_version=since,
            timeout_seconds=seconds,
            _request_timeout=(TIMEOUT[0], seconds + TIMEOUT[1]),
        )

    def pod_log(self, pod: str, container: str, follow: bool, since: str | None) -> Any:
        """A container's log with timestamps from `since` (RFC 3339) on, as a urllib3 response.

        The client's own method lacks `sinceTime`; exceptions pass through.
        """
        query = [("container", container), ("timestamps", "true"), ("follow", str(follow).lower())]
        return self.api.call_api(
            f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log",
            "GET",
            query_params=query + ([("sinceTime", since)] if since else []),
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=(TIMEOUT[0], 300),
        )

    def ask(
        self, call: Callable[..., Any], *arguments: Any, unless: int = 0, **options: Any
    ) -> Any:
        """Send a request with retries; returns None if the response has the status `unless`."""
        asking = Retrying(
            retry=self._again,
            stop=stop_after_delay(self.patience),
            wait=wait_exponential_jitter(multiplier=0.2, max=30),
            before_sleep=_tell,
            reraise=True,
        )
        # A single attempt must not outlast the patience, which is checked between attempts only.
        limits = tuple(min(seconds, self.patience) for seconds in TIMEOUT)
        try:
            answer = asking(call, *arguments, _request_timeout=limits, **options)
            self.was_accepted.set()
            return answer
        except ApiException as error:
            if error.status != 401:  # even a 403 or a 404 is an answer to a known user
                self.was_accepted.set()
            if error.status == unless:
                return None
            self.explain(error)
        except ValueError as error:
            if "header value" not in str(error):
                raise
            raise UserError(  # whose own message would contain the token
                "the Kubernetes token has a line break within",
                "write it on one line",
                Code.UNAUTHORIZED,
            ) from None
        except config.ConfigException as error:  # the exec plugin, asked for another token
            raise StageError(f"no kube context: {error}", Code.UNAUTHORIZED) from None
        except (HTTPError, ConnectionError, TimeoutError) as error:
            raise StageError(
                f"the Kubernetes API at {self.api.configuration.host} did not answer for "
                f"{self.patience:.0f} s: {error}",
                Code.UNREACHABLE,
            ) from None

    def _again(self, state: RetryCallState) -> bool:
        """Whether to retry; a token may be rejected for a while until it is renewed."""
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, ApiException) and error.status == 401:
            if self.was_accepted.is_set():
                return (state.seconds_since_start or 0.0) < REJECTED_SECONDS
            return state.attempt_number < REJECTED_ATTEMPTS
        return is_transient(error)

    def explain(self, error: ApiException) -> NoReturn:
        """Raise the user's error for a rejected request."""
        message = said(error)
        denied = re.search(
            r'User "(?P<user>[^"]+)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)"'
            r'(?: in API group "(?P<group>[^"]*)")?',
            message,
        )
        if denied:
            what = denied["resource"] + (f".{denied['group']}" if denied["group"] else "")
            raise UserError(
                f"{denied['user']} cannot {denied['verb']} {what} in namespace {self.namespace}",
                f"bind the Role {self.role} of manifests/base/access to this service account, or "
                f"add the verb {denied['verb']} on {what} to one of its Roles",
                Code.FORBIDDEN,
            ) from None
        if error.status == 401:
            host = self.api.configuration.host
            raise UserError(
                f"the Kubernetes API at {host} rejects this token: {message}",
                "run in a pod with a service account, or renew the KUBECONFIG file's credentials",
                Code.UNAUTHORIZED,
            ) from None
        if error.status in (400, 403, 422):  # a quota, a policy, an admission webhook
            raise UserError(
                f"the cluster rejects the TrainJob: {message}",
                "change the recipe's Launch settings, or the policies of namespace "
                f"{self.namespace}",
                Code.INVALID_REQUEST,
            ) from None
        raise StageError(
            f"the Kubernetes API answered {error.status}: {message}", Code.SERVER_ERROR
        ) from None


def connect(role: str = "lathe-pipeline", namespace: str | None = None) -> Cluster:
    """Connect with KUBECONFIG, else this pod's service account, else ~/.kube/config.

    The namespace is the given one, else POD_NAMESPACE, else the pod's or the context's own.

    Raises:
        UserError: no cluster is configured.
    """
    settings = client.Configuration()
    settings.retries = False  # our own retries wait longer and log it
    current = os.environ.get("POD_NAMESPACE")
    try:
        if os.environ.get("KUBECONFIG") or "KUBERNETES_SERVICE_HOST" not in os.environ:
            of_context = load_kubeconfig(settings)
            current = current or of_context
        else:
            config.load_incluster_config(client_configuration=settings)
            current = current or NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except config.ConfigException as error:
        raise UserError(
            f"no Kubernetes cluster: {error}",
            "run in a pod with a service account, or set KUBECONFIG to a file",
            Code.NOT_FOUND,
        ) from None
    return Cluster(client.ApiClient(settings), namespace or current or DEFAULT_NAMESPACE, role)


class _Loader(KubeConfigLoader):  # type: ignore[misc]
    def _load_from_exec_plugin(self) -> bool | None:
        """The base class logs why the plugin failed, and continues without credentials."""
        said: list[str] = []

        def take(record: logging.LogRecord) -> bool:
            said.append(record.getMessage())
            return False

        root, silent = logging.getLogger(), logging.NullHandler()
        root.addFilter(take)
        root.addHandler(silent)  # or else `logging.error` installs a handler for good
        try:
            loaded: bool | None = super()._load_from_exec_plugin()
        finally:
            root.removeFilter(take)
            root.removeHandler(silent)
        if said:
            command = self._user["exec"].safe_get("command")
            words = printable(" ".join(" ".join(said).split()), 600)
            raise config.ConfigException(f"the credential plugin {command} failed: {words}")
        return loaded


def load_kubeconfig(settings: Any, context: str | None = None) -> str | None:
    """Fill the `Configuration` of a client from KUBECONFIG, else ~/.kube/config, and return the
    context's namespace, if it names one.

    Also does what the official client does not: `proxy-url`, proxies and certificate authorities
    from the environment, and renewed tokens in a `tokenFile`.

    Args:
        context: a context of the file; its current one by default.

    Raises:
        config.ConfigException: there is no such file or context, or it is malformed.
    """
    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        merged = KubeConfigMerger(files)
    except yaml.YAMLError as error:
        raise config.ConfigException(f"{files}: {' '.join(str(error).split())}") from None
    if merged.config is None:
        raise config.ConfigException(f"{files}: no such file")
    loader = _Loader(
        merged.config,
        active_context=context,
        config_base_path=None,  # each file's own folder
        config_persister=merged.save_changes,
    )
    loader.load_and_set(settings)
    if token := settings.api_key.get("authorization", "").strip():
        if not token.isprintable():  # the HTTP client's error would contain the header
            raise config.ConfigException(f"{files}: the user's token contains a line break")
        settings.api_key["authorization"] = token
    settings.ssl_ca_cert = settings.ssl_ca_cert or authorities()
    named = loader._cluster.safe_get("proxy-url")
    if proxy := as_proxy(named) if named else proxy_for(settings.host):
        if not proxy.address.startswith(("http://", "https://")):
            raise config.ConfigException(
                f"proxy {proxy.address}: only http:// and https:// are supported"
            )
        settings.proxy, settings.proxy_headers = proxy
    if loader._user and (name := loader._user.safe_get("tokenFile")):
        file = Path(loader._user.path).absolute().parent / name

        def renew(client: Any) -> None:
            with suppress(OSError):  # while the file is replaced, the token before is good
                token = file.read_text(encoding="utf-8").strip()
                if token and token.isprintable():
                    client.api_key["authorization"] = f"Bearer {token}"

        # Called before every request: the token is read again each time, as kubectl does.
        settings.refresh_api_key_hook = renew
    namespace: str | None = loader.current_context["context"].get("namespace")
    return namespace


def is_transient(error: BaseException | None) -> bool:
    """Whether the request may succeed if it is retried."""
    if isinstance(error, ApiException):
        return error.status in TRANSIENT
    return isinstance(error, HTTPError | ConnectionError | TimeoutError)


def said(error: ApiException) -> str:
    """The message in the API's response."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)


def _tell(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    if state.attempt_number == 1:  # once, however long it takes
        if isinstance(error, ApiException) and error.status:
            log.warning("the Kubernetes API answers %d, retrying: %s", error.status, said(error))
        else:
            log.warning("the Kubernetes API does not answer, retrying: %s", error)
