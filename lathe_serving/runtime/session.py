"""Runs an exported model, or another graph, with onnxruntime.

Imports only numpy and onnxruntime, which the server's environment has.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError
from lathe_serving.runtime.exported_model import (
    MODEL,
    PREFIX_LENGTH,
    WEIGHTS,
    ExportedModel,
    Ids,
    Logits,
    x86_flags,
)
from lathe_serving.runtime.kv_cache import KeyValues, KVCache, MixedCaches

CPUINFO = Path("/proc/cpuinfo")
ROUNDED_INPUT = 4  # `accuracy_level` of `MatMulNBits` with inputs in 8 bits
PLAIN_ATTENTION = "ORT_GQA_DISABLE_FLASH_ATTENTION"


def open_session(
    model: Path | bytes,
    threads: int = 0,
    optimized: Path | None = None,
    folder: Path | None = None,
) -> ort.InferenceSession:
    """Load a graph on the CPU.

    Args:
        model: a file, or a serialized graph.
        threads: number of compute threads; 0 means one per core.
        optimized: where to write the optimized graph that runs, and its weights beside it.
        folder: of the weights of a serialized graph that are in a file of their own.

    Raises:
        UserError: the file is missing or corrupt.
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
        weights = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{weights}_file_name", WEIGHTS)
        options.add_session_config_entry(f"{weights}_min_size_in_bytes", "1024")
    if folder is not None:
        entry = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(entry, str(folder))
    try:
        source = model if isinstance(model, bytes) else str(model)
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        first = str(error).splitlines()[0]
        what = "graph" if isinstance(model, bytes) else model
        raise UserError(
            f"{what}: onnxruntime cannot load it: {first}", "export again", Code.CORRUPT
        ) from error


def saturates(cpuinfo: str) -> bool:
    """Whether the CPU in `/proc/cpuinfo` is an x86 without VNNI, where onnxruntime's uint8 x int8
    kernel adds pairs of products in 16 bits, which overflow."""
    flags = x86_flags(cpuinfo)
    return bool(flags) and not any("vnni" in flag for flag in flags)


@dataclass
class ContiguousCache(KVCache):
    """onnxruntime's layout: buffers (batch, n_kv_head_i, capacity, head_dim), float32 or float16 as
    the graph computes, or int8.

    Attributes:
        single_stream: for `SingleStreamModel`, with one row: the same memory, bound to its second
            graph.
    """

    binding: Any = field(repr=False)
    single_stream: "ContiguousCache | None" = field(default=None, repr=False)

    def _copy(self, buffer: NDArray[Any], to: list[int], of: list[int], n: int) -> None:
        buffer[to, :, :n] = buffer[of, :, :n]

    def _get(self, buffer: NDArray[Any], first: int, n: int) -> KeyValues:
        return buffer[0, :, first : first + n]

    def _set(self, buffer: NDArray[Any], first: int, tokens: KeyValues) -> None:
        buffer[0, :, first : first + tokens.shape[1]] = tokens


