"""Posts notifications of finished runs as JSON to the address in LATHE_WEBHOOK.

Slack's incoming webhooks, Mattermost and Rocket.Chat show the field `text`; the others are for
programs.
"""

import json
import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from lathe_base.errors import UserError
from lathe_base.storage.network import authorities

log = logging.getLogger("lathe")

ADDRESS = "LATHE_WEBHOOK"
SECONDS = 10.0


@dataclass(frozen=True)
class Notice:
    """A notification of a run that has ended.

    Attributes:
        run: its id, or the name of its folder on this machine.
        state: `succeeded`, `failed` or `cancelled`; `ended` if it is unknown.
        verdict: the gate's, in the words of `lathe.evaluate.comparison.outcome`; empty without one.
        reasons: those of the gate, or why the run failed or has no figures.
        figures: those of each model, by its name.
        table: the figures as `make run` prints them.
        links: addresses of the run's page and of its report, if known.
    """

    pipeline: str
    run: str
    state: str
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    table: str = ""
    links: Mapping[str, str] = field(default_factory=dict)

    def message(self) -> dict[str, object]:
        """The JSON to post."""
        gate = f", gate {self.verdict}" if self.verdict else ""
        lines = [f"lathe {self.pipeline} {self.run}: {self.state}{gate}", *self.reasons]
        lines += [f"```\n{self.table}\n```"] if self.table else []
        lines += [f"{name}: {address}" for name, address in self.links.items()]
        return {"text": "\n".join(lines)} | asdict(self)

    def write(self, path: str) -> None:
        """Write that JSON to a file."""
        Path(path).write_text(json.dumps(self.message(), indent=2), encoding="utf-8")


def post(notice: Notice) -> None:
    """Post a notification if LATHE_WEBHOOK has an address; a failure is only a warning.

    Only the host of the address is ever shown, because the rest is as sensitive as a password.
    """
    if not (address := os.environ.get(ADDRESS)):
        return
    try:
        host = urlsplit(address).hostname
        if not address.startswith(("http://", "https://")) or not host:
            raise ValueError(f"the value of {ADDRESS} is not an http(s) address")
        body = json.dumps(notice.message()).encode()
        request = Request(address, body, {"Content-Type": "application/json"})
        trusted = ssl.create_default_context(cafile=authorities())
        with urlopen(request, timeout=SECONDS, context=trusted):
            log.info("told %s", host)
    except HTTPError as error:
        log.warning("%s rejected the notification: %s %s", host, error.code, error.reason)
    except (OSError, ValueError, UserError) as error:  # UserError: no file of certificates
        log.warning("failed to send the notification: %s", getattr(error, "reason", None) or error)
