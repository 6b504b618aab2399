"""Runs an exported model with OpenVINO, whose kernels for several rows and for INT4 weights are
faster on CPUs with VNNI or AMX.

Imports only onnx and openvino, which the server's environment has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError
from lathe_serving.runtime.exported_model import MODEL, ExportedModel, Ids, Logits
from lathe_serving.runtime.kv_cache import KeyValues, KVCache, MixedCaches
from lathe_serving.runtime.openvino_graph import BLOCK_TOKENS, LAYOUT, MAX_CONTEXT_INPUT, translate

Part = tuple[int, int, Ids]
"""A row, its number of tokens, and new ones (T,)."""


@dataclass
class PagedCache(KVCache):
    """OpenVINO's layout: buffers (batch, blocks, n_kv_head_i, BLOCK_TOKENS, head_dim), float32, or
    bfloat16 as uint16.

    Attributes:
        tensors: OpenVINO's views of the full buffers, of which this cache may be a part.
        first_row: index of its first row.
    """

    tensors: list[Any] = field(repr=False)
    first_row: int = 0

    def blocks(self, row: int, n: int) -> NDArray[np.int32]:
        """Numbers, within the tensors, of the blocks that hold the first n tokens of a row."""
        blocks_per_row = self.buffers[0].shape[1]
        first = (self.first_row + row) * blocks_per_row
        return np.arange(first, first - (-n // BLOCK_TOKENS), dtype=np.int32)

    def _copy(self, buffer: NDArray[Any], to: list[int], of: list[int], n: int) -> None:
        n_blocks = -(-n // BLOCK_TOKENS)
        buffer[to, :n_blocks] = buffer[of, :n_blocks]

    def _get(self, buffer: NDArray[Any], first: int, n: int) -> KeyValues:
        block, offset = np.divmod(np.arange(first, first + n), BLOCK_TOKENS)
        tokens: KeyValues = buffer[0, block, :, offset].swapaxes(0, 1)
        return tokens

    def _set(self, buffer: NDArray[Any], first: int, tokens: KeyValues) -> None:
        block, offset = np.divmod(np.arange(first, first + tokens.shape[1]), BLOCK_TOKENS)
        buffer[0, block, :, offset] = tokens.swapaxes(0, 1)


class OpenVINOModel(ExportedModel):
    """An export run by OpenVINO; see `ExportedModel`.

    On CPUs with bfloat16, a quantized model uses it for keys, values and all non-integer
    computation; a float model always uses float32. Neither the model nor a cache may be used by
    several threads at once; any number of caches may exist.

    Args:
        folder: output of the export stage.
        threads: number of compute threads; 0 means one per core.

    Raises:
        UserError: a float16 export, or one that OpenVINO cannot load.
    """

    runtime = "openvino"
    can_mix = True

    def __init__(self, folder: Path, threads: int = 0) -> None:
        super().__init__(folder)
        flavour = self.metadata.get("flavour", "")
        if flavour == "fp16":
            raise UserError(
                f"{folder}: OpenVINO does not support float16 exports",
                "set Serving.runtime=onnxruntime, or export with Export.dtype=float32",
                Code.UNSUPPORTED,
            )
        core = openvino.Core()
        has_bfloat16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        self._is_bfloat16 = has_bfloat16 and flavour.startswith("int")
        precision = "bf16" if self._is_bfloat16 else "f32"
        self._cache_type = openvino.Type.bf16 if self._is_bfloat16 else openvino.Type.f32
        caches = ("KV_CACHE_PRECISION", "KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION")
        options = {
            "INFERENCE_PRECISION_HINT": precision,
            **dict.fromkeys(caches, precision),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,  # servers on one machine would share a core
        }
        try:
            graph, group = translate(self.folder / MODEL, self._cache_type)
            options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = group
            self._request = core.compile_model(graph, "CPU", options).create_infer_request()
        except Exception as error:
            raise UserError(
                f"{self.folder / MODEL}: OpenVINO cannot load it: {str(error).splitlines()[0]}",
                "set Serving.runtime=onnxruntime, or export again",
                Code.UNSUPPORTED,
            ) from error
        if self.prefix is not None and self._is_bfloat16:
            # numpy has no bfloat16: the upper half of the bits of float32, rounded half to even.
            bits = self.prefix.view(np.uint32)
            self.prefix = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        self._bound: list[Any] = []
        self._fed: dict[str, NDArray[Any]] = {}  # the inputs' memory

    def rows(self, cache: KVCache, first: int, last: int) -> PagedCache:
        assert isinstance(cache, PagedCache)
        buffers = [buffer[first:last] for buffer in cache.buffers]
        return PagedCache(
            buffers,
            cache.lengths[first:last],
            cache.capacity,
            cache.tensors,
            cache.first_row + first,
            n_prefix=cache.n_prefix,
        )

    def pair(self, rows: KVCache, prompt: KVCache) -> MixedCaches:
        return MixedCaches(rows, prompt)

    def _make_cache(self, batch: int, capacity: int) -> PagedCache:
        blocks = -(-(self.n_prefix + capacity) // BLOCK_TOKENS)
        dtype = np.uint16 if self._is_bfloat16 else np.float32
        tails = [(n_head, BLOCK_TOKENS, self.head_dim) for n_head in self.n_kv_head * 2]
        buffers = [np.zeros((batch, blocks, *tail), dtype) for tail in tails]
        tensors = [
            openvino.Tensor(buffer, openvino.Shape([batch * blocks, *tail]), self._cache_type)
            for buffer, tail in zip(buffers, tails, strict=True)
        ]
        lengths = np.zeros(batch, np.int64)
        return PagedCache(buffers, lengths, capacity, tensors, n_prefix=self.n_prefix)

    def _append(self, cache: KVCache, tokens: Ids, lengths: Ids, index: Ids) -> Logits:
        assert isinstance(cache, PagedCache)
        pasts, counts = cache.lengths.tolist(), lengths.tolist()
        parts = [(i, pasts[i], tokens[i, : counts[i]]) for i in range(len(tokens))]
        starts = np.cumsum(lengths) - lengths  # of each row in the packed tokens, without padding
        return self._infer(cache, parts, starts[:, None] + index)

    def _mix(self, caches: MixedCaches, tokens: Ids, chunk: Ids, index: Ids) -> Logits:
        rows, prompt = caches.rows, caches.prompt
        assert isinstance(rows, PagedCache) and isinstance(prompt, PagedCache)
        assert rows.tensors is prompt.tensors
        prompt_row = prompt.first_row - rows.first_row
        parts: list[Part] = [(prompt_row, int(prompt.lengths[0]), chunk)]
        pasts = rows.lengths.tolist()
        parts += [(i, past, tokens[i : i + 1]) for i, past in enumerate(pasts)]
        return self._infer(rows, parts, index)

    def _logits(self, tokens: Ids, lengths: Ids, index: Ids) -> Logits:
        batch, length = tokens.shape
        parts = [(row, 0, tokens[row]) for row in range(batch)]
        starts = np.arange(batch)[:, None] * length
        cache = self.start(batch, length)
        assert isinstance(cache, PagedCache)
        return self._infer(cache, parts, starts + index)

    def _infer(self, cache: PagedCache, parts: Sequence[Part], index: Ids) -> Logits:
        """Append tokens to rows; returns logits (*index.shape, V) at those of all new tokens."""
        parts = [(row, cache.n_prefix + past, tokens) for row, past, tokens in parts]
        pasts = np.array([past for _, past, _ in parts])
        lengths = np.array([len(tokens) for *_, tokens in parts])
        blocks = [cache.blocks(row, past + len(tokens)) for row, past, tokens in parts]
        positions = [np.arange(past, past + len(tokens)) for _, past, tokens in parts]
        layout = (
            pasts,
            np.cumsum([0, *lengths]),
            np.concatenate(blocks),
            np.cumsum([0, *map(len, blocks)]),
        )
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": np.concatenate([tokens for *_, tokens in parts])[None],
            "position_ids": np.concatenate(positions)[None],
            "logits_index": np.ascontiguousarray(index.reshape(1, -1)),
            MAX_CONTEXT_INPUT: np.array((pasts + lengths).max(), np.int32),
        }
        feeds |= {n: part.astype(np.int32) for n, part in zip(LAYOUT, layout, strict=True)}
        # Parts of one cache share its tensors, so these are set again only for another cache.
        if self._bound is not cache.tensors:
            names = [
                f"{part}_cache.{i}" for part in ("key", "value") for i in range(len(self.n_kv_head))
            ]
            for name, tensor in zip(names, cache.tensors, strict=True):
                self._request.set_tensor(name, tensor)
            self._bound = cache.tensors
        for name, value in feeds.items():
            if name in self._fed and self._fed[name].shape == value.shape:
                # The same memory as in the last step, which makes a step of one row 4 % faster.
                self._fed[name][...] = value
                continue
            self._fed[name] = value
            self._request.set_tensor(name, openvino.Tensor(value, shared_memory=True))
        self._request.infer()
        logits = self._request.get_tensor("logits").data  # overwritten by the next step
        return np.array(logits).reshape(*index.shape, self.vocab_size)
