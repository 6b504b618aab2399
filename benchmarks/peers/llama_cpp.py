"""llama.cpp through its C API, with a GGUF file without vocabulary."""

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from peers.engine import Engine, Ids, log_likelihoods
from peers.weights import Matrix, Norm, Weights

CONTEXT, ROWS = 1024, 16
BATCH = 2048  # tokens per step
FUSED, INTERLEAVED = ("gpt2",), ("llama",)  # layout of queries and keys by architecture
TYPES = {
    "Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": llama.LLAMA_FTYPE_MOSTLY_Q4_K_M,
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

    def __init__(self, folder: Path, threads: int) -> None:
        llama.llama_backend_init()
        path = bytes(folder / "model.gguf")
        self.model = llama.llama_model_load_from_file(path, llama.llama_model_default_params())
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_seq_max = CONTEXT * ROWS, ROWS
        options.n_batch = options.n_ubatch = BATCH
        options.n_threads = options.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, options)
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(BATCH, 0, 1)

    def prefill(self, prompt: Ids) -> None:
        self.decode(prompt[None], 0, lambda: None)

    def decode(self, prompts: Ids, steps: int, tick: Callable[[], None]) -> Ids:
        self._forget()
        tokens = [self._read(prompts, 0, slice(-1, None)).argmax(axis=1)]
        tick()
        for i in range(steps):
            logits = self._read(tokens[-1][:, None], prompts.shape[1] + i, slice(None))
            tokens.append(logits.argmax(axis=1))
            tick()
        return np.stack(tokens, axis=1)

    def log_likelihoods(self, tokens: Ids) -> NDArray[np.float64]:
        self._forget()
        return log_likelihoods(self._read(tokens[None], 0, slice(None)), tokens)

    def _forget(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), False)

    def _read(self, tokens: Ids, past: int, wanted: slice) -> NDArray[np.float32]:
        """Append tokens (B, T); returns logits (n, V) at the `wanted` positions of every row."""
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
    """Write a GGUF file of float32 weights, with the tied head stored once."""
    file = gguf.GGUFWriter(path, w.family.model_type)
    file.add_context_length(w.size("n_positions"))
    file.add_embedding_length(w.size("n_embd"))
    file.add_block_count(w.n_layer)
    file.add_feed_forward_length(w.n_inner)
    file.add_head_count(w.n_head)
    file.add_file_type(llama.LLAMA_FTYPE_ALL_F32)
    file.add_tokenizer_model("no_vocab")
    file.add_vocab_size(w.size("vocab_size"))
    if w.theta is None:
        file.add_layer_norm_eps(w.epsilon)
    else:
        file.add_layer_norm_rms_eps(w.epsilon)
        file.add_head_count_kv(w.n_kv_head)
        file.add_rope_dimension_count(w.head_dim)
        file.add_rope_freq_base(w.theta)
    for name, part in tensors(w):
        file.add_tensor(f"{name}.weight", part.weight)
        if part.bias is not None:
            file.add_tensor(f"{name}.bias", part.bias)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def tensors(w: Weights) -> Iterator[tuple[str, Matrix | Norm]]:
    """Yield weights by their names in GGUF."""
    yield "token_embd", Matrix(w.table, None)
    if w.positions is not None:
        yield "position_embd", Matrix(w.positions, None)
    yield "output_norm", w.final_norm
    for i in range(w.n_layer):
        block = w.block(i)
        found: dict[str, Matrix | Norm] = {
            "attn_norm": block.attention_norm,
            "attn_output": block.out,
            "ffn_norm": block.ffn_norm,
            "ffn_up": block.up,
            "ffn_down": block.down,
        }
        if block.gate is not None:
            found["ffn_gate"] = block.gate
        if w.family.model_type in FUSED:
            found["attn_qkv"] = Matrix.joined([block.query, block.key, block.value])
        else:
            query, key = block.query, block.key
            if w.family.model_type in INTERLEAVED:
                query, key = interleaved(query, w.n_head), interleaved(key, w.n_kv_head)
            found |= {"attn_q": query, "attn_k": key, "attn_v": block.value}
        for name, part in found.items():
            yield f"blk.{i}.{name}", part


def interleaved(matrix: Matrix, heads: int) -> Matrix:
    """Make features that are rotated together adjacent; in Hugging Face they are half a head
    apart."""
    assert matrix.bias is None
    halves = matrix.weight.reshape(heads, 2, -1, matrix.weight.shape[1])
    return Matrix(np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(matrix.weight.shape), None)
