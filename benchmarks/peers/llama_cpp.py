"""llama.cpp by its C interface, on a GGUF file without a vocabulary."""

from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from peers.engine import Engine, Ids, Weights, log_likelihoods

CONTEXT, ROWS = 1024, 8
TYPES = {
    "Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": llama.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
BLOCK = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


class LlamaCpp(Engine):
    version = f"llama.cpp of llama-cpp-python {llama.__version__}"

    @staticmethod
    def convert(model: Path, calibration: Ids, weights: str, output: Path) -> None:
        whole, made = output / "whole.gguf", output / "model.gguf"
        write(Weights.read(model), whole)
        options = llama.llama_model_quantize_default_params()
        options.ftype, options.nthread = TYPES[weights], 1
        error = llama.llama_model_quantize(bytes(whole), bytes(made), options)
        if error:
            raise RuntimeError(f"llama_model_quantize: {error}")
        whole.unlink()

    def __init__(self, folder: Path) -> None:
        llama.llama_backend_init()
        path = bytes(folder / "model.gguf")
        self.model = llama.llama_model_load_from_file(path, llama.llama_model_default_params())
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_seq_max = CONTEXT * ROWS, ROWS
        options.n_batch = options.n_ubatch = CONTEXT
        options.n_threads = options.n_threads_batch = 1
        self.context = llama.llama_init_from_model(self.model, options)
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(CONTEXT, 0, 1)

    def prefill(self, prompt: Ids) -> None:
        self.decode(prompt[None], 0, lambda: None)

    def decode(self, prompts: Ids, steps: int, tick: Callable[[], None]) -> None:
        self._forget()
        logits = self._read(prompts, 0, slice(-1, None))
        tick()
        for i in range(steps):
            logits = self._read(logits.argmax(axis=1)[:, None], prompts.shape[1] + i, slice(None))
            tick()

    def log_likelihoods(self, tokens: Ids) -> NDArray[np.float64]:
        self._forget()
        return log_likelihoods(self._read(tokens[None], 0, slice(None)), tokens)

    def _forget(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), False)

    def _read(self, tokens: Ids, past: int, wanted: slice) -> NDArray[np.float32]:
        """Append tokens (B, T); the logits of `wanted` positions of every row, (n, V)."""
        is_wanted = np.zeros(tokens.shape, np.int8)
        is_wanted[:, wanted] = 1
        for n, ((row, place), token) in enumerate(np.ndenumerate(tokens)):
            self.batch.token[n], self.batch.pos[n] = int(token), past + place
            self.batch.n_seq_id[n], self.batch.seq_id[n][0] = 1, row
            self.batch.logits[n] = int(is_wanted[row, place])
        self.batch.n_tokens = tokens.size
        if error := llama.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode: {error}")
        shape = int(is_wanted.sum()), self.n_vocab
        return np.ctypeslib.as_array(llama.llama_get_logits(self.context), shape)


def write(w: Weights, path: Path) -> None:
    """A GGUF file of float32 weights, the tied head stored once."""
    file = gguf.GGUFWriter(path, "gpt2")
    file.add_context_length(w.config["n_positions"])
    file.add_embedding_length(w.config["n_embd"])
    file.add_block_count(w.n_layer)
    file.add_feed_forward_length(w.config["n_inner"] or 4 * w.config["n_embd"])
    file.add_head_count(w.n_head)
    file.add_layer_norm_eps(w.config["layer_norm_epsilon"])
    file.add_file_type(llama.LLAMA_FTYPE_ALL_F32)
    file.add_tokenizer_model("no_vocab")
    file.add_vocab_size(w.config["vocab_size"])
    file.add_tensor("token_embd.weight", w["wte.weight"])
    file.add_tensor("position_embd.weight", w["wpe.weight"])
    names = {"ln_f": "output_norm"}
    names |= {f"h.{i}.{k}": f"blk.{i}.{v}" for i in range(w.n_layer) for k, v in BLOCK.items()}
    for ours, theirs in names.items():
        is_norm = "ln_" in ours
        file.add_tensor(f"{theirs}.weight", w[f"{ours}.weight"] if is_norm else w.linear(ours))
        file.add_tensor(f"{theirs}.bias", w[f"{ours}.bias"])
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
