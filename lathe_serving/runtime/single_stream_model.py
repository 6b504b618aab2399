"""Runs an exported model with onnxruntime, with a second copy of its INT8 weights for one token at
a time."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import UserError
from lathe_serving.runtime.exported_model import MODEL
from lathe_serving.runtime.kv_cache import ContiguousCache, KVCache
from lathe_serving.runtime.open_session import open_session
from lathe_serving.runtime.session import OnnxModel
from lathe_serving.runtime.single_stream_graph import write_single_stream_graph


class SingleStreamModel(OnnxModel):
    """An export run by onnxruntime: steps of one token with `single_stream`, a graph that reads its
    weights faster, and all others with the exported graph.

    Raises:
        UserError: also if the export has no INT8 linears.
    """

    runtime = "onnxruntime_single_stream"

    def __init__(self, folder: Path, threads: int = 0, session: Any = None) -> None:
        super().__init__(folder, threads, session)
        # From a file, since onnxruntime keeps a serialized graph that it is given in memory.
        with TemporaryDirectory() as work:
            graph = Path(work) / MODEL
            if not write_single_stream_graph(self.folder / MODEL, graph):
                raise UserError(
                    f"{folder}: has no INT8 linears, which the single-stream runtime requires",
                    "set Serving.runtime=onnxruntime",
                )
            self.single_stream = OnnxModel(folder, threads, open_session(graph, threads))

    def _bound(
        self, buffers: list[NDArray[Any]], lengths: NDArray[np.int64], capacity: int
    ) -> ContiguousCache:
        cache = super()._bound(buffers, lengths, capacity)
        if len(lengths) == 1:
            cache.single_stream = self.single_stream._bound(buffers, lengths, capacity)
        return cache

    def _append(
        self,
        cache: KVCache,
        tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
        index: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        assert isinstance(cache, ContiguousCache)
        if cache.single_stream is None or tokens.size > 1:
            return super()._append(cache, tokens, lengths, index)
        return self.single_stream._append(cache.single_stream, tokens, lengths, index)
