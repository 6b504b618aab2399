"""An exported model, opened for inference; the KV cache is updated in place between steps.

`OnnxModel` and `OpenVINOModel` implement this class.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError
from lathe_serving.runtime.kv_cache import KeyValues, KVCache, MixedCaches

Ids = NDArray[np.int64]
"""Token ids, lengths and positions."""

Logits = NDArray[np.float32]

MODEL = "model.onnx"
WEIGHTS = f"{MODEL}.data"
"""The weights of a graph of more than 2 GB, which one ONNX file cannot hold."""
METADATA = "export.json"
PREFIX = "prefix.npy"
PREFIX_LENGTH = "prefix_length"
NEEDED = ("n_head", "head_dim", "n_positions", "vocab_size", "eos_id")


def x86_flags(cpuinfo: str) -> frozenset[str]:
    """Instruction sets that Linux lists in `/proc/cpuinfo`; none if the CPU is not an x86."""
    line = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def n_bytes(folder: Path) -> int:
    """Size of an export's graph with its weights."""
    files = (folder / name for name in (MODEL, WEIGHTS))
    return sum(file.stat().st_size for file in files if file.exists())


class ExportedModel(ABC):
    """An exported folder (`model.onnx`, `export.json`) opened for inference on the CPU.

    For a model with a prefix, every row of every cache begins with its keys and values, float
    constants in `prefix.npy`.

    Args:
        folder: output of the export stage.

    Attributes:
        runtime: the inference library, as in `Serving.runtime`.
        can_mix: whether `mix` works: not for exports from before mixed steps existed.

    Raises:
        UserError: the folder is not an export, or its graph is corrupt.
    """

    runtime: ClassVar[str]
    can_mix: bool

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.metadata: dict[str, Any] = read_export(self.folder)
        self.n_kv_head: list[int] = self.metadata.get("n_kv_head", self.metadata["n_head"])
        self.head_dim: int = self.metadata["head_dim"]
        self.n_positions: int = self.metadata["n_positions"]
        self.vocab_size: int = self.metadata["vocab_size"]
        self.eos_id: int = self.metadata["eos_id"]
        self.n_prefix = len(self.metadata.get("prefix_tokens", ()))
        self.prefix: KeyValues | None = None
        if self.n_prefix:
            path = self.folder / PREFIX
            try:
                prefix: KeyValues = np.load(path)
            except (OSError, ValueError) as error:
                code = Code.NOT_FOUND if isinstance(error, FileNotFoundError) else Code.MALFORMED
                raise UserError(f"{path}: cannot be read: {error}", "export again", code) from None
            # Keys of all layers, then values, as in `KVCache.read`.
            shape = (2 * sum(self.n_kv_head), self.n_prefix, self.head_dim)
            if prefix.shape != shape:
                raise UserError(
                    f"{path}: has shape {prefix.shape}, not {shape}",
                    "export again",
                    Code.MALFORMED,
                )
            self.prefix = prefix

    @property
    def end_ids(self) -> list[int]:
        """The ids that end a generated text, the end-of-document token first."""
        return end_ids({**self.metadata, "eos_id": self.eos_id})

    def start(self, batch: int, capacity: int | None = None) -> KVCache:
        """Make an empty cache for `batch` rows of at most `capacity` tokens (default
        n_positions)."""
        capacity = capacity or self.n_positions
        if not 0 < capacity <= self.n_positions:
            raise ValueError(f"capacity {capacity} is not within 1..{self.n_positions}")
        cache = self._make_cache(batch, capacity)
        if self.prefix is not None:
            cache.put_prefix(self.prefix)
        return cache

    @abstractmethod
    def rows(self, cache: KVCache, first: int, last: int) -> KVCache:
        """A cache of rows `first` to `last` that shares their memory."""

    @abstractmethod
    def pair(self, rows: KVCache, prompt: KVCache) -> MixedCaches:
        """Combine two row ranges of one cache for `mix`; `prompt` has one row."""

    def step(self, cache: KVCache, tokens: Ids, lengths: Ids | None = None) -> Logits:
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
        check_lengths(lengths, batch, length)
        if length > 1 and batch > 1 and cache.lengths.any():
            raise ValueError("several tokens per row need an empty cache or a batch of one")
        # The padding of a short row may be written, too; the row's next tokens overwrite it.
        if int(cache.lengths.max()) + length > cache.capacity:
            max_length = int((cache.lengths + lengths).max())
            raise ValueError(f"{max_length} tokens exceed the cache's {cache.capacity}")
        logits = self._append(cache, tokens, lengths, lengths[:, None] - 1)
        cache.lengths[:] += lengths
        last: Logits = logits[:, 0]
        return last

    def read(self, cache: KVCache, tokens: Ids) -> Logits:
        """Append tokens (T,) to a cache of one row; returns logits (T, V) after each of them."""
        total = int(cache.lengths[0]) + len(tokens)
        if total > cache.capacity:
            raise ValueError(f"{total} tokens exceed the cache's {cache.capacity}")
        every, lengths = np.arange(len(tokens))[None], np.array([len(tokens)])
        logits: Logits = self._append(cache, tokens[None], lengths, every)[0]
        cache.lengths[0] = total
        return logits

    def mix(
        self, caches: MixedCaches, tokens: Ids, chunk: Ids, is_last: bool
    ) -> tuple[Logits, Logits]:
        """Append one token to every row, and a chunk of a prompt to its cache, in one step.

        Args:
            tokens: int64 (B,).
            chunk: int64 (T,).
            is_last: whether to return the logits after the chunk.

        Returns:
            float32 (B, V), and (1, V) after the chunk, or (0, V).
        """
        rows, prompt = caches.rows, caches.prompt
        totals, total = rows.lengths + 1, int(prompt.lengths[0]) + len(chunk)
        if max(int(totals.max()), total) > rows.capacity:
            raise ValueError(f"the step exceeds the cache's {rows.capacity} tokens")
        # The graph gets the chunk before the rows' tokens; logits of a chunk are needed only after
        # its last token, and only if that ends the prompt.
        index = np.arange(len(chunk) - is_last, len(chunk) + len(tokens))
        logits = self._mix(caches, tokens, chunk, index)
        rows.lengths[:], prompt.lengths[:] = totals, total
        return logits[is_last:], logits[: int(is_last)]

    def logits(self, tokens: Ids, lengths: Ids | None = None, index: Ids | None = None) -> Logits:
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
        check_lengths(lengths, batch, length)
        if length > self.n_positions:
            raise ValueError(f"{length} tokens exceed n_positions {self.n_positions}")
        if index is None:
            index = np.tile(np.arange(length), (batch, 1))
        return self._logits(tokens, lengths, index)

    @abstractmethod
    def _make_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache for the prefix and `capacity` tokens, with the prefix not yet written; see
        `start`."""

    @abstractmethod
    def _append(self, cache: KVCache, tokens: Ids, lengths: Ids, index: Ids) -> Logits:
        """Append tokens (B, T), of which rows have `lengths` (B,), to the cache; returns logits (B,
        k, V) at positions `index` (B, k) of `tokens`."""

    @abstractmethod
    def _mix(self, caches: MixedCaches, tokens: Ids, chunk: Ids, index: Ids) -> Logits:
        """Write a chunk and tokens; returns logits (k, V) at positions `index` of both, the chunk
        first."""

    @abstractmethod
    def _logits(self, tokens: Ids, lengths: Ids, index: Ids) -> Logits:
        """See `logits`."""

    def greedy(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop_at_eos: bool = True
    ) -> list[list[int]]:
        """Greedy continuations of a batch of prompts.

        Returns only the new tokens: up to `new_tokens` for each prompt, fewer if it reaches one of
        `end_ids` (not included) or `n_positions`.
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
            # A finished row stays in place: its length stops below the capacity, so that the step
            # has room, and its output is ignored.
            idle = ~np.array(alive)
            cache.lengths[idle] = np.minimum(cache.lengths[idle], capacity - 1)
            logits = self.step(cache, best[:, None])


