"""Lathe's exports, run as by its server."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lathe_serving.runtime.batcher import PREFILL_CHUNK
from lathe_serving.runtime.exported_model import ExportedModel
from lathe_serving.runtime.session import OnnxModel
from peers.engine import Engine, Ids, log_likelihoods

CALIBRATION_BATCH = 8
FORMATS: dict[str, dict[str, Any]] = {
    "INT8": {},
    "INT8static": {"activation_quantize_type": "moving_average_abs_max"},
    "INT8dynamic": {"activation_quantize_type": "dynamic"},
    "INT4": {"weight_bits": 4},
    "INT4g128": {"weight_bits": 4, "group_size": 128},
}


class Lathe(Engine):
    """Lathe's engine.

    The formats `INT8` and `INT4` are those of `lathe quantize` with `Engine.max_steps=0`, INT4 with
    GPTQ; `saved` is the format of the checkpoint.
    """

    version = f"onnxruntime {onnxruntime.__version__}"

    @staticmethod
    def convert(model: Path, calibration: Ids, weights: str, output: Path) -> None:
        # Imported here, since neither the server nor a measuring worker needs them.
        import torch

        from lathe.compress.activation import smoothing_factors, with_int8_formats
        from lathe.compress.gptq import gptq
        from lathe.compress.plan import make_plan
        from lathe.compress.quantize import write_scales
        from lathe.compress.smoothing import fold
        from lathe.export.export import write
        from lathe.model import fake_quant
        from lathe.model.checkpoint import load_checkpoint
        from lathe_base.config.settings import ExportSettings, Recipe

        checkpoint = load_checkpoint(model)
        if weights in FORMATS:
            quantization = {**FORMATS[weights], "quantize_embedding": True}
            recipe = Recipe.model_validate({"Compress": {"Quantization": quantization}})
            settings, config = recipe.Compress.Quantization, checkpoint.model.config
            is_learned = config.architecture.positions == "learned"
            batches = torch.split(torch.from_numpy(calibration), CALIBRATION_BATCH)
            fold(checkpoint.model, smoothing_factors(recipe, checkpoint.model, batches, {}))
            formats = with_int8_formats(recipe, checkpoint.model, batches, {})
            plan = replace(make_plan(config, settings, formats), position_embedding=is_learned)
            fake_quant.insert(checkpoint.model, plan)
            fake_quant.calibrate(checkpoint.model, batches)
            if settings.uses_gptq(max_steps=0):
                gptq(checkpoint.model, batches)
            write_scales(checkpoint.model, plan)
        write(checkpoint, output, ExportSettings())

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self.model: ExportedModel = OnnxModel(folder, threads)

    def prefill(self, prompt: Ids) -> None:
        cache = self.model.start(1, len(prompt))
        for part in np.split(prompt[None], range(PREFILL_CHUNK, len(prompt), PREFILL_CHUNK), 1):
            logits = self.model.step(cache, part)
        logits.argmax(axis=1)

    def decode(self, prompts: Ids, steps: int, tick: Callable[[], None]) -> Ids:
        rows, length = prompts.shape
        cache = self.model.start(rows, length + steps)
        tokens = [self.model.step(cache, prompts).argmax(axis=1)]
        tick()
        for _ in range(steps):
            tokens.append(self.model.step(cache, tokens[-1][:, None]).argmax(axis=1))
            tick()
        return np.stack(tokens, axis=1)

    def log_likelihoods(self, tokens: Ids) -> NDArray[np.float64]:
        return log_likelihoods(self.model.logits(tokens[None])[0], tokens)
