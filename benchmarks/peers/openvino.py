"""OpenVINO with weights and activations quantized to INT8 by nncf, and its states as KV cache."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino
from numpy.typing import NDArray

from peers.engine import Engine, Ids, log_likelihoods
from peers.openvino_graph import build
from peers.weights import Weights


class OpenVINO(Engine):
    version = f"OpenVINO {openvino.__version__.split('-')[0]}"

    @staticmethod
    def convert(model: Path, calibration: Ids, weights: str, output: Path) -> None:
        import nncf  # slow to import

        graph = build(Weights.read(model), chosen=True)
        samples = [_feeds(row[None], 0, 0) for row in calibration]
        graph = nncf.quantize(
            graph,
            nncf.Dataset(samples),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(samples),
        )
        openvino.save_model(graph, output / "model.xml", compress_to_fp16=False)

    def __init__(self, folder: Path, threads: int) -> None:
        options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        model = openvino.Core().compile_model(folder / "model.xml", "CPU", options)
        self.request = model.create_infer_request()

    def prefill(self, prompt: Ids) -> None:
        self.decode(prompt[None], 0, lambda: None)

    def decode(self, prompts: Ids, steps: int, tick: Callable[[], None]) -> Ids:
        self.request.reset_state()
        length = prompts.shape[1]
        tokens = [self._infer(prompts, 0, length - 1)[:, -1].argmax(axis=1)]
        tick()
        for i in range(steps):
            tokens.append(self._infer(tokens[-1][:, None], length + i, 0)[:, -1].argmax(axis=1))
            tick()
        return np.stack(tokens, axis=1)

    def log_likelihoods(self, tokens: Ids) -> NDArray[np.float64]:
        self.request.reset_state()
        return log_likelihoods(self._infer(tokens[None], 0, 0)[0], tokens)

    def _infer(self, tokens: Ids, past: int, first: int) -> NDArray[np.float32]:
        outputs = self.request.infer(_feeds(tokens, past, first), share_outputs=True)
        logits: NDArray[np.float32] = outputs["logits"]
        return logits


def _feeds(tokens: Ids, past: int, first: int) -> dict[str, NDArray[np.integer]]:
    rows, length = tokens.shape
    return {
        "input_ids": tokens,
        "attention_mask": np.ones((rows, past + length), np.int64),
        "position_ids": np.tile(np.arange(past, past + length), (rows, 1)),
        "beam_idx": np.arange(rows, dtype=np.int32),
        "first": np.array([first]),
    }
