"""Triton's Python backend for text generation: requests in, decoupled responses out.

Runs inside Triton's stub process, the only one that can import `triton_python_backend_utils`; its
environment has only numpy, onnxruntime, openvino with onnx, tokenizers and llguidance. Requests
share one running batch, and a failing request does not affect the others.
"""

import gc
import json
import logging
import time
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from lathe_base.errors import Code, UserError
from lathe_serving.answer import Answer, ResponseSender
from lathe_serving.runtime.contract import TextBackend, Watcher
from lathe_serving.runtime.open_model import REFERENCE_RUNTIME
from lathe_serving.runtime.params import FIELDS, Params, parse
from lathe_serving.runtime.protocol import CANCEL, PROMPTS, REQUEST_ID, decode, model_settings
from lathe_serving.runtime.text_generator import BACKENDS

log = logging.getLogger("lathe")

TELL_SECONDS = 0.2  # between updates of the metrics: each is a message to Triton's process
SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
"""Buckets of the histograms."""


class TritonPythonModel:
    """The interface that Triton calls; see https://github.com/triton-inference-server/python_backend."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model next to `model.py`; its settings are JSON `parameters` of config.pbtxt."""
        settings = model_settings(args)
        self.defaults = parse(settings["generation"], Params())
        folder = Path(args["model_repository"]) / args["model_version"]
        self.max_queue: int = settings["max_queue"]
        self.responses = ResponseSender()
        runtime = settings.get("runtime", REFERENCE_RUNTIME)
        self.generator: TextBackend = BACKENDS[runtime](
            folder,
            settings["max_tokens"],
            threads=settings["threads"],
            max_running=settings["max_running"],
            max_queue=self.max_queue,
            prefix_bytes=2**20 * settings.get("prefix_cache_mib", 0),
            speculates=settings.get("speculation", "off") == "prompt_lookup",
            watcher=Metrics(args["model_name"]),
            runtime=runtime,
        )
        pb_utils.Logger.log_info(f"{args['model_name']} runs with {self.generator.runtime}")

    def execute(self, requests: list[Any]) -> None:
        """Parse and queue each request; responses are sent from the batch's thread."""
        for request in requests:
            sender = request.get_response_sender()
            parameters = dict(json.loads(request.parameters() or "{}"))
            if CANCEL in parameters:
                self.responses.abandon(parameters[CANCEL])
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            name = parameters.pop(REQUEST_ID, request.request_id())
            answer = Answer(name, sender, self.responses)
            try:
                prompt, answer.params = _read(request, parameters, self.defaults)
                if not self.generator.submit(prompt, answer.params, answer.receiver):
                    full = UserError(
                        f"the server is busy: {self.max_queue} requests are already waiting",
                        "try again in a moment, or raise Serving.max_queue",
                        Code.BUSY,
                    )
                    answer.refuse(pb_utils.TritonError.UNAVAILABLE, full)
            except UserError as error:
                answer.refuse(pb_utils.TritonError.INVALID_ARG, error)
            except Exception as error:
                log.exception("failed to accept a request")
                answer.refuse(pb_utils.TritonError.INTERNAL, error)

    def finalize(self) -> None:
        """Cancel all requests: Triton is shutting down or unloading the model.

        Metrics and response senders, which notify Triton when they end, have to end here: at
        interpreter exit Triton no longer listens, and its stub 2.51 crashes.
        """
        self.generator.close()
        self.responses.close()
        vars(self).clear()
        gc.collect()  # an answer and its receiver refer to each other


def _read(
    request: Any, parameters: dict[str, Any], defaults: Params
) -> tuple[str | list[int], Params]:
    """Read prompt and parameters; these come as optional tensors or Triton request parameters."""
    if microseconds := request.timeout():  # Triton's own parameter `timeout`
        parameters["timeout_seconds"] = microseconds / 1e6
    for name in FIELDS:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            continue
        if name in parameters:
            raise UserError(
                f"{name} is given both as input and as parameter",
                "give only one of them",
                Code.CONFLICTING_OPTIONS,
            )
        value = tensor.as_numpy().item()
        parameters[name] = decode(value, name) if isinstance(value, bytes) else value
    params = parse(parameters, defaults)
    text, ids = (pb_utils.get_input_tensor_by_name(request, name) for name in PROMPTS)
    if (text is None) == (ids is None):
        what = "missing" if text is None else "given together with input_ids"
        raise UserError(
            f"text_input is {what}",
            "give the prompt as text_input or as input_ids",
            Code.INVALID_REQUEST,
        )
    if text is None:
        return ids.as_numpy().tolist(), params
    return decode(text.as_numpy().item(), "text_input"), params


class Metrics(Watcher):
    """The metrics `lathe_*` on Triton's Prometheus endpoint, labelled with the model's name."""

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
        self._usage = self._make("kv_cache_usage", "Share of the KV cache in use", "GAUGE")

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

    def holds(self, running: int, waiting: int, kv_tokens: int, kv_usage: float) -> None:
        idle, now = running + waiting == 0, time.monotonic()
        if idle or now - self._told > TELL_SECONDS:
            self._tokens.increment(self._new_tokens)
            self._drafted.increment(self._new_drafted)
            self._accepted.increment(self._new_accepted)
            self._running.set(running)
            self._waiting.set(waiting)
            self._kv.set(kv_tokens)
            self._usage.set(kv_usage)
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
