"""A fake of Kubeflow Trainer's status server (2.3, feature gate TrainJobStatus), over HTTPS on the
loopback interface. It validates the names, types and limits of the fields as the real one does."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.support.loopback import JSONHandler, LoopbackServer

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{}/trainjobs/{}/status"
MAX_INT32 = 2**31 - 1
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")


@dataclass
class StatusServer:
    """State of the server.

    Attributes:
        trainjob: namespace and name of the TrainJob.
        token: the only accepted bearer token.
        delay: seconds before each response.
        received: accepted statuses, each with the time at which it arrived.
        refused: error messages of the rejected statuses.
    """

    trainjob: tuple[str, str] = ("lathe", "pretrain-0123456789")
    token: str = "of-the-pod"
    delay: float = 0.0
    url: str = ""
    received: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def answer(self, path: str, authorization: str, body: bytes) -> tuple[int, str]:
        """Return the HTTP status and message of the response."""
        if path != PATH.format(*self.trainjob):
            return 404, "Not found"
        if authorization.split() != ["Bearer", self.token]:
            return 403, "Forbidden"
        status = json.loads(body)["trainerStatus"]
        if wrong := problem(status):
            return 422, wrong
        self.received.append((time.monotonic(), status))
        return 200, ""


def problem(status: dict[str, Any]) -> str:
    """Name of the field that violates the schema of TrainJobs; empty if the status is valid."""
    percent, left = status.get("progressPercentage"), status.get("estimatedRemainingSeconds")
    if not (percent is None or (type(percent) is int and 0 <= percent <= 100)):
        return "progressPercentage"
    if not (left is None or (type(left) is int and 0 <= left <= MAX_INT32)):
        return "estimatedRemainingSeconds"
    for metric in status.get("metrics", []):
        texts = metric["name"], metric["value"]
        if not all(isinstance(text, str) and 1 <= len(text) <= 64 for text in texts):
            return "metrics"
    when = status.get("lastUpdatedTime", "")
    if not TIME.fullmatch(when) or datetime.fromisoformat(when).tzinfo is None:
        return "lastUpdatedTime"
    return ""


@contextmanager
def serve(certificate: Path) -> Iterator[StatusServer]:
    """Serve with this key and certificate while the block runs."""
    state = StatusServer()

    class Handler(JSONHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(state.delay)
            code, message = state.answer(self.path, self.headers["Authorization"] or "", body)
            if message:
                state.refused.append(message)
                body = json.dumps({"status": "Failure", "message": message, "code": code}).encode()
            self.reply(body, code)

    with LoopbackServer(Handler, certificate) as server:
        state.url = server.url + PATH.format(*state.trainjob)
        yield state
