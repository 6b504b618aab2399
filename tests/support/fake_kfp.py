"""A fake Kubeflow Pipelines server on the loopback interface, with the endpoints that Lathe uses.

It stores what it is sent, rejects what the real server rejects (unknown ids, duplicate names,
invalid pipelines and cron expressions, wrong credentials), paginates lists in pages of two, and
records every request. Every GET of a run advances it by one frame of `script`.
"""

import json
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email import message_from_bytes
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from tests.support.loopback import LoopbackServer, QuietHandler

PAGE = 2
BEGAN = datetime(2026, 1, 5, 3, tzinfo=UTC)
V2 = "/apis/v2beta1"
NAMESPACED = ("experiments", "pipelines", "runs", "recurringruns")
RUN = ("POST", "runs")
PROXY = "/api/v1/namespaces/kubeflow/services/ml-pipeline:http/proxy/"
"""Path at which a Kubernetes API server proxies requests to Kubeflow Pipelines."""

Json = dict[str, Any]


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def task(name: str, state: str, pod: str = "", children: tuple[str, ...] = (), **more: Any) -> Json:
    """Details of a task of a run, which took 90 s if it has ended.

    Args:
        children: Argo's node ids of the child tasks.
    """
    begun = None if state == "PENDING" else BEGAN
    ended = BEGAN + timedelta(seconds=90) if state not in ("PENDING", "RUNNING") else None
    return {
        "display_name": name,
        "task_id": f"id-{name}-{pod}",
        "create_time": BEGAN.isoformat(),
        "start_time": begun and begun.isoformat(),
        "end_time": ended and ended.isoformat(),
        "state": state,
        "pod_name": pod or None,
        "child_tasks": [{"pod_name": child} for child in children],
        **more,
    }


def frame(state: str, *tasks: Json, error: str = "") -> Json:
    """State of a run as the server reports it at one moment."""
    status = {"error": {"code": 13, "message": error}} if error else {}
    return {"state": state, "run_details": {"task_details": list(tasks)}, **status}


