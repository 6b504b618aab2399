"""Triton's Python backend for text generation: requests in, decoupled responses out.

Runs inside Triton's stub process, the only one that can import `triton_python_backend_utils`; its
environment has only numpy, onnxruntime, openvino with onnx, tokenizers and llguidance. Requests
share one running batch, and a failing request does not affect the others.

Triton calls `TritonPythonModel.execute`; an `Answer` receives the chunks of one request from the
batch's thread, and `ResponseSender` hands them to Triton on a thread of its own.
"""

import gc
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from lathe_base.errors import Code, UserError
from lathe_base.parameters import FIELDS, Params
from lathe_serving.runtime.contract import Receiver, TextBackend, Watcher
from lathe_serving.runtime.open_model import REFERENCE_RUNTIME
from lathe_serving.runtime.protocol import (
    CANCEL,
    PROMPTS,
    REQUEST_ID,
    Chunk,
    InvalidRequest,
    decode,
    error_message,
    model_settings,
    parse,
)
from lathe_serving.runtime.text_generator import BACKENDS

log = logging.getLogger("lathe")

# Pause between two rounds of asking Triton which clients have disconnected: at least this many
# seconds, and this many times the duration of a round.
ASK_SECONDS, ASK_SHARE = 0.01, 4

MAX_EARLY_CANCELLATIONS = 256

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
        # `get` where repositories of earlier versions lack a setting.
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
                self.responses.cancel(parameters[CANCEL])
                # A decoupled request ends with this flag only; it needs no response.
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            # Before anything can fail, so that every failure below has somebody to be told to.
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
    # Clients of Triton's own API may send parameters as tensors: the model declares an optional
    # input for each.
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


class Answer:
    """Sends the chunks of one request, streamed or all at the end.

    Attributes:
        name: the id of its request, if any.
        cancelled: whether its client has disconnected or cancelled it.
    """

    def __init__(self, name: str, sender: Any, responses: "ResponseSender") -> None:
        self.name, self.sender, self.responses = name, sender, responses
        self.params = Params()
        self.cancelled = False
        self.receiver = Receiver(self.take, lambda: self.cancelled)
        self._unsent: dict[int, list[Chunk]] = {}  # by sequence
        self._n_ended = 0  # sequences
        responses.accept(self)

    def take(self, answer: Chunk | Exception) -> None:
        """Receive a chunk (those with a finish reason are counted), or the error that ends it."""
        if isinstance(answer, InvalidRequest):
            self.refuse(pb_utils.TritonError.INVALID_ARG, answer)
        elif isinstance(answer, UserError):
            self.refuse(pb_utils.TritonError.UNAVAILABLE, answer)
        elif isinstance(answer, Exception):
            log.error("a request failed", exc_info=answer)
            self.refuse(pb_utils.TritonError.INTERNAL, answer)
        elif answer.finish_reason == "cancelled" and self.cancelled:
            self.responses.send(self, lambda: None, final=True)  # no client to answer
        elif answer.finish_reason == "cancelled":  # by `finalize`
            self.refuse(pb_utils.TritonError.CANCELLED, Exception("cancelled"))
        else:
            unsent = self._unsent.setdefault(answer.sequence, [])
            unsent.append(answer)
            self._n_ended += bool(answer.finish_reason)
            final = self._n_ended == self.params.num_return_sequences
            if not self.params.stream and final:
                whole = [_joined(chunks) for _, chunks in sorted(self._unsent.items())]
                self.responses.send(self, lambda: _response(whole), final=True)
            # Tokens that end in the middle of a character wait for the rest of it.
            if self.params.stream and (answer.text or answer.finish_reason):
                chunk = _joined(unsent)
                self.responses.send(self, lambda: _response([chunk]), final)
                unsent.clear()

    def refuse(self, code: Any, error: Exception) -> None:
        """Answer with an error, as the final response."""

        def make() -> Any:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(error_message(error), code)
            )

        self.responses.send(self, make, final=True)


