"""Lathe's exports with `Serving.runtime` onnxruntime_single_stream."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lathe_serving.runtime.single_stream import SingleStreamModel
from peers.engine import Ids, log_likelihoods
from peers.lathe import Lathe


class LatheSingleStream(Lathe):
    def __init__(self, folder: Path, threads: int = 1) -> None:
        self.model = self.own = SingleStreamModel(folder, threads)

    def log_likelihoods(self, tokens: Ids) -> NDArray[np.float64]:
        """Log-likelihoods by the single-stream graph; `Lathe` measures the other one."""
        return log_likelihoods(self.own.single_stream.logits(tokens[None])[0], tokens)
