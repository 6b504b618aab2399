"""Sends responses from the backend to Triton, streamed or not, and detects disconnected clients."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from lathe_base.errors import UserError
from lathe_serving.runtime.contract import Receiver
from lathe_serving.runtime.params import Params
from lathe_serving.runtime.protocol import Chunk, InvalidRequest, error_message

log = logging.getLogger("lathe")

# Pause between two rounds of asking Triton which clients have disconnected: at least this many
# seconds, and this many times the duration of a round.
ASK_SECONDS, ASK_SHARE = 0.01, 4

MAX_EARLY_CANCELLATIONS = 256


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
        """Keep `answer.abandoned` up to date with Triton's reports."""

        def task() -> None:
            self._open.add(answer)
            if answer.name:
                self._named[answer.name] = answer
                answer.abandoned |= answer.name in self._early

        self._outbox.put(task)

    def abandon(self, name: str) -> None:
        """Treat the client of the open request with this id, if there is one, as disconnected."""

        def task() -> None:
            if answer := self._named.get(name):
                answer.abandoned = True
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
                        answer.abandoned |= answer.sender.is_cancelled()
                    except Exception:
                        log.exception("Triton cannot tell whether a client is still connected")
                        self._open.discard(answer)
                ended = time.monotonic()
                ask_at = ended + max(ASK_SECONDS, ASK_SHARE * (ended - begun))


class Answer:
    """Sends the chunks of one request, streamed or all at the end.

    Attributes:
        name: the id of its request, if any.
        abandoned: whether its client has disconnected or cancelled it.
    """

    def __init__(self, name: str, sender: Any, responses: ResponseSender) -> None:
        self.name, self.sender, self.responses = name, sender, responses
        self.params = Params()
        self.abandoned = False
        self.receiver = Receiver(self.take, lambda: self.abandoned)
        self.held: dict[int, list[Chunk]] = {}  # by sequence
        self.ended = 0
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
        elif answer.finish_reason == "cancelled" and self.abandoned:
            self.responses.send(self, lambda: None, final=True)  # no client to answer
        elif answer.finish_reason == "cancelled":
            self.refuse(pb_utils.TritonError.CANCELLED, Exception("cancelled"))
        else:
            self._collect(answer)

    def refuse(self, code: Any, error: Exception) -> None:
        """Answer with an error, as the final response."""

        def make() -> Any:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(error_message(error), code)
            )

        self.responses.send(self, make, final=True)

    def _collect(self, chunk: Chunk) -> None:
        buffered = self.held.setdefault(chunk.sequence, [])
        buffered.append(chunk)
        self.ended += bool(chunk.finish_reason)
        final = self.ended == self.params.num_return_sequences
        if not self.params.stream and final:
            whole = [_joined(chunks) for _, chunks in sorted(self.held.items())]
            self.responses.send(self, lambda: _response(whole), final=True)
        # Tokens that end in the middle of a character wait for the rest of it.
        if self.params.stream and (chunk.text or chunk.finish_reason):
            chunk = _joined(buffered)
            self.responses.send(self, lambda: _response([chunk]), final)
            buffered.clear()


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
        named = [name.encode() for top in tops for name in top]
        values = [value for top in tops for value in top.values()]
        arrays["top_count"] = np.array([len(top) for top in tops], np.int64)
        arrays["top_names"] = np.array(named, np.object_)
        arrays["top_log_probabilities"] = np.array(values, np.float32)
    return pb_utils.InferenceResponse([pb_utils.Tensor(*array) for array in arrays.items()])
