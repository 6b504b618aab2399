"""Lathe's metrics on Triton's Prometheus endpoint, in addition to Triton's own."""

import time
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from lathe_serving.runtime.watcher import Watcher

TELL_SECONDS = 0.2  # each update is a message to Triton's process
SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]


class Metrics(Watcher):
    """The metrics `lathe_*`, labelled with the model's name."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._told, self._new_tokens, self._new_drafted, self._new_accepted = 0.0, 0, 0, 0
        self._families: list[Any] = []  # Triton drops a metric when its family is deleted
        self._tokens = self._make("generated_tokens_total", "Tokens generated", "COUNTER")
        self._prompt = self._make("prompt_tokens_total", "Prompt tokens", "COUNTER")
        self._reused = self._make(
            "reused_prompt_tokens_total", "Prompt tokens found in the prefix cache", "COUNTER"
        )
        self._drafted = self._make(
            "drafted_tokens_total", "Tokens drafted by prompt lookup", "COUNTER"
        )
        self._accepted = self._make(
            "accepted_tokens_total", "Drafted tokens that were accepted", "COUNTER"
        )
        self._queue = self._make(
            "queue_seconds", "Seconds from arrival to a slot in the batch", "HISTOGRAM"
        )
        self._first = self._make(
            "first_token_seconds", "Seconds from arrival to the first token", "HISTOGRAM"
        )
        self._running = self._make("running", "Sequences in the batch", "GAUGE")
        self._waiting = self._make("waiting", "Requests waiting for a slot", "GAUGE")
        self._kv = self._make("kv_tokens", "Tokens in the KV cache", "GAUGE")

    def admitted(self, waited: float) -> None:
        self._queue.observe(waited)

    def begun(self, prompt_tokens: int, reused_tokens: int, seconds: float) -> None:
        self._prompt.increment(prompt_tokens)
        self._reused.increment(reused_tokens)
        self._first.observe(seconds)

    def stepped(self, tokens: int) -> None:
        self._new_tokens += tokens

    def drafted(self, tokens: int, accepted: int) -> None:
        self._new_drafted += tokens
        self._new_accepted += accepted

    def holds(self, running: int, waiting: int, kv_tokens: int) -> None:
        idle, now = running + waiting == 0, time.monotonic()
        if idle or now - self._told > TELL_SECONDS:
            self._tokens.increment(self._new_tokens)
            self._drafted.increment(self._new_drafted)
            self._accepted.increment(self._new_accepted)
            self._running.set(running)
            self._waiting.set(waiting)
            self._kv.set(kv_tokens)
            self._told, self._new_tokens, self._new_drafted, self._new_accepted = now, 0, 0, 0

    def _make(self, name: str, description: str, kind: str) -> Any:
        family = pb_utils.MetricFamily(
            name=f"lathe_{name}",
            description=description,
            kind=getattr(pb_utils.MetricFamily, kind),  # absent before a model is initialized
        )
        self._families.append(family)
        labels = {"model": self._model}
        if kind == "HISTOGRAM":
            return family.Metric(labels=labels, buckets=SECONDS)
        return family.Metric(labels=labels)