class OnnxModel(ExportedModel):
    """An export run by onnxruntime; see `ExportedModel`.

    A cache must not be used by several threads at once; any number of caches may exist.

    Args:
        folder: output of the export stage.
        threads: onnxruntime's intra-op threads; 0 means one per core.
        session: an open session of the folder's graph, or of one with the same inputs and outputs.
    """

    runtime = "onnxruntime"

    def __init__(self, folder: Path, threads: int = 0, session: Any = None) -> None:
        super().__init__(folder)
        self.session = session or open_session(self.folder / MODEL, threads)
        types = {node.name: node.type for node in self.session.get_inputs()}
        cache_types = {"tensor(float16)": np.float16, "tensor(int8)": np.int8}
        self.cache_dtype: type = cache_types.get(types["past_key_0"], np.float32)
        self.dtype = np.float16 if self.cache_dtype == np.float16 else np.float32
        self.can_mix = "chunk_length" in types
        # In other than mixed steps, such a graph gets a chunk of a prompt that is empty.
        self._no_prompt = self._buffers(1, 0)
        self._prefix_length = {PREFIX_LENGTH: np.array(self.n_prefix)} if self.n_prefix else {}

    def rows(self, cache: KVCache, first: int, last: int) -> ContiguousCache:
        buffers = [buffer[first:last] for buffer in cache.buffers]
        return self._bound(buffers, cache.lengths[first:last], cache.capacity)

    def pair(self, rows: KVCache, prompt: KVCache) -> MixedCaches:
        return MixedCaches(rows, prompt, self._binding(rows.buffers, prompt.buffers))

    def _make_cache(self, batch: int, capacity: int) -> ContiguousCache:
        buffers = self._buffers(batch, self.n_prefix + capacity)
        return self._bound(buffers, np.zeros(batch, np.int64), capacity)

    def _buffers(self, batch: int, capacity: int) -> list[NDArray[Any]]:
        shapes = [(batch, n_head, capacity, self.head_dim) for n_head in self.n_kv_head]
        return [np.zeros(shape, self.cache_dtype) for shape in shapes * 2]

    def _bound(self, buffers: list[NDArray[Any]], lengths: Ids, capacity: int) -> ContiguousCache:
        binding = self._binding(buffers)
        return ContiguousCache(buffers, lengths, capacity, binding, n_prefix=self.n_prefix)

    def _binding(
        self, buffers: list[NDArray[Any]], prompt: list[NDArray[Any]] | None = None
    ) -> Any:
        binding = self.session.io_binding()
        bound = [("", buffers)]
        if self.can_mix:
            bound.append(("chunk_", prompt or self._no_prompt))
        for prefix, parts in bound:
            names = product(("key", "value"), range(len(self.n_kv_head)))
            for (part, i), buffer in zip(names, parts, strict=True):
                buffer_info = ("cpu", 0, self.cache_dtype, buffer.shape, buffer.ctypes.data)
                # Past and present share one buffer: attention appends in place.
                binding.bind_input(f"{prefix}past_{part}_{i}", *buffer_info)
                binding.bind_output(f"{prefix}present_{part}_{i}", *buffer_info)
        return binding

    def _append(self, cache: KVCache, tokens: Ids, lengths: Ids, index: Ids) -> Logits:
        assert isinstance(cache, ContiguousCache)
        if self._needs_single_rows(tokens):
            parts = (self.rows(cache, i, i + 1) for i in range(len(tokens)))
            each = zip(parts, *_single_rows(tokens, lengths, index), strict=True)
            return np.concatenate([self._append(*row) for row in each])
        feeds = self._inputs(tokens, cache.lengths, cache.lengths + lengths, index)
        return self._run(cache.binding, feeds)

    def _mix(self, caches: MixedCaches, tokens: Ids, chunk: Ids, index: Ids) -> Logits:
        pasts, past = (self.n_prefix + x.lengths for x in (caches.rows, caches.prompt))
        length = len(chunk)
        feeds = {
            "input_ids": np.concatenate([chunk, tokens])[None],
            "position_ids": np.concatenate([past + np.arange(length), pasts])[None],
            "seqlens_k": pasts.astype(np.int32),  # of each row, with its new token, minus one
            "total_sequence_length": np.array(pasts.max() + 1, np.int32),
            "logits_index": index[None],
            "chunk_length": np.array(length),
            "chunk_total": np.array(past[0] + length, np.int32),
            **self._prefix_length,
        }
        logits: Logits = self._run(caches.binding, feeds)[0]
        return logits

    def _run(self, binding: Any, feeds: dict[str, NDArray[Any]]) -> Logits:
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        # Into memory of this step's own: the caller may keep them while the next step runs.
        logits = np.empty((*feeds["logits_index"].shape, self.vocab_size), np.float32)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self.session.run_with_iobinding(binding)
        return logits

    def _inputs(
        self, tokens: Ids, past: Ids, totals: Ids, logits_index: Ids
    ) -> dict[str, NDArray[Any]]:
        """Graph inputs except the cache; `past` and `totals` (B,): a row's tokens before, after."""
        length = tokens.shape[1]
        past, totals = self.n_prefix + past, self.n_prefix + totals
        # The graph recognizes prefill by the padded length being equal to the total.
        total = length if not past.any() else int(totals.max())
        feeds = {
            "input_ids": np.ascontiguousarray(tokens, np.int64),
            "position_ids": past[:, None] + np.arange(length),
            "seqlens_k": (totals - 1).astype(np.int32),  # as GroupQueryAttention defines it
            "total_sequence_length": np.array(total, np.int32),
            "logits_index": np.ascontiguousarray(logits_index, np.int64),
        }
        if self.can_mix:
            feeds |= {"chunk_length": np.array(0), "chunk_total": np.array(0, np.int32)}
        return feeds | self._prefix_length

    def _needs_single_rows(self, tokens: Ids) -> bool:
        """Whether rows have to be read one by one: onnxruntime's attention reads several tokens of
        several rows only if nothing precedes them."""
        return self.n_prefix > 0 and min(tokens.shape) > 1

    def _logits(self, tokens: Ids, lengths: Ids, index: Ids) -> Logits:
        if self._needs_single_rows(tokens):
            rows = zip(*_single_rows(tokens, lengths, index), strict=True)
            return np.concatenate([self._logits(*row) for row in rows])
        (logits,) = self.session.run(["logits"], self.feeds(tokens, lengths, index))
        assert isinstance(logits, np.ndarray)
        return logits

    def feeds(self, tokens: Ids, lengths: Ids, index: Ids) -> dict[str, NDArray[Any]]:
        """All graph inputs for tokens (B, T) with an empty cache, or with only the prefix for one
        row, and logits at `index`."""
        batch = len(tokens)
        assert not self._needs_single_rows(tokens)
        past = self._no_prompt
        if self.n_prefix:
            past = self.start(batch, 1).buffers
            past = [buffer[:, :, : self.n_prefix] for buffer in past]
        feeds = self._inputs(tokens, np.zeros(batch, np.int64), lengths, index)
        names = product(("key", "value"), range(len(self.n_kv_head)))
        for (part, i), before, no_prompt in zip(names, past, self._no_prompt, strict=True):
            feeds[f"past_{part}_{i}"] = before if self.n_prefix else np.repeat(no_prompt, batch, 0)
            if self.can_mix:
                feeds[f"chunk_past_{part}_{i}"] = no_prompt
        return feeds


def _single_rows(tokens: Ids, lengths: Ids, index: Ids) -> tuple[Iterator[Ids], ...]:
    """Tokens without padding, length and index, within the length, of every row."""
    rows = range(len(tokens))
    return (
        (tokens[i : i + 1, : lengths[i]] for i in rows),
        (lengths[i : i + 1] for i in rows),
        (np.minimum(index[i : i + 1], lengths[i] - 1) for i in rows),
    )
