"""Run an exported model with onnxruntime; the KV cache is updated in place between steps.

Imports only numpy and onnxruntime, which the server's environment has.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lathe.errors import UserError

MODEL = "model.onnx"
METADATA = "export.json"
NEEDED = ("n_head", "head_dim", "n_positions", "vocab_size", "eos_id")
CPUINFO = Path("/proc/cpuinfo")
PLAIN_ATTENTION = "ORT_GQA_DISABLE_FLASH_ATTENTION"


@dataclass
class KVCache:
    """Keys and values of a batch, at most `capacity` tokens per row.

    Attributes:
        keys, values: per layer (batch, n_head_i, capacity, head_dim), float32 or float16 as the
            graph computes; row b holds `lengths[b]` tokens, what lies after them is never read.
        lengths: int64 (batch,).
    """

    keys: list[NDArray[np.floating[Any]]]
    values: list[NDArray[np.floating[Any]]]
    lengths: NDArray[np.int64]
    capacity: int
    binding: Any = field(repr=False)

    def permute(self, rows: Sequence[int], sources: Sequence[int]) -> None:
        """Copy to `rows[i]` the tokens of `sources[i]`, all at once."""
        moves = [(row, source) for row, source in zip(rows, sources, strict=True) if row != source]
        if not moves:
            return
        to, of = (list(part) for part in zip(*moves, strict=True))
        longest = int(self.lengths[of].max())
        for buffer in (*self.keys, *self.values):
            buffer[to, :, :longest] = buffer[of, :, :longest]
        self.lengths[to] = self.lengths[of]


class OnnxModel:
    """An exported folder (`model.onnx`, `export.json`) opened for inference on the CPU.

    A cache must not be used by several threads at once; any number of caches may exist.

    Args:
        folder: output of the export stage.
        threads: onnxruntime's intra-op threads; 0 means one per core.

    Raises:
        UserError: the folder is not an export, or its graph is damaged.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        self.folder = Path(folder)
        self.metadata: dict[str, Any] = _read_metadata(self.folder)
        self.session = open_session(self.folder / MODEL, threads)
        types = {node.name: node.type for node in self.session.get_inputs()}
        self.dtype = np.float16 if types["past_key_0"] == "tensor(float16)" else np.float32
        self.n_head: list[int] = self.metadata["n_head"]
        self.head_dim: int = self.metadata["head_dim"]
        self.n_positions: int = self.metadata["n_positions"]
        self.vocab_size: int = self.metadata["vocab_size"]
        self.eos_id: int = self.metadata["eos_id"]

    def start(self, batch: int, capacity: int | None = None) -> KVCache:
        """Make an empty cache for `batch` rows of at most `capacity` tokens (default
        n_positions)."""
        capacity = capacity or self.n_positions
        if not 0 < capacity <= self.n_positions:
            raise ValueError(f"capacity {capacity} is not within 1..{self.n_positions}")
        shapes = [(batch, n_head, capacity, self.head_dim) for n_head in self.n_head]
        keys = [np.zeros(shape, self.dtype) for shape in shapes]
        values = [np.zeros(shape, self.dtype) for shape in shapes]
        return self._bound(keys, values, np.zeros(batch, np.int64), capacity)

    def rows(self, cache: KVCache, first: int, last: int) -> KVCache:
        """A cache of rows `first` to `last` that shares their memory."""
        part = slice(first, last)
        keys, values = [key[part] for key in cache.keys], [value[part] for value in cache.values]
        return self._bound(keys, values, cache.lengths[part], cache.capacity)

    def _bound(
        self,
        keys: list[NDArray[np.floating[Any]]],
        values: list[NDArray[np.floating[Any]]],
        lengths: NDArray[np.int64],
        capacity: int,
    ) -> KVCache:
        binding = self.session.io_binding()
        for part, buffers in (("key", keys), ("value", values)):
            for i, buffer in enumerate(buffers):
                place = ("cpu", 0, self.dtype, buffer.shape, buffer.ctypes.data)
                # Past and present share one buffer: attention appends in place.
                binding.bind_input(f"past_{part}_{i}", *place)
                binding.bind_output(f"present_{part}_{i}", *place)
        return KVCache(keys, values, lengths, capacity, binding)

    def step(
        self, cache: KVCache, tokens: NDArray[np.int64], lengths: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Append tokens to every row of the cache.

        Args:
            cache: grows by `lengths`.
            tokens: int64 (B, T), rows right-padded. T > 1 needs an empty cache, or B = 1.
            lengths: int64 (B,), number of valid tokens in each row; default all T.

        Returns:
            float32 (B, V), logits after the last valid token of each row.
        """
        batch, length = tokens.shape
        lengths = np.full(batch, length) if lengths is None else np.asarray(lengths)
        _check_lengths(lengths, batch, length)
        if length > 1 and batch > 1 and cache.lengths.any():
            raise ValueError("several tokens a row need an empty cache or a batch of one")
        totals = cache.lengths + lengths
        # The padding of a short row is written too, and overwritten by the row's next tokens.
        if int(cache.lengths.max()) + length > cache.capacity:
            raise ValueError(f"{int(totals.max())} tokens exceed the cache's {cache.capacity}")
        logits: NDArray[np.float32] = self._run(cache, tokens, totals, lengths[:, None] - 1)[:, 0]
        return logits

    def read(self, cache: KVCache, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append tokens (T,) to a cache of one row; returns logits (T, V) after each of them."""
        totals = cache.lengths + len(tokens)
        if int(totals[0]) > cache.capacity:
            raise ValueError(f"{int(totals[0])} tokens exceed the cache's {cache.capacity}")
        every = np.arange(len(tokens))[None]
        logits: NDArray[np.float32] = self._run(cache, tokens[None], totals, every)[0]
        return logits

    def _run(
        self,
        cache: KVCache,
        tokens: NDArray[np.int64],
        totals: NDArray[np.int64],
        index: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Logits (B, k, V) at positions `index` (B, k) of `tokens` (B, T)."""
        for name, value in _inputs(tokens, cache.lengths, totals, index).items():
            cache.binding.bind_cpu_input(name, value)
        logits = np.empty((*index.shape, self.vocab_size), np.float32)
        cache.binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self.session.run_with_iobinding(cache.binding)
        cache.lengths[:] = totals
        return logits

    def logits(
        self,
        tokens: NDArray[np.int64],
        lengths: NDArray[np.int64] | None = None,
        index: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32]:
        """Logits at every position, or at those of `index`, without a cache.

        Args:
            tokens: int64 (B, T), rows right-padded.
            lengths: int64 (B,); default T.
            index: int64 (B, k) positions; default all T.

        Returns:
            float32 (B, k, V); meaningless at padding.
        """
        batch, length = tokens.shape
        lengths = np.full(batch, length) if lengths is None else np.asarray(lengths)
        _check_lengths(lengths, batch, length)
        if length > self.n_positions:
            raise ValueError(f"{length} tokens exceed n_positions {self.n_positions}")
        if index is None:
            index = np.tile(np.arange(length), (batch, 1))
        (logits,) = self.session.run(["logits"], self.feeds(tokens, lengths, index))
        assert isinstance(logits, np.ndarray)
        return logits

    def feeds(
        self, tokens: NDArray[np.int64], lengths: NDArray[np.int64], index: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """All graph inputs for tokens (B, T) with an empty past and logits at `index`."""
        batch = len(tokens)
        feeds = _inputs(tokens, np.zeros(batch, np.int64), lengths, index)
        for i, n_head in enumerate(self.n_head):
            empty = np.zeros((batch, n_head, 0, self.head_dim), self.dtype)
            feeds[f"past_key_{i}"] = feeds[f"past_value_{i}"] = empty
        return feeds

    def greedy(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop_at_eos: bool = True
    ) -> list[list[int]]:
        """Greedy continuations of a batch of prompts.

        Returns only the new tokens: up to `new_tokens` for each prompt, fewer where it reaches EOS
        (not included) or `n_positions`.
        """
        tokens, lengths = pad(prompts)
        capacity = min(self.n_positions, int(lengths.max()) + new_tokens)
        cache = self.start(len(prompts), capacity)
        logits = self.step(cache, tokens, lengths)
        out: list[list[int]] = [[] for _ in prompts]
        alive = [True] * len(prompts)
        while True:
            best = logits.argmax(axis=1)
            for row, token in enumerate(best.tolist()):
                alive[row] = alive[row] and not (stop_at_eos and token == self.eos_id)
                if alive[row]:
                    out[row].append(token)
                    room = capacity - int(cache.lengths[row])
                    alive[row] = len(out[row]) < new_tokens and room > 0
            if not any(alive):
                return out
            # A finished row stays in place: its length is reset and its output ignored.
            idle = ~np.array(alive)
            cache.lengths[idle] = np.minimum(cache.lengths[idle], capacity - 1)
            logits = self.step(cache, best[:, None])


def open_session(
    model: Path | bytes, threads: int = 0, optimized: Path | None = None
) -> ort.InferenceSession:
    """Load a graph on the CPU, from a file or serialized; the optimized graph that runs is written
    to `optimized`, if given.

    Raises:
        UserError: the file is missing or damaged.
    """
    # Read by onnxruntime when it makes a session. Its tiled attention (1.31) takes twice as long as
    # the plain one on the prompts that a GPT of this size can have.
    os.environ.setdefault(PLAIN_ATTENTION, "1")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Idle threads spin within a run, where it pays off, but not between runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # A float input of an int8 weight stays float32; by default it would be rounded to int8 too.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if saturates(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""):
        # Exact, but several times slower on other CPUs: it disables the fast kernels.
        options.add_session_config_entry("session.x64quantprecision", "1")
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    try:
        source = model if isinstance(model, bytes) else str(model)
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        first = str(error).splitlines()[0]
        what = "graph" if isinstance(model, bytes) else model
        raise UserError(f"{what}: onnxruntime cannot load it: {first}", "export again") from error


def saturates(cpuinfo: str) -> bool:
    """Whether the CPU that `/proc/cpuinfo` describes is an x86 without VNNI: onnxruntime's
    uint8 x int8 kernel then adds pairs of products in 16 bits, which overflow."""
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    return bool(flags) and "vnni" not in flags


def pad(
    rows: Sequence[Sequence[int] | NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Right-pad token lists with 0 -> tokens int64 (B, T), lengths int64 (B,)."""
    lengths = np.array([len(row) for row in rows], np.int64)
    tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, lengths


def _inputs(
    tokens: NDArray[np.int64],
    past: NDArray[np.int64],
    totals: NDArray[np.int64],
    logits_index: NDArray[np.int64],
) -> dict[str, NDArray[Any]]:
    """Graph inputs except the cache; `past` and `totals` (B,): tokens of a row before and after."""
    length = tokens.shape[1]
    # The graph recognizes prefill by the padded length being equal to the total.
    total = length if not past.any() else int(totals.max())
    return {
        "input_ids": np.ascontiguousarray(tokens, np.int64),
        "position_ids": past[:, None] + np.arange(length),
        "seqlens_k": (totals - 1).astype(np.int32),
        "total_sequence_length": np.array(total, np.int32),
        "logits_index": np.ascontiguousarray(logits_index, np.int64),
    }


def _check_lengths(lengths: NDArray[np.int64], batch: int, length: int) -> None:
    if lengths.shape != (batch,) or lengths.min() < 1 or lengths.max() > length:
        raise ValueError(f"lengths {lengths.tolist()} do not fit tokens of shape {batch, length}")


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: no {METADATA}", "give the output folder of the export"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}", "export again") from None
    if not isinstance(metadata, dict) or not metadata.keys() >= set(NEEDED):
        raise UserError(f"{path}: not the metadata of an export", "export again")
    return metadata
