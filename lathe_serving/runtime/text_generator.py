"""Text generation with an exported model: tokenizer, limits and running batch, without a server.

Needs only numpy, onnxruntime and tokenizers; for OpenVINO also openvino and onnx, and for
structured output llguidance.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from lathe_base.errors import UserError
from lathe_serving.runtime.batcher import Batcher
from lathe_serving.runtime.beams import Beams
from lathe_serving.runtime.contract import Receiver, TextBackend, Watcher
from lathe_serving.runtime.grammar import Grammars
from lathe_serving.runtime.open_model import OPENERS, REFERENCE_RUNTIME, open_model
from lathe_serving.runtime.params import Params
from lathe_serving.runtime.prompt import TokenLimit, TooManyTokens, encode_prompts
from lathe_serving.runtime.protocol import BUSY, Chunk, InvalidRequest
from lathe_serving.runtime.sequence_group import Request, Samples, Vocabulary
from lathe_serving.runtime.text import TokenBytes

COMPILERS = 2  # constraints that are compiled at a time
ENCODERS = 2  # long texts that are tokenized at a time
LONG_TEXT = 16_384  # characters; a shorter text is tokenized in a few milliseconds


class TextGenerator:
    """One loaded model that serves many requests at once.

    Args:
        folder: an export.
        threads: number of compute threads; 0 means one per core.
        runtime: see `open_model`.
        max_running, max_queue, prefix_bytes, speculates, watcher: see `Batcher`.

    Attributes:
        runtime: the runtime in use, and why it was chosen, for the log.
    """

    def __init__(
        self,
        folder: Path,
        default_max_tokens: int,
        threads: int = 0,
        max_running: int = 8,
        max_queue: int = 64,
        prefix_bytes: int = 0,
        speculates: bool = False,
        watcher: Watcher | None = None,
        runtime: str = REFERENCE_RUNTIME,
    ) -> None:
        self.default_max_tokens = default_max_tokens
        opened = open_model(folder, threads, runtime, max_running)
        self.model = opened.model
        self.runtime = f"{self.model.runtime}: {opened.reason}"
        self.n_positions = self.model.n_positions
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.token_bytes = TokenBytes(self.tokenizer)
        self._vocabulary = Vocabulary(self.model.vocab_size, self.model.end_ids, self.token_bytes)
        self._grammars = Grammars(self.tokenizer, self.model.vocab_size, self.model.end_ids)
        self._limit = TokenLimit(self.n_positions, self.token_bytes.longest)
        self._encoding = _Preparation(ENCODERS, max_queue)
        self._compiling = _Preparation(COMPILERS, max_queue)
        self._batcher = Batcher(
            self.model, max_running, max_queue, prefix_bytes, speculates, watcher
        )

    def submit(self, prompt: str | Sequence[int], params: Params, receiver: Receiver) -> bool:
        """See `TextBackend.submit`; what takes longer to check is a long text, and
        `structured_outputs`.

        Raises:
            InvalidRequest: the prompt is empty or too long, an id anywhere is out of range,
                `max_tokens` exceeds the room in the context, or more branches are requested than
                may run at a time.
        """
        # A long text would hold up Triton's calls for other requests while it is tokenized.
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            return self._encoding.start(receiver, lambda: self._submit(prompt, params, receiver))
        return self._submit(prompt, params, receiver)

    def _submit(self, prompt: str | Sequence[int], params: Params, receiver: Receiver) -> bool:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("text_input is empty", "give at least one character")
            try:
                ids = self._limit.encode(
                    lambda text: encode_prompts(self.tokenizer, [text])[0], [prompt]
                )
            except TooManyTokens:
                raise InvalidRequest(
                    f"text_input has more tokens than the model's {self.n_positions} positions",
                    "shorten it",
                ) from None
        else:
            ids = list(prompt)
            if not ids:
                raise InvalidRequest("input_ids is empty", "give at least one token")
            self._check_ids("input_ids", ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        max_tokens = self._max_tokens(len(ids), params.max_tokens)
        kind = Beams if params.decode_strategy == "beam_search" else Samples
        if params.branches > self._batcher.max_running:
            name = "num_beams" if kind is Beams else "num_return_sequences"
            raise InvalidRequest(
                f"{name} {params.branches} exceeds the number of concurrent sequences, "
                f"{self._batcher.max_running}",
                f"lower {name}, or raise Serving.max_running",
            )
        # Stop strings that are special tokens, so that `ignore_eos` does not exclude them.
        special = [
            i for stop in params.stop if (i := self.token_bytes.special_id(stop)) is not None
        ]
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *special))
        request = Request(ids, max_tokens, params, self._vocabulary, receiver)
        if not params.structured_outputs:
            return self._batcher.submit(kind(request))

        def submit_constrained() -> bool:
            grammar = self._grammars.start(params.structured_outputs, params.stop_token_ids)
            return self._batcher.submit(Samples(replace(request, grammar=grammar)))

        return self._compiling.start(receiver, submit_constrained)

    def close(self) -> None:
        """Cancel all requests."""
        self._encoding.close()
        self._compiling.close()
        self._grammars.close()
        self._batcher.close()

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        limit = self.model.vocab_size
        if wrong := [i for i in ids if not 0 <= i < limit]:
            raise InvalidRequest(
                f"{name}: {wrong[0]} is outside the vocabulary", f"give ids from 0 to {limit - 1}"
            )

    def _max_tokens(self, n_prompt: int, asked: int | None) -> int:
        room = self.n_positions - n_prompt
        if room < (asked != 0):
            raise InvalidRequest(
                f"a prompt of {n_prompt} tokens leaves no room in the model's "
                f"{self.n_positions} positions",
                f"shorten it to {self.n_positions - 1} tokens or less",
            )
        if asked is None:
            return min(self.default_max_tokens, room)
        if asked > room:
            raise InvalidRequest(
                f"a prompt of {n_prompt} tokens and max_tokens {asked} exceed the model's "
                f"{self.n_positions} positions",
                f"lower max_tokens to {room} or less, or shorten the prompt",
            )
        return asked


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
                    raise UserError(f"{BUSY}: the queue is full", "try again in a moment")
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


BACKENDS: Mapping[str, Callable[..., TextBackend]] = dict.fromkeys(
    (REFERENCE_RUNTIME, *OPENERS, "auto"), TextGenerator
)
"""What serves a model with each value of `Serving.runtime`: called with the arguments of
`TextGenerator`."""