@dataclass
class FakeKfp:
    """State of the server.

    Attributes:
        token, cookie: credentials that every request must carry, if set.
        multi_user: whether every user has a namespace; list and create requests must then name
            it, and the server otherwise ignores it.
        logs: logs by pod name, served by the API server.
        ui_logs: logs by pod name, served by the UI.
        failures: HTTP statuses of the next responses.
        is_a_login_page: answer every request with a login page, as an authenticating proxy does.
        has_pages: whether this is the UI, which proxies API requests, rather than the API server.
        refuse_recurring: refuse to create recurring runs.
        active: number of enabled recurring runs after each request.
        url: address of the server.
    """

    token: str = ""
    cookie: str = ""
    multi_user: bool = False
    script: list[Json] = field(default_factory=lambda: [frame("SUCCEEDED")])
    logs: dict[str, str] = field(default_factory=dict)
    ui_logs: dict[str, str] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    is_a_login_page: bool = False
    has_pages: bool = True
    refuse_recurring: bool = False
    requests: list[Request] = field(default_factory=list)
    experiments: dict[str, Json] = field(default_factory=dict)
    pipelines: dict[str, Json] = field(default_factory=dict)
    versions: dict[str, Json] = field(default_factory=dict)
    runs: dict[str, Json] = field(default_factory=dict)
    recurring_runs: dict[str, Json] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    active: list[int] = field(default_factory=list)
    url: str = ""

    def sent(self, method: str, path: str) -> list[Request]:
        return [r for r in self.requests if r.method == method and re.fullmatch(path, r.path)]

    def answer(self, request: Request) -> Any:
        """Return the response: JSON, HTML, or the text of a log."""
        self.requests.append(request)
        if self.failures:
            raise Refused(self.failures.pop(0), "try again")
        if self.is_a_login_page:
            return "<html>Who are you?</html>"
        if request.path == "/" and self.has_pages:
            return "<html>Kubeflow Pipelines</html>"
        if request.path == f"{V2}/healthz":
            return {"multi_user": self.multi_user, "pipeline_store": "database"}
        self._authorize(request)
        self._require_namespace(request)
        for method, pattern, action in self._routes():
            match = re.fullmatch(pattern, request.path)
            if match and method == request.method:
                answer = action(request, *match.groups())
                enabled = [r for r in self.recurring_runs.values() if r["mode"] == "ENABLE"]
                self.active.append(len(enabled))
                return answer
        raise Refused(404, f"no such path: {request.method} {request.path}")

    def _authorize(self, request: Request) -> None:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            raise Refused(401, "Unauthenticated")
        if self.cookie and request.headers.get("cookie") != self.cookie:
            raise Refused(401, "Unauthenticated")

    def _require_namespace(self, request: Request) -> None:
        """Reject a list or create request without a namespace in multi-user mode.

        Creating a run needs none: the run is created in its experiment's namespace.
        """
        kind = request.path.removeprefix(f"{V2}/")
        if not self.multi_user or kind not in NAMESPACED or (request.method, kind) == RUN:
            return
        given = request.query if request.method == "GET" else request.body
        if not given.get("namespace"):
            raise Refused(400, f"{kind} cannot have an empty namespace in multi-user mode")

    def _routes(self) -> list[tuple[str, str, Any]]:
        one = "([^/:]+)"
        return [
            ("GET", f"{V2}/experiments", lambda r: _listed(r, "experiments", self.experiments)),
            ("POST", f"{V2}/experiments", self._create_experiment),
            ("GET", f"{V2}/pipelines", lambda r: _listed(r, "pipelines", self.pipelines)),
            ("POST", f"{V2}/pipelines", self._create_pipeline),
            ("POST", f"{V2}/pipelines/upload_version", self._upload_version),
            ("GET", f"{V2}/pipelines/{one}/versions", self._list_versions),
            ("GET", f"{V2}/pipelines/{one}/versions/{one}", self._get_version),
            ("POST", f"{V2}/runs", self._create_run),
            ("GET", f"{V2}/runs", self._list_runs),
            ("GET", f"{V2}/runs/{one}", self._get_run),
            ("POST", f"{V2}/runs/{one}:terminate", self._terminate),
            ("GET", f"{V2}/recurringruns", self._list_recurring),
            ("POST", f"{V2}/recurringruns", self._create_recurring),
            ("GET", f"{V2}/recurringruns/{one}", self._get_recurring),
            ("POST", f"{V2}/recurringruns/{one}:(enable|disable)", self._set_mode),
            ("DELETE", f"{V2}/recurringruns/{one}", self._delete_recurring),
            ("GET", f"/apis/v1alpha1/runs/{one}/nodes/{one}/log", self._log),
            ("GET", "/k8s/pod/logs", lambda r: _text(self.ui_logs, r.query["podname"])),
        ]

    def _create_experiment(self, request: Request) -> Json:
        return _add(self.experiments, "experiment_id", request.body)

    def _create_pipeline(self, request: Request) -> Json:
        _required(request.body, "name")
        _free(self.pipelines, request.body["display_name"])
        return _add(self.pipelines, "pipeline_id", request.body)

    def _upload_version(self, request: Request) -> Json:
        query = request.query
        _required(query, "name")
        pipeline = _known(self.pipelines, query["pipelineid"])["pipeline_id"]
        _free(self.versions, query["display_name"], pipeline_id=pipeline)
        spec, platform = yaml.load_all(request.body, yaml.CSafeLoader)
        json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
        json_format.ParseDict(platform, pipeline_spec_pb2.PlatformSpec())
        fields = ("name", "display_name", "description")
        version = {key: query[key] for key in fields if key in query} | {"pipeline_id": pipeline}
        added = _add(self.versions, "pipeline_version_id", version)
        self.uploads[added["pipeline_version_id"]] = request.body
        return added

    def _list_versions(self, request: Request, pipeline: str) -> Json:
        mine = {k: v for k, v in self.versions.items() if v["pipeline_id"] == pipeline}
        return _listed(request, "pipeline_versions", mine)

    def _get_version(self, request: Request, pipeline: str, version: str) -> Json:
        spec, platform = yaml.load_all(self.uploads[version], yaml.CSafeLoader)
        text = {"pipeline_spec": {"pipeline_spec": spec, "platform_spec": platform}}
        return _known(self.versions, version) | text

    def _check_reference(self, body: Json) -> None:
        _known(self.experiments, body["experiment_id"])
        reference = body["pipeline_version_reference"]
        version = _known(self.versions, reference["pipeline_version_id"])
        if version["pipeline_id"] != reference["pipeline_id"]:
            raise Refused(400, "the version is another pipeline's")

    def _create_run(self, request: Request) -> Json:
        self._check_reference(request.body)
        return _add(self.runs, "run_id", request.body | {"state": "PENDING"})

    def _get_run(self, request: Request, run_id: str) -> Json:
        now = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return _known(self.runs, run_id) | now

    def _list_runs(self, request: Request) -> Json:
        """List runs; every listing advances the runs of schedules by one state."""
        for run in self.runs.values():
            if states := run.get("states"):
                orphaned = run["recurring_run_id"] not in self.recurring_runs
                run["state"] = "RUNNING" if orphaned else states.pop(0)
        query = request.query
        if query.get("sort_by", "created_at desc") != "created_at desc":
            raise Refused(400, f"no such order: {query['sort_by']}")
        runs = {
            identity: run
            for identity, run in self.runs.items()
            if run.get("experiment_id") == query.get("experiment_id", run.get("experiment_id"))
        }
        if "sort_by" in query:
            latest = sorted(runs, key=lambda one: runs[one]["created_at"], reverse=True)
            runs = {identity: runs[identity] for identity in latest}
        return _listed(request, "runs", runs)

    def _terminate(self, request: Request, run_id: str) -> Json:
        _known(self.runs, run_id)["states"] = ["CANCELING", "CANCELING", "FAILED"]
        return {}

    def create_scheduled_run(self, schedule: str, *states: str) -> str:
        """Create a run as a schedule does when it is due; `states` are its successive states."""
        body = {"display_name": f"lathe-{len(self.runs)}", "recurring_run_id": schedule}
        made = _add(self.runs, "run_id", body | {"state": "RUNNING", "states": list(states)})
        return str(made["run_id"])

    def _list_recurring(self, request: Request) -> Json:
        return _listed(request, "recurringRuns", self.recurring_runs)

    def _create_recurring(self, request: Request) -> Json:
        self._check_reference(request.body)
        if self.refuse_recurring:
            raise Refused(400, "the quota of schedules is used up")
        cron = request.body["trigger"].get("cron_schedule")
        if cron and len(cron["cron"].split()) != 6:
            raise Refused(400, "Schedule cron is not a valid cron expression")
        return _add(self.recurring_runs, "recurring_run_id", request.body)

    def _get_recurring(self, request: Request, schedule: str) -> Json:
        return _known(self.recurring_runs, schedule)

    def _set_mode(self, request: Request, schedule: str, verb: str) -> Json:
        _known(self.recurring_runs, schedule)["mode"] = verb.upper()
        return {}

    def _delete_recurring(self, request: Request, schedule: str) -> Json:
        _known(self.recurring_runs, schedule)
        del self.recurring_runs[schedule]
        return {}

    def _log(self, request: Request, run_id: str, pod: str) -> str:
        _known(self.runs, run_id)
        return _text(self.logs, pod)


