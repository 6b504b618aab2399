"""A fake Kubernetes API server on 127.0.0.1, used by tests through the real client.

Supports create, get, list, patch, replace, delete and watch of any resource (see `fake_store`), pod
logs with `follow`, `sinceTime` and `timestamps`, bearer tokens (401), verbs that RBAC denies (403)
and fault injection. Controllers that act on the objects, such as the one of Deployments, subclass
`Controller`.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.support.fake_store import Event, Key, Object, Refused, Store, selected, validate
from tests.support.loopback import LoopbackServer, QuietHandler

TOKEN = "token-of-the-test"
USER = "system:serviceaccount:lathe:lathe-pipeline"
SECOND = 0.2
"""Seconds that a watch of `timeoutSeconds=1` takes, so that tests need not wait for its end."""
PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/v\w+(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>status|scale|log))?"
)
VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


class FakeKubernetes(Store):
    """Context manager that serves at `url`; tests and controllers call its methods directly.

    Attributes:
        denied: pairs of verb and plural that RBAC forbids, such as ("create", "trainjobs").
        faults: functions called with the method and path of every request; each returns the HTTP
            status to fail the request with, or None.
        log_cuts: for each of the next followed log streams, the number of lines after which the
            connection drops in the middle of a line.
        accounts: service accounts that may do what steps do, and the pairs of verb and plural that
            each may not; those that exist are objects of their own.
        absent: API groups that are not installed.
        admissions: functions called with the resource and body of every object to create; each may
            raise Refused.
        requests: method and path, including the query, of every request.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[tuple[str, str], list[tuple[datetime, str]]] = {}
        self.denied: set[tuple[str, str]] = set()
        self.faults: list[Callable[[str, str], int | None]] = []
        self.log_cuts: list[int] = []
        self.absent: set[str] = set()
        self.accounts: dict[str, set[tuple[str, str]]] = {"default-editor": set()}
        self.admissions: list[Callable[[str, Object], None]] = []
        self.requests: list[tuple[str, str]] = []

    def admit(self, resource: str, body: Object, namespace: str, dry_run: bool) -> Object:
        """Create an object if all admission functions accept it; with `dry_run`, only check."""
        for admission in self.admissions:
            admission(resource, body)
        if not dry_run:
            return self.create(resource, body, namespace)
        validate(Key(resource, namespace, body["metadata"]["name"]), body)
        return body

    def review(self, body: Object) -> Object:
        """Answer a SelfSubjectAccessReview according to `denied`."""
        access = body["spec"]["resourceAttributes"]
        part = f"/{access['subresource']}" if access.get("subresource") else ""
        allowed = (access["verb"], access["resource"] + part) not in self.denied
        return {**body, "metadata": {}, "status": {"allowed": allowed}}

    def __enter__(self) -> "FakeKubernetes":
        handler = type("Handler", (_Handler,), {"fake": self})
        self._http = LoopbackServer(handler).__enter__()
        self.url = self._http.url
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._http.__exit__()

    def kubeconfig(self, folder: Path, namespace: str = "lathe") -> Path:
        """Write a kubeconfig for this server, to be set as `KUBECONFIG`."""
        context = {"cluster": "fake", "user": "fake", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": TOKEN}}],
            "contexts": [{"name": "fake", "context": context}],
        }
        path = folder / "kubeconfig.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def log(self, pod: str, line: str, namespace: str = "lathe") -> None:
        with self.changed:
            self.logs.setdefault((namespace, pod), []).append((datetime.now(UTC), line))
            self.changed.notify_all()

    def read_log(self, namespace: str, pod: str, query: dict[str, str]) -> Iterator[bytes]:
        """Yield a pod's log; a followed stream ends with its container, or at one of `log_cuts`."""
        if self._phase(namespace, pod) == "Pending":
            raise Refused(400, "BadRequest", f'container "node" in pod "{pod}" is waiting to start')
        since = datetime.min.replace(tzinfo=UTC)
        if "sinceTime" in query:
            since = datetime.fromisoformat(query["sinceTime"])
        elif "sinceSeconds" in query:
            since = datetime.now(UTC) - timedelta(seconds=int(query["sinceSeconds"]))
        follow = query.get("follow") in ("true", "True")
        cut = self.log_cuts.pop(0) if follow and self.log_cuts else -1
        return self._log_lines(namespace, pod, since, follow, cut, "timestamps" in query)

    def _log_lines(
        self, namespace: str, pod: str, since: datetime, follow: bool, cut: int, stamped: bool
    ) -> Iterator[bytes]:
        lines = self.logs.setdefault((namespace, pod), [])
        position = 0
        while True:
            with self.changed:
                while position == len(lines):
                    if not follow or self.stopped or self._phase(namespace, pod) != "Running":
                        return
                    self.changed.wait(1)
                stamp, text = lines[position]
            position += 1
            if stamp < since:
                continue
            line = (stamp.strftime("%Y-%m-%dT%H:%M:%S.%f000Z ") * stamped + text).encode()
            if cut == 0:
                yield line[: len(line) - len(text) // 2]
                raise BrokenPipeError
            cut -= 1
            yield line + b"\n"

    def _phase(self, namespace: str, pod: str) -> str:
        with suppress(Refused):
            return str(self.get("pods", pod, namespace).get("status", {}).get("phase", "Pending"))
        return "Gone"


class Controller(threading.Thread):
    """Thread that calls `handle` for every event in order, until the server stops."""

    def __init__(self, server: FakeKubernetes) -> None:
        super().__init__(daemon=True)
        self.server = server

    def run(self) -> None:
        for event in self.server.follow():
            with suppress(Refused):  # the object was deleted meanwhile
                self.handle(event)

    def handle(self, event: Event) -> None:
        raise NotImplementedError


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeKubernetes

    def _handle(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.fake.requests.append((self.command, self.path))
        try:
            for fault in self.fake.faults:
                if status := fault(self.command, self.path):
                    raise Refused(status, "InternalError", "injected fault")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            self._answer(body)
        except Refused as refused:
            self._send(refused.status["code"], refused.status)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _handle

    def _answer(self, body: Any) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        at = PATH.fullmatch(url.path)
        if at is None:
            raise Refused(404, "NotFound", f"no such path: {url.path}")
        group, name, namespace = at["group"] or "", at["name"], at["namespace"] or ""
        resource = f"{at['plural']}.{group}" if group else at["plural"]
        watching = query.get("watch") in ("true", "True")
        verb = VERBS.get(self.command, "get" if name else "watch" if watching else "list")
        part = f"/{at['part']}" if at["part"] else ""
        if group in self.fake.absent:
            self._send(404, "404 page not found\n")
            return
        if resource == "selfsubjectaccessreviews.authorization.k8s.io":
            self._send(201, self.fake.review(body))
            return
        if resource == "localsubjectaccessreviews.authorization.k8s.io":
            account = body["spec"]["user"].rpartition(":")[2]
            access = body["spec"]["resourceAttributes"]
            asked = (access["verb"], access["resource"])
            lacks = self.fake.accounts.get(account)
            status = {"allowed": lacks is not None and asked not in lacks}
            self._send(201, {**body, "metadata": {}, "status": status})
            return
        if (verb, at["plural"] + part) in self.fake.denied:
            raise _forbidden(verb, at["plural"] + part, group, name, namespace)
        if verb == "create":
            dry_run = query.get("dryRun") == "All"
            self._send(201, self.fake.admit(resource, body, namespace, dry_run))
        elif verb == "patch":
            self._send(200, self._patch(resource, name, namespace, group, body))
        elif verb == "update":
            self._send(200, self.fake.replace(resource, name, lambda _: body, namespace))
        elif verb == "delete":
            policy = query.get("propagationPolicy") or body.get("propagationPolicy")
            foreground = policy == "Foreground"
            self._send(200, self.fake.delete(resource, name, namespace, foreground))
        elif part == "/log":
            self._stream(self.fake.read_log(namespace, name, query))
        elif name:
            self._send(200, self.fake.get(resource, name, namespace))
        else:
            selectors = query.get("labelSelector", ""), query.get("fieldSelector", "")
            if watching:
                self._stream(self._watch(resource, at["namespace"], query, *selectors))
            else:
                self._send(200, self._list(resource, at["namespace"], *selectors))

    def _list(self, resource: str, namespace: str | None, labels: str, fields: str) -> Object:
        with self.fake.changed:
            items = self.fake.list(resource, namespace, labels, fields)
            return {"metadata": {"resourceVersion": str(self.fake.version)}, "items": items}

    def _watch(
        self, resource: str, namespace: str | None, query: Object, labels: str, fields: str
    ) -> Iterator[bytes]:
        since = int(query.get("resourceVersion") or 0)
        try:
            if not since:
                listed = self._list(resource, namespace, labels, fields)
                since = int(listed["metadata"]["resourceVersion"])
                for found in listed["items"]:
                    yield _line("ADDED", found)
            for event in self.fake.follow(since, SECOND * float(query.get("timeoutSeconds", 300))):
                here = event.key.resource == resource and namespace in (None, event.key.namespace)
                if here and selected(event.object, labels, fields):
                    yield _line(event.type, event.object)
        except Refused as refused:
            yield _line("ERROR", refused.status)

    def _patch(self, resource: str, name: str, namespace: str, group: str, body: Any) -> Object:
        """Apply a merge patch.

        Built-in kinds also accept a strategic merge patch, which is treated as a plain one here.
        """
        kind = self.headers["Content-Type"].removeprefix("application/").removesuffix("+json")
        built_in = "." not in group or group.endswith(".k8s.io")
        if kind != "merge-patch" and not (kind == "strategic-merge-patch" and built_in):
            raise Refused(415, "UnsupportedMediaType", f"a patch of {group or 'v1'} as {kind}")
        return self.fake.patch(resource, name, body, namespace)

    def _stream(self, lines: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, code: int, body: Object | str) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = "text/plain" if isinstance(body, str) else "application/json"
        self.reply(data, code, {"Content-Type": kind})


def _forbidden(verb: str, what: str, group: str, name: str | None, namespace: str) -> Refused:
    return Refused(
        403,
        "Forbidden",
        f'{what}.{group} "{name or ""}" is forbidden: User "{USER}" cannot {verb} resource '
        f'"{what}" in API group "{group}" in the namespace "{namespace}"',
    )


def _line(kind: str, found: Object) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


__all__ = ["TOKEN", "USER", "Controller", "Event", "FakeKubernetes", "Key", "Object", "Refused"]