class ResponseSender:
    """Sends responses to Triton, and asks it which clients have disconnected. Both wait for another
    process, so they run on a separate thread and do not block the running batch."""

    def __init__(self) -> None:
        self._outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: set[Answer] = set()
        self._named: dict[str, Answer] = {}  # the open ones by the ids of their requests
        # Cancellations that have come another way, and may have overtaken their requests.
        self._early: deque[str] = deque(maxlen=MAX_EARLY_CANCELLATIONS)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def accept(self, answer: "Answer") -> None:
        """Keep `answer.cancelled` up to date with Triton's reports."""

        def task() -> None:
            self._open.add(answer)
            if answer.name:
                self._named[answer.name] = answer
                answer.cancelled |= answer.name in self._early

        self._outbox.put(task)

    def cancel(self, name: str) -> None:
        """Treat the client of the open request with this id, if there is one, as disconnected."""

        def task() -> None:
            if answer := self._named.get(name):
                answer.cancelled = True
            else:
                self._early.append(name)

        self._outbox.put(task)

    def send(self, answer: "Answer", make: Callable[[], Any], final: bool) -> None:
        """Queue a response, which `make` builds on this object's thread."""

        def task() -> None:
            if final:
                self._open.discard(answer)
                if self._named.get(answer.name) is answer:
                    del self._named[answer.name]
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
            answer.sender.send(make(), flags=flags)

        self._outbox.put(task)

    def close(self) -> None:
        """Send everything that is queued, then end the thread."""
        self._outbox.put(None)
        self._thread.join()

    def _work(self) -> None:
        ask_at = 0.0
        while True:
            try:
                # Without open requests there is no client to ask for: wait for the next task.
                task = self._outbox.get(timeout=ASK_SECONDS if self._open else None)
                if task is None:
                    return
                task()
            except queue.Empty:
                pass
            except Exception:
                log.exception("failed to send a response")
            if (begun := time.monotonic()) >= ask_at:
                for answer in list(self._open):
                    try:
                        answer.cancelled |= answer.sender.is_cancelled()
                    except Exception:
                        log.exception("Triton cannot tell whether a client is still connected")
                        self._open.discard(answer)
                ended = time.monotonic()
                ask_at = ended + max(ASK_SECONDS, ASK_SHARE * (ended - begun))


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    """Join the chunks of one sequence."""
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.tokens],
        chunks[-1].finish_reason,
        chunks[-1].sequence,
        [value for chunk in chunks for value in chunk.log_probabilities],
        [name for chunk in chunks for name in chunk.names],
        [top for chunk in chunks for top in chunk.top],
        chunks[-1].prompt_tokens,
        chunks[-1].cached_tokens,
        [length for chunk in chunks for length in chunk.lengths],
    )


def _response(chunks: Sequence[Chunk]) -> Any:
    """A response with one chunk per sequence."""
    arrays = {
        "text_output": np.array([chunk.text.encode() for chunk in chunks], np.object_),
        "finish_reason": np.array([chunk.finish_reason.encode() for chunk in chunks], np.object_),
        "sequence": np.array([chunk.sequence for chunk in chunks], np.int64),
        "token_count": np.array([len(chunk.tokens) for chunk in chunks], np.int64),
        "tokens": np.array([token for chunk in chunks for token in chunk.tokens], np.int64),
        "log_probabilities": np.array(
            [value for chunk in chunks for value in chunk.log_probabilities], np.float32
        ),
    }
    # The rest is left out where it would say nothing; the client reads it as empty.
    if any(chunk.prompt_tokens for chunk in chunks):
        arrays["prompt_token_count"] = np.array([c.prompt_tokens for c in chunks], np.int64)
    if any(chunk.cached_tokens for chunk in chunks):
        arrays["cached_token_count"] = np.array([c.cached_tokens for c in chunks], np.int64)
    if any(chunk.names for chunk in chunks):
        names = [name.encode() for chunk in chunks for name in chunk.names]
        arrays["token_names"] = np.array(names, np.object_)
        lengths = [length for chunk in chunks for length in chunk.lengths]
        arrays["text_lengths"] = np.array(lengths, np.int64)
    if tops := [top for chunk in chunks for top in chunk.top]:
        top_names = [name.encode() for top in tops for name in top]
        values = [value for top in tops for value in top.values()]
        arrays["top_count"] = np.array([len(top) for top in tops], np.int64)
        arrays["top_names"] = np.array(top_names, np.object_)
        arrays["top_log_probabilities"] = np.array(values, np.float32)
    return pb_utils.InferenceResponse([pb_utils.Tensor(*array) for array in arrays.items()])


class Metrics(Watcher):
    """The metrics `lathe_*` on Triton's Prometheus endpoint, labelled with the model's name."""

    def __init__(self, model_name: str) -> None:
        self._told, self._new_tokens, self._new_drafted, self._new_accepted = 0.0, 0, 0, 0
        self._families: list[Any] = []  # Triton drops a metric when its family is deleted

        def make(name: str, description: str, kind: str) -> Any:
            family = pb_utils.MetricFamily(
                name=f"lathe_{name}",
                description=description,
                kind=getattr(pb_utils.MetricFamily, kind),  # absent before a model is initialized
            )
            self._families.append(family)
            labels = {"model": model_name}
            if kind == "HISTOGRAM":
                return family.Metric(labels=labels, buckets=SECONDS)
            return family.Metric(labels=labels)

        self._tokens = make("generated_tokens_total", "Tokens generated", "COUNTER")
        self._prompt = make("prompt_tokens_total", "Prompt tokens", "COUNTER")
        self._reused = make(
            "reused_prompt_tokens_total", "Prompt tokens found in the prefix cache", "COUNTER"
        )
        self._drafted = make("drafted_tokens_total", "Tokens drafted by prompt lookup", "COUNTER")
        self._accepted = make(
            "accepted_tokens_total", "Drafted tokens that were accepted", "COUNTER"
        )
        self._queue = make(
            "queue_seconds", "Seconds from arrival to a slot in the batch", "HISTOGRAM"
        )
        self._first = make(
            "first_token_seconds", "Seconds from arrival to the first token", "HISTOGRAM"
        )
        self._running = make("running", "Sequences in the batch", "GAUGE")
        self._waiting = make("waiting", "Requests waiting for a slot", "GAUGE")
        self._kv = make("kv_tokens", "Tokens in the KV cache", "GAUGE")
        self._usage = make("kv_cache_usage", "Share of the KV cache in use", "GAUGE")

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
