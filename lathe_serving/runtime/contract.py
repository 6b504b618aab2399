"""The contracts of what generates, from the server's side to the processor's.

1. `TextBackend`, here: prompts become chunks of text. Triton's Python backend knows nothing else of
   a runtime. `text_generator.TextGenerator` implements it with a `Batcher`, and
   `vllm_engine.VLLMEngine` with vLLM's scheduler; `CheckedBackend`, below, tokenizes and checks the
   requests of both before they queue them. They are registered in `text_generator.BACKENDS`, and
   tested by `tests/serve/runtime/test_contract.py`.
2. `sequence_group.SequenceGroup`: how one request of the running batch chooses its next tokens from
   logits. `Samples` and `Beams` implement it.
3. `exported_model.ExportedModel`: how a graph computes logits, and keeps keys and values. It checks
   the arguments and states the shapes of its six abstract methods; `session.OnnxModel`,
   `single_stream.SingleStreamModel` and `openvino_model.OpenVINOModel` implement these. They are
   registered in `open_model.OPENERS`.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from lathe_base.errors import Code, UserError
from lathe_base.parameters import Params
from lathe_serving.runtime.grammar import Grammars
from lathe_serving.runtime.protocol import Chunk, InvalidRequest
from lathe_serving.runtime.text import TokenBytes, TokenLimit, TooManyTokens, encode_prompts

COMPILERS = 2  # constraints that are compiled at a time
ENCODERS = 2  # long texts that are tokenized at a time
LONG_TEXT = 16_384  # characters; a shorter text is tokenized in a few milliseconds


@dataclass(frozen=True)
class Receiver:
    """The receiving end of a request.

    Attributes:
        deliver: called with every chunk, the last one of each sequence with a finish reason, or
            with the error that ends the request: `InvalidRequest`, another UserError if it may
            succeed later, or anything else for a bug. It is called from a thread of the backend,
            and must not block.
        cancelled: whether the request is cancelled; checked before every step.
    """

    deliver: Callable[[Chunk | Exception], None]
    cancelled: Callable[[], bool]


class Watcher:
    """Receives a backend's events, on its thread; this base class ignores them. Seconds count from
    a request's arrival."""

    def admitted(self, waited: float) -> None:
        """A request got its slots."""

    def begun(self, prompt_tokens: int, reused_tokens: int, seconds: float) -> None:
        """A prompt was prefilled, except for its cached prefix, and its first token chosen."""

    def stepped(self, tokens: int) -> None:
        """A decoding step generated one token for each of this many branches."""

    def drafted(self, tokens: int, accepted: int) -> None:
        """A draft of this many tokens was verified, and the first `accepted` of them accepted."""

    def holds(self, running: int, waiting: int, kv_tokens: int, kv_usage: float) -> None:
        """The load between two steps: running branches, waiting requests, and tokens in the KV
        cache, also as a share of its size."""


class TextBackend(Protocol):
    """One loaded model that serves many requests at once, for any number of threads.

    Attributes:
        runtime: what computes, and why it was chosen, for the log.
    """

    runtime: str

    def submit(self, prompt: str | Sequence[int], params: Params, receiver: Receiver) -> bool:
        """Queue a request, and return before it is answered.

        Each of its `params.num_return_sequences` sequences ends with exactly one chunk that has a
        finish reason and the number of prompt tokens; or the whole request ends with an error, or,
        if it or the backend is cancelled, with one chunk whose finish reason is `cancelled`.

        Args:
            prompt: a text, or token ids.
            params: checked by `params.parse`, but not against the model.

        Returns:
            False if a queue is full; the receiver then gets nothing.

        Raises:
            InvalidRequest: the model cannot answer it, for example because the prompt is too long.
                What takes longer to check, the receiver gets as an error.
        """

    def close(self) -> None:
        """Cancel all requests, and end the threads."""


