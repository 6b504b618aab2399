"""The contracts of what generates, from the server's side to the processor's.

1. `TextBackend`, here: prompts become chunks of text. Triton's Python backend knows nothing else of
   a runtime. `text_generator.TextGenerator` implements it with a `Batcher`, and
   `vllm_engine.VLLMEngine` with vLLM's scheduler; `checked_backend.CheckedBackend` checks the
   requests of both. They are registered in `text_generator.BACKENDS`, and tested by
   `tests/serve/runtime/test_contract.py`.
2. `sequence_group.SequenceGroup`: how one request of the running batch chooses its next tokens from
   logits. `Samples` and `beams.Beams` implement it.
3. `exported_model.ExportedModel`: how a graph computes logits, and keeps keys and values. It checks
   the arguments and states the shapes of its six abstract methods; `session.OnnxModel`,
   `single_stream.SingleStreamModel` and `openvino_model.OpenVINOModel` implement these. They are
   registered in `open_model.OPENERS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lathe_serving.runtime.params import Params
from lathe_serving.runtime.protocol import Chunk


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
