"""Run an exported model with onnxruntime; the KV cache is updated in place between steps.

Imports only numpy and onnxruntime, which the server's environment has.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.errors import UserError
from lathe.runtime.kv_cache import KVCache
from lathe.runtime.open_session import open_session

MODEL = "model.onnx"
METADATA = "export.json"
NEEDED = ("n_head", "head_dim", "n_positions", "vocab_size", "eos_id")


@dataclass(frozen=True)
class MixedCaches:
    """The caches of a mixed step: of the rows that decode, and of the prompt, one row."""

    rows: KVCache
    prompt: KVCache
    binding: Any


class OnnxModel:
    """An exported folder (`model.onnx`, `export.json`) opened for inference on the CPU.

    A cache must not be used by several threads at once; any number of caches may exist.

    Args:
        folder: output of the export stage.
        threads: onnxruntime's intra-op threads; 0 means one per core.

    Attributes:
        can_mix: whether `mix` works: not in exports that were made before mixed steps existed.

    Raises:
        UserError: the folder is not an export, or its graph is damaged.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        self.folder = Path(folder)
        self.metadata: dict[str, Any] = _read_metadata(self.folder)
        self.session = open_session(self.folder / MODEL, threads)
        types = {node.name: node.type for node in self.session.get_inputs()}
        self.dtype = np.float16 if types["past_key_0"] == "tensor(float16)" else np.float32
        self.can_mix = "chunk_length" in types
        self.n_kv_head: list[int] = self.metadata.get("n_kv_head", self.metadata["n_head"])
        self.head_dim: int = self.metadata["head_dim"]
        self.n_positions: int = self.metadata["n_positions"]
        self.vocab_size: int = self.metadata["vocab_size"]
        self.eos_id: int = self.metadata["eos_id"]
        shapes = [(1, n_head, 0, self.head_dim) for n_head in self.n_kv_head]
        self._no_prompt = [np.zeros(shape, self.dtype) for shape in shapes]

    @property
    def end_ids(self) -> list[int]:
        """The ids that end a generated text, the end of a document first."""
        others: list[int] = self.metadata.get("end_ids", [])
        return [self.eos_id, *(token for token in others if token != self.eos_id)]

    def start(self, batch: int, capacity: int | None = None) -> KVCache:
        """Make an empty cache for `batch` rows of at most `capacity` tokens (default
        n_positions)."""
        capacity = capacity or self.n_positions
        if not 0 < capacity <= self.n_positions:
            raise ValueError(f"capacity {capacity} is not within 1..{self.n_positions}")
        shapes = [(batch, n_head, capacity, self.head_dim) for n_head in self.n_kv_head]
        keys = [np.zeros(shape, self.dtype) for shape in shapes]
        values = [np.zeros(shape, self.dtype) for shape in shapes]
        return self._bound(keys, values, np.zeros(batch, np.int64), capacity)

    def rows(self, cache: KVCache, first: int, last: int) -> KVCache:
        """A cache of rows `first` to `last` that shares their memory."""
        part = slice(first, last)
        keys, values = [key[part] for key in cache.keys], [value[part] for value in cache.values]
        return self._bound(keys, values, cache.lengths[part], cache.capacity)

    def pair(self, rows: KVCache, prompt: KVCache) -> MixedCaches:
        """Two caches to be used together by `mix`; `prompt` has one row."""
        return MixedCaches(rows, prompt, self._binding(rows.keys, rows.values, prompt))

    def _bound(
        self,
        keys: list[NDArray[np.floating[Any]]],
        values: list[NDArray[np.floating[Any]]],
        lengths: NDArray[np.int64],
        capacity: int,
    ) -> KVCache:
        return KVCache(keys, values, lengths, capacity, self._binding(keys, values))

    def _binding(
        self,
        keys: list[NDArray[np.floating[Any]]],
        values: list[NDArray[np.floating[Any]]],
        prompt: KVCache | None = None,
    ) -> Any:
        binding = self.session.io_binding()
        bound = [("", keys, values)]
        if prompt is not None:
            bound.append(("chunk_", prompt.keys, prompt.values))
        elif self.can_mix:
            bound.append(("chunk_", self._no_prompt, self._no_prompt))
        for prefix, *parts in bound:
            for part, buffers in zip(("key", "value"), parts, strict=True):
                for i, buffer in enumerate(buffers):
                    place = ("cpu", 0, self.dtype, buffer.shape, buffer.ctypes.data)
                    # Past and present share one buffer: attention appends in place.
                    binding.bind_input(f"{prefix}past_{part}_{i}", *place)
                    binding.bind_output(f"{prefix}present_{part}_{i}", *place)
        return binding

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
        logits: NDArray[np.float32] = self._append(cache, tokens, totals, lengths[:, None] - 1)[
            :, 0
        ]
        return logits

    def read(self, cache: KVCache, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append tokens (T,) to a cache of one row; returns logits (T, V) after each of them."""
        totals = cache.lengths + len(tokens)
        if int(totals[0]) > cache.capacity:
            raise ValueError(f"{int(totals[0])} tokens exceed the cache's {cache.capacity}")
        every = np.arange(len(tokens))[None]
        logits: NDArray[np.float32] = self._append(cache, tokens[None], totals, every)[0]
        return logits

    def mix(
        self,
        caches: MixedCaches,
        tokens: NDArray[np.int64],
        chunk: NDArray[np.int64],
        is_last: bool,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Append one token to every row, and a chunk of a prompt to its cache, in one step.

        Args:
            tokens: int64 (B,).
            chunk: int64 (T,).
            is_last: whether the logits after the chunk are wanted.

        Returns:
            float32 (B, V), and (1, V) after the chunk, or (0, V).
        """
        rows, prompt, length = caches.rows, caches.prompt, len(chunk)
        totals, total = rows.lengths + 1, int(prompt.lengths[0]) + length
        if max(int(totals.max()), total) > rows.capacity:
            raise ValueError(f"the step exceeds the cache's {rows.capacity} tokens")
        positions = np.concatenate([np.arange(total - length, total), rows.lengths])
        wanted = np.arange(length - is_last, length + len(tokens))
        feeds = {
            "input_ids": np.concatenate([chunk, tokens])[None],
            "position_ids": positions[None],
            "seqlens_k": rows.lengths.astype(np.int32),
            "total_sequence_length": np.array(totals.max(), np.int32),
            "logits_index": wanted[None],
            "chunk_length": np.array(length),
            "chunk_total": np.array(total, np.int32),
        }
        logits = self._run(caches.binding, feeds)[0]
        rows.lengths[:], prompt.lengths[:] = totals, total
        return logits[is_last:], logits[: int(is_last)]

    def _append(
        self,
        cache: KVCache,
        tokens: NDArray[np.int64],
        totals: NDArray[np.int64],
        index: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Logits (B, k, V) at positions `index` (B, k) of `tokens` (B, T)."""
        logits = self._run(cache.binding, self._inputs(tokens, cache.lengths, totals, index))
        cache.lengths[:] = totals
        return logits

    def _run(self, binding: Any, feeds: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        logits = np.empty((*feeds["logits_index"].shape, self.vocab_size), np.float32)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self.session.run_with_iobinding(binding)
        return logits

    def _inputs(
        self,
        tokens: NDArray[np.int64],
        past: NDArray[np.int64],
        totals: NDArray[np.int64],
        logits_index: NDArray[np.int64],
    ) -> dict[str, NDArray[Any]]:
        """Graph inputs except the cache; `past` and `totals` (B,): a row's tokens before, after."""
        length = tokens.shape[1]
        # The graph recognizes prefill by the padded length being equal to the total.
        total = length if not past.any() else int(totals.max())
        feeds = {
            "input_ids": np.ascontiguousarray(tokens, np.int64),
            "position_ids": past[:, None] + np.arange(length),
            "seqlens_k": (totals - 1).astype(np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "logits_index": np.ascontiguousarray(logits_index, np.int64),
        }
        if self.can_mix:
            feeds |= {"chunk_length": np.array(0), "chunk_total": np.array(0, np.int32)}
        return feeds

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
        feeds = self._inputs(tokens, np.zeros(batch, np.int64), lengths, index)
        for i, no_prompt in enumerate(self._no_prompt):
            for part in ("key", "value"):
                feeds[f"past_{part}_{i}"] = np.repeat(no_prompt, batch, axis=0)
                if self.can_mix:
                    feeds[f"chunk_past_{part}_{i}"] = no_prompt
        return feeds

    def greedy(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop_at_eos: bool = True
    ) -> list[list[int]]:
        """Greedy continuations of a batch of prompts.

        Returns only the new tokens: up to `new_tokens` for each prompt, fewer where it reaches one
        of `end_ids` (not included) or `n_positions`.
        """
        tokens, lengths = pad(prompts)
        capacity = min(self.n_positions, int(lengths.max()) + new_tokens)
        cache = self.start(len(prompts), capacity)
        logits = self.step(cache, tokens, lengths)
        out: list[list[int]] = [[] for _ in prompts]
        ends = self.end_ids
        alive = [True] * len(prompts)
        while True:
            best = logits.argmax(axis=1)
            for row, token in enumerate(best.tolist()):
                alive[row] = alive[row] and not (stop_at_eos and token in ends)
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


def pad(
    rows: Sequence[Sequence[int] | NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Right-pad token lists with 0 -> tokens int64 (B, T), lengths int64 (B,)."""
    lengths = np.array([len(row) for row in rows], np.int64)
    tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, lengths


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
