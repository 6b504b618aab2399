"""The process in which `lathe.export.engines` asks vLLM for logits: it runs in vLLM's environment.

`python -m lathe_serving.runtime.vllm_logits FOLDER FD` loads a Hugging Face folder, sends vLLM's
version to the connection FD, and answers requests (method, arguments) from there.
"""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import UserError
from lathe_serving.runtime.vllm_engine import ENVIRONMENT, cpu_settings


class VLLM:
    """A model in vLLM, set up as in `VLLMEngine`."""

    def __init__(self, folder: str) -> None:
        import vllm
        from vllm.platforms import current_platform

        settings: dict[str, Any] = {}
        if current_platform.is_cpu():
            settings = {**cpu_settings(Path(folder)), "kv_cache_memory_bytes": 2**30}
        self._llm = vllm.LLM(
            folder,
            max_logprobs=-1,
            enable_prefix_caching=False,
            generation_config="vllm",
            max_num_seqs=1,
            **settings,
        )
        self._sampling: Any = vllm.SamplingParams
        self.version = f"vllm {vllm.__version__}"

    def logits(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Log-probabilities (1, T, V) after each of tokens (1, T): logits but for a constant at
        each position, which neither divergences nor differences of two tokens contain."""
        sampling = self._sampling(
            max_tokens=1, temperature=0, logprobs=-1, prompt_logprobs=-1, detokenize=False
        )
        (output,) = self._generate(tokens[0].tolist(), sampling)
        rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        scores = np.empty((1, len(rows), len(rows[0])), np.float32)
        for row, entries in zip(scores[0], rows, strict=True):
            row[list(entries)] = [entry.logprob for entry in entries.values()]
        return scores

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        """The most likely next token, n times."""
        sampling = self._sampling(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False)
        (output,) = self._generate(prompt, sampling)
        return list(output.outputs[0].token_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens at its beginning or end."""
        return list(self._llm.get_tokenizer().encode(text, add_special_tokens=False))

    def _generate(self, ids: list[int], sampling: Any) -> Any:
        return self._llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)


def main() -> None:
    """Answer requests until the other end is closed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    pipe = Connection(int(sys.argv[2]))
    try:
        model = VLLM(sys.argv[1])
    except UserError as error:
        sys.exit(f"error: {error}")
    pipe.send(model.version)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(model, method)(*arguments))


if __name__ == "__main__":
    main()
