"""Text generation with an exported model's graph, and the runtimes by their names.

Needs only numpy, onnxruntime and tokenizers; for OpenVINO also openvino and onnx, and for
structured output llguidance.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lathe_base.parameters import Params
from lathe_serving.runtime.batcher import Batcher
from lathe_serving.runtime.contract import CheckedBackend, Receiver, TextBackend, Watcher
from lathe_serving.runtime.open_model import OPENERS, REFERENCE_RUNTIME, open_model
from lathe_serving.runtime.sequence_group import Beams, Request, Samples, Vocabulary


class TextGenerator(CheckedBackend):
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
        opened = open_model(folder, threads, runtime, max_running)
        self.model = model = opened.model
        self.runtime = f"{model.runtime}: {opened.reason}"
        super().__init__(
            *(folder, default_max_tokens, model.n_positions, model.vocab_size, model.end_ids),
            *(max_running, max_queue),
        )
        self._vocabulary = Vocabulary(model.vocab_size, model.end_ids, self.token_bytes)
        self._batcher = Batcher(model, max_running, max_queue, prefix_bytes, speculates, watcher)

    def queue(
        self, ids: Sequence[int], max_tokens: int, params: Params, receiver: Receiver
    ) -> bool:
        """See `CheckedBackend.queue`."""
        grammar = None
        if params.structured_outputs:
            grammar = self.grammars.start(params.structured_outputs, params.stop_token_ids)
        request = Request(ids, max_tokens, params, self._vocabulary, receiver, grammar)
        kind = Beams if params.decode_strategy == "beam_search" else Samples
        return self._batcher.submit(kind(request))

    def close(self) -> None:
        """Cancel all requests."""
        super().close()
        self._batcher.close()


def _vllm(*arguments: Any, **options: Any) -> TextBackend:
    from lathe_serving.runtime.vllm_engine import VLLMEngine  # it has an environment of its own

    return VLLMEngine(*arguments, **options)


BACKENDS: Mapping[str, Callable[..., TextBackend]] = {
    **dict.fromkeys((REFERENCE_RUNTIME, *OPENERS, "auto"), TextGenerator),
    "vllm": _vllm,
}
"""What serves a model with each value of `Serving.runtime`: called with the arguments of
`TextGenerator`."""