def _add(table: dict[str, Json], key: str, body: Json) -> Json:
    identity = str(uuid.uuid4())
    table[identity] = body | {key: identity, "created_at": BEGAN.isoformat()}
    return table[identity]


def _known(table: dict[str, Json], identity: str) -> Json:
    if identity not in table:
        raise Refused(404, f"{identity} not found")
    return table[identity]


def _required(body: Json, field: str) -> None:
    if not body.get(field):
        raise Refused(400, f"Required input field. {field}")


def _free(table: dict[str, Json], name: str, **scope: str) -> None:
    for row in table.values():
        if row["display_name"] == name and all(row[k] == v for k, v in scope.items()):
            raise Refused(409, f"the name {name} already exists")


def _text(texts: dict[str, str], name: str) -> str:
    if name not in texts:
        raise Refused(500, f"pod {name} has no log")
    return texts[name]


def _listed(request: Request, name: str, table: dict[str, Json]) -> Json:
    rows = list(table.values())
    for predicate in json.loads(request.query.get("filter") or "{}").get("predicates", []):
        if (predicate["operation"], predicate["key"]) != (1, "display_name"):
            raise Refused(400, f"no such filter: {predicate}")
        rows = [row for row in rows if row["display_name"] == predicate["stringValue"]]
    begin = int(request.query.get("page_token") or 0)
    rest = {"next_page_token": str(begin + PAGE)} if len(rows) > begin + PAGE else {}
    return {name: rows[begin : begin + PAGE], "total_size": len(rows)} | rest


@contextmanager
def serve(certificate: Path | None = None, **settings: Any) -> Iterator[FakeKfp]:
    """Serve on a free port while the block runs; over TLS if a certificate with key is given."""
    kfp = FakeKfp(**settings)
    lock = threading.Lock()

    class Handler(QuietHandler):
        def _handle(self) -> None:
            address = urlsplit(self.path)
            headers = {key.lower(): value for key, value in self.headers.items()}
            raw = self.rfile.read(int(headers.get("content-length", 0)))
            query = dict(parse_qsl(address.query))
            body = _body(raw, headers.get("content-type", ""))
            path = address.path.removeprefix(PROXY)
            request = Request(self.command, path, query, headers, body)
            try:
                with lock:
                    answer, status = kfp.answer(request), 200
            except Refused as error:
                answer = {"error": str(error), "code": 2, "message": str(error), "details": []}
                status = error.status
            kind = "text/plain" if isinstance(answer, str) else "application/json"
            kind = "text/html" if kind == "text/plain" and "<html>" in answer else kind
            text = answer if isinstance(answer, str) else json.dumps(answer)
            self.reply(text.encode(), status, {"Content-Type": kind})

        do_GET = do_POST = do_DELETE = _handle

    with LoopbackServer(Handler, certificate) as server:
        kfp.url = server.url
        yield kfp


def _body(raw: bytes, kind: str) -> Any:
    """Parse a body: JSON, or the only file of a multipart form."""
    if kind.startswith("multipart/form-data"):
        form = message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + raw)
        _, part = form.walk()
        assert part.get_param("name", header="Content-Disposition") == "uploadfile"
        return part.get_payload(decode=True)
    return json.loads(raw) if raw else None