def pad(
    rows: Sequence[Sequence[int] | Ids],
) -> tuple[Ids, Ids]:
    """Right-pad token lists with 0 -> tokens int64 (B, T), lengths int64 (B,)."""
    lengths = np.array([len(row) for row in rows], np.int64)
    tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, lengths


def check_lengths(lengths: Ids, batch: int, length: int) -> None:
    """Raise ValueError unless `lengths` (batch,) are within 1..length."""
    if lengths.shape != (batch,) or lengths.min() < 1 or lengths.max() > length:
        raise ValueError(f"lengths {lengths.tolist()} do not fit tokens of shape {batch, length}")


def end_ids(metadata: dict[str, Any]) -> list[int]:
    """The ids that end a text generated by an export, the end-of-document token first."""
    eos_id, others = metadata["eos_id"], metadata.get("end_ids", [])
    return [eos_id, *(token for token in others if token != eos_id)]


def read_export(folder: Path) -> dict[str, Any]:
    """The metadata of an export.

    Raises:
        UserError: the folder is not an export.
    """
    path = folder / METADATA
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: no {METADATA}", "give the output folder of the export", Code.WRONG_KIND
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}", "export again", Code.MALFORMED) from None
    if not isinstance(metadata, dict) or not metadata.keys() >= set(NEEDED):
        raise UserError(f"{path}: not the metadata of an export", "export again", Code.WRONG_KIND)
    return metadata
