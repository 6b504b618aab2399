"""A request as logs, metrics and traces describe it."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from lathe_serving.gateway.keys import Caller, KeyLimits
from lathe_serving.gateway.web import REQUEST_ID
from lathe_serving.runtime.protocol import Chunk

log = logging.getLogger("lathe")

ANYBODY = Caller("", KeyLimits())
"""Who sends requests where no key is required, or none of the valid ones."""

Report = Callable[["Call", int], None]
"""Called for each request at its end, with the status of its response."""


@dataclass
class Usage:
    """Token counts, added up from chunks."""

    prompt: int = 0
    cached: int = 0  # of the prompt's
    completion: int = 0

    def add(self, chunk: Chunk, is_first: bool, echo: bool) -> None:
        """Count a chunk.

        Args:
            is_first: whether its sequence is the first of its prompt.
            echo: whether the sequence includes the prompt's tokens.
        """
        self.prompt += chunk.prompt_tokens if is_first else 0
        self.cached += chunk.cached_tokens if is_first else 0
        self.completion += len(chunk.tokens) - (chunk.prompt_tokens if echo else 0)

    def to_json(self) -> dict[str, Any]:
        """The field `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Call:
    """One request, from its headers to the end of the response.

    Attributes:
        path: of the endpoint.
        request_id: its `x-request-id`.
        client: the address that it comes from.
        headers: its own.
        caller: who sends it, when the key is known.
        model: the name of the model, when it is known; a model that does not exist is not named.
        usage: its tokens so far.
        started: seconds of `time.monotonic`, as in `spans`.
        started_ns: nanoseconds since the epoch.
        spans: name, start and end of its parts.
        waits: seconds in which its prompts waited for a slot.
        first_token: when the first token of a stream arrived.
    """

    def __init__(self, path: str, scope: Scope) -> None:
        self.path, self.headers = path, Headers(scope=scope)
        self.request_id: str = scope["state"][REQUEST_ID]
        self.client: str = (scope.get("client") or ("",))[0]
        self.caller, self.model, self.usage = ANYBODY, "", Usage()
        self.started, self.started_ns = time.monotonic(), time.time_ns()
        self.spans: list[tuple[str, float, float]] = []
        self.waits: list[float] = []
        self.first_token: float | None = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record when the block runs."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.spans.append((name, started, time.monotonic()))

    def waited(self, since: float) -> None:
        """Record that a prompt has got its slot."""
        now = time.monotonic()
        self.spans.append(("queue", since, now))
        self.waits.append(now - since)

    def generated(self, since: float, first_token: float | None) -> None:
        """Record that a prompt has been answered.

        Args:
            since: when it was sent to Triton.
            first_token: when the first token came, in a stream; a whole answer comes at its end.
        """
        now = time.monotonic()
        if first_token is None:
            self.spans.append(("generate", since, now))
            return
        self.spans += [("prefill", since, first_token), ("decode", first_token, now)]
        self.first_token = min(first_token, self.first_token or first_token)

    def end(self, status: int, reports: Sequence[Report]) -> None:
        """Log the request, count its tokens, and call its reports."""
        seconds = time.monotonic() - self.started
        tokens = max(self.usage.prompt, 0), max(self.usage.completion, 0)
        self.caller.charge(sum(tokens))
        for report in reports:
            report(self, status)
        log.info(
            "%s %d in %.3f s, model %s, %d + %d tokens, key %s, client %s, request %s",
            *(self.path, status, seconds, self.model or "-", *tokens),
            *(self.caller.name or "-", self.client or "-", self.request_id),
        )