class CheckedBackend(ABC):
    """A `TextBackend` whose subclass queues requests that have been checked.

    Args:
        folder: an export.
        end_ids: the model's own.
        max_running: branches that run at a time.
        max_queue: requests that may wait, also for being tokenized or compiled.

    Attributes:
        runtime: what computes, and why it was chosen, for the log.
    """

    runtime: str

    def __init__(
        self,
        folder: Path,
        default_max_tokens: int,
        n_positions: int,
        vocab_size: int,
        end_ids: Sequence[int],
        max_running: int,
        max_queue: int,
    ) -> None:
        self.default_max_tokens, self.max_running = default_max_tokens, max_running
        self.n_positions, self.vocab_size, self.end_ids = n_positions, vocab_size, list(end_ids)
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.token_bytes = TokenBytes(self.tokenizer)
        self.grammars = Grammars(self.tokenizer, vocab_size, end_ids)
        self._limit = TokenLimit(n_positions, self.token_bytes.longest)
        self._encoding = _Preparation(ENCODERS, max_queue)
        self._compiling = _Preparation(COMPILERS, max_queue)

    @abstractmethod
    def queue(
        self, ids: Sequence[int], max_tokens: int, params: Params, receiver: Receiver
    ) -> bool:
        """Queue a request; returns False if the queue is full. One with `structured_outputs` comes
        from a thread that may take its time to compile them.

        Raises:
            InvalidRequest: the runtime does not support a parameter, or the grammar.
        """

    def submit(self, prompt: str | Sequence[int], params: Params, receiver: Receiver) -> bool:
        """See `TextBackend.submit`; what takes longer to check is a long text, and
        `structured_outputs`.

        Raises:
            InvalidRequest: the prompt is empty or too long, an id anywhere is out of range,
                `max_tokens` exceeds the room in the context, more branches are requested than may
                run at a time, or the runtime does not support a parameter.
        """
        # A long text would hold up Triton's calls for other requests while it is tokenized.
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            return self._encoding.start(receiver, lambda: self._submit(prompt, params, receiver))
        return self._submit(prompt, params, receiver)

    def _submit(self, prompt: str | Sequence[int], params: Params, receiver: Receiver) -> bool:
        # Ids, which a client may give itself: one outside the vocabulary would fail in the graph.
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest(
                    "text_input is empty", "give at least one character", Code.INVALID_VALUE
                )
            try:
                ids = self._limit.encode(
                    lambda text: encode_prompts(self.tokenizer, [text])[0], [prompt]
                )
            except TooManyTokens:
                raise InvalidRequest(
                    f"text_input has more tokens than the model's {self.n_positions} positions",
                    "shorten it",
                    Code.TOO_LONG,
                ) from None
        else:
            ids = list(prompt)
            if not ids:
                raise InvalidRequest(
                    "input_ids is empty", "give at least one token", Code.INVALID_VALUE
                )
            self._check_ids("input_ids", ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)

        # The answer has to fit into what the prompt leaves of the context.
        room, asked = self.n_positions - len(ids), params.max_tokens
        if room < (asked != 0):  # a prompt that is only read may fill it
            raise InvalidRequest(
                f"a prompt of {len(ids)} tokens leaves no room in the model's "
                f"{self.n_positions} positions",
                f"shorten it to {self.n_positions - 1} tokens or less",
                Code.TOO_LONG,
            )
        max_tokens = min(self.default_max_tokens, room) if asked is None else asked
        if max_tokens > room:
            raise InvalidRequest(
                f"a prompt of {len(ids)} tokens and max_tokens {max_tokens} exceed the model's "
                f"{self.n_positions} positions",
                f"lower max_tokens to {room} or less, or shorten the prompt",
                Code.TOO_LONG,
            )

        # More branches would never find room in the batch.
        if params.branches > self.max_running:
            is_beams = params.decode_strategy == "beam_search"
            name = "num_beams" if is_beams else "num_return_sequences"
            raise InvalidRequest(
                f"{name} {params.branches} exceeds the number of concurrent sequences, "
                f"{self.max_running}",
                f"lower {name}, or raise Serving.max_running",
                Code.INVALID_VALUE,
            )

        # Stop strings that are special tokens, so that `ignore_eos` does not exclude them.
        special = [
            i for stop in params.stop if (i := self.token_bytes.special_id(stop)) is not None
        ]
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *special))
        if not params.structured_outputs:
            return self.queue(ids, max_tokens, params, receiver)
        return self._compiling.start(
            receiver, lambda: self.queue(ids, max_tokens, params, receiver)
        )

    def close(self) -> None:
        """Cancel the requests that are not queued yet, and end the threads."""
        self._encoding.close()
        self._compiling.close()
        self.grammars.close()

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        limit = self.vocab_size
        if wrong := [i for i in ids if not 0 <= i < limit]:
            raise InvalidRequest(
                f"{name}: {wrong[0]} is outside the vocabulary",
                f"give ids from 0 to {limit - 1}",
                Code.INVALID_VALUE,
            )


class _Preparation:
    """Threads that prepare requests before these are queued.

    Args:
        count: threads.
        max_waiting: further requests that may wait for them.
    """

    def __init__(self, count: int, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(count)
        self._room = threading.Semaphore(count + max_waiting)
        self._is_open = True

    def start(self, receiver: Receiver, submit: Callable[[], bool]) -> bool:
        """Call `submit` on a thread, whose errors the receiver gets, unless the request is
        cancelled before; returns False immediately when there is no room."""
        if not self._room.acquire(blocking=False):
            return False

        def work() -> None:
            try:
                if receiver.cancelled() or not self._is_open:
                    receiver.deliver(Chunk("", [], "cancelled"))
                elif not submit():
                    raise UserError(
                        "the server is busy: the queue is full", "try again in a moment", Code.BUSY
                    )
            except Exception as error:
                receiver.deliver(error)
            finally:
                self._room.release()

        self._pool.submit(work)
        return True

    def close(self) -> None:
        """Cancel the requests that wait, and end the threads."""
        self._is_open = False
        self._pool.shutdown()
