"""Reports progress in the TrainJob's status, if Kubeflow Trainer asks for it.

With its feature gate `TrainJobStatus` (2.2 and newer) Trainer gives the containers of a TrainJob
the address of its status server, a certificate authority and a token, and shows what they send as
`status.trainerStatus`: https://www.kubeflow.org/docs/components/trainer/
"""

import json
import logging
import math
import os
import ssl
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from lathe_base.progress import Bar

log = logging.getLogger("lathe")

URL, AUTHORITY, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
SECONDS = 5.0
"""Minimum time between two messages; Trainer's server needs no more."""

TIMEOUT = 5.0
LARGEST = 2**31 - 1
"""The numbers of a status are 32-bit integers."""


class StatusReporter:
    """Sends the latest status in a background thread; errors there never affect the training. Call
    it from one thread."""

    def __init__(self, url: str, authority: Path, token: Path) -> None:
        self._url, self._authority, self._token = url, authority, token
        self._progress: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}
        self._changed, self._ended = threading.Event(), threading.Event()
        self._fails = False
        threading.Thread(target=self._run, name="trainjob-status", daemon=True).start()

    def progress(self, steps: Bar) -> None:
        """Set the progress; a status that has not been sent yet is replaced."""
        self._progress = {
            "progressPercentage": 100 * steps.done // (steps.total or 1),
            "estimatedRemainingSeconds": min(round(steps.seconds_left()), LARGEST),
        }
        self._changed.set()

    def metrics(self, figures: Mapping[str, float]) -> None:
        """Add or replace metrics; non-finite ones are not sent."""
        self._metrics = {**self._metrics, **figures}
        self._changed.set()

    def close(self) -> None:
        """Send the last status immediately, without waiting for it."""
        self._ended.set()
        self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            has_ended = self._ended.is_set()
            try:
                self._send()
                self._fails = False
            except Exception as error:  # also of a certificate, or a file that is being replaced
                if not self._fails:
                    log.warning("cannot update the TrainJob's status: %s", error)
                self._fails = True
            if has_ended:
                return
            self._ended.wait(SECONDS)

    def _send(self) -> None:
        """Post the status. Token and certificate authority are read again each time, because
        Trainer rotates them."""
        context = ssl.create_default_context(cafile=str(self._authority))
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
        token = self._token.read_text(encoding="ascii").strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        finite = {name: value for name, value in self._metrics.items() if math.isfinite(value)}
        status = {
            **self._progress,
            "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in finite.items()],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        body = json.dumps({"trainerStatus": status}).encode()
        with opener.open(Request(self._url, body, headers), timeout=TIMEOUT) as answer:
            answer.read()


def open_status() -> StatusReporter | None:
    """The reporter for this process's TrainJob; None outside of one, or if Trainer does not ask for
    progress."""
    given = [os.environ.get(name, "") for name in (URL, AUTHORITY, TOKEN)]
    if not all(given):
        return None
    url, authority, token = given
    return StatusReporter(url, Path(authority), Path(token))
