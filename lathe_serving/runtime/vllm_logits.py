"""The process in which `lathe.export.engines` asks vLLM for logits: it runs in vLLM's environment.

`python -m lathe_serving.runtime.vllm_logits FOLDER FD` loads a Hugging Face folder, sends vLLM's
version to the connection FD, and answers requests (method, arguments) from there.
"""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import UserError
from lathe_serving.runtime.vllm_engine import ENVIRONMENT, cpu_settings, folder_for_sockets


class LogitsRecorder:
    """A base that vLLM gives its worker processes. It keeps the logits of a prompt, which vLLM
    returns as Python objects only, one for each position and token of the vocabulary."""

    model_runner: Any
    rank: int

    def record(self) -> None:
        """Keep the logits of the next prompt."""
        self._kept: list[NDArray[np.float32]] = []
        model = self.model_runner.model

        def keep(_module: Any, _inputs: Any, hidden: Any) -> None:
            self._kept.append(model.compute_logits(hidden).float().cpu().numpy())

        self._hook = model.register_forward_hook(keep)

    def write_logits(self, n_tokens: int, path: str) -> None:
        """Write the logits (T, V) of that prompt as a NumPy file."""
        self._hook.remove()
        if self.rank == 0:
            # Without what a GPU's batch was padded with.
            np.save(path, np.concatenate(self._kept)[:n_tokens])


class VLLM:
    """A model in vLLM, set up as in `VLLMEngine`."""

    def __init__(self, folder: str) -> None:
        import vllm
        from vllm.platforms import current_platform

        settings: dict[str, Any] = {}
        if current_platform.is_cpu():
            settings = {**cpu_settings(Path(folder)), "kv_cache_memory_bytes": 2**30}
        with folder_for_sockets():
            self._llm = vllm.LLM(
                folder,
                enable_prefix_caching=False,
                worker_extension_cls="lathe_serving.runtime.vllm_logits.LogitsRecorder",
                generation_config="vllm",
                max_num_seqs=1,
                **settings,
            )
        self._sampling: Any = vllm.SamplingParams
        self.version = f"vllm {vllm.__version__}"

    def logits(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits (1, T, V) of tokens (1, T)."""
        ids: list[int] = tokens[0].tolist()
        self._llm.collective_rpc("record")
        self._generate(ids, self._sampling(max_tokens=1, temperature=0, detokenize=False))
        with TemporaryDirectory() as scratch:
            path = f"{scratch}/logits.npy"
            self._llm.collective_rpc("write_logits", args=(len(ids), path))
            logits: NDArray[np.float32] = np.load(path)
        return logits[None]

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
