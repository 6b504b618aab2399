"""Load and save checkpoint folders as Paddle models; `lathe.model.folder` defines their files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from lathe.backends.paddle_names import by_head, by_projection
from lathe.model.config import require_gpt2
from lathe.model.folder import (
    WEIGHTS,
    CheckpointFolder,
    non_finite,
    open_folder,
    read_tensors,
    require_fit,
    require_size,
    write_folder,
)
from lathe_base.artifacts.metadata import Origin
from lathe_base.config.settings import Recipe
from lathe_paddle.gpt import GPT

Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class PaddleCheckpoint:
    """A loaded checkpoint: the float model in eval mode; its plan is in `model.config`."""

    source: CheckpointFolder
    model: GPT
    tokenizer: Tokenizer

    @property
    def digest(self) -> str:
        """Identity of the checkpoint's weights and configuration."""
        return self.source.digest


def load_checkpoint(folder: Path | str | CheckpointFolder) -> PaddleCheckpoint:
    """Load a checkpoint or HF GPT-2 folder, or `hf://NAME`.

    Raises:
        UserError: as `lathe.model.checkpoint.load_checkpoint`.
    """
    source = open_folder(folder)
    config, path = source.config, source.path / WEIGHTS
    require_gpt2(config, source.path, "the Paddle engine", "use Compress.engine=torch")
    require_size([source.verified.path / WEIGHTS], config)
    family = config.architecture
    weights = {
        name: by_head(array, config.head_dim) if family.is_fused(name) else array
        for name, array in read_tensors(path, "np", family)
    }
    model = GPT(config)
    set_weights(model, weights, path)
    model.eval()
    return PaddleCheckpoint(source, model, source.tokenizer)


def save_checkpoint(
    folder: Path,
    model: GPT,
    tokenizer: Tokenizer,
    stage: str,
    recipe: Recipe,
    origin: Origin | None = None,
    metrics: dict[str, Any] | None = None,
    weights: Arrays | None = None,
) -> None:
    """Write a checkpoint into `folder`: float weights, by default the model's own, and the plan in
    `config.json`."""

    def write_weights(path: Path) -> None:
        family, head_dim = model.config.architecture, model.config.head_dim
        files = {}
        for name, array in (weights or float_weights(model)).items():
            # Hugging Face's files have all of q first, this model q, k and v of each head.
            array = by_projection(array, head_dim) if family.is_fused(name) else array
            files[family.prefix + name] = array
        save_file(files, path, {"format": "pt"})

    write_folder(
        folder, write_weights, model.config, tokenizer, stage, recipe, origin, metrics, "paddle"
    )


def float_weights(model: GPT) -> Arrays:
    """The float weights by name, in Paddle's layout, without what fake quantization adds."""
    return {
        name: parameter.numpy().astype(np.float32)
        for name, parameter in model.named_parameters()
        if is_weight(name)
    }


def is_weight(name: str) -> bool:
    """Whether a parameter is the model's own, not a scale or a bound of fake quantization."""
    return not any(part.startswith("_") for part in name.split("."))


def set_weights(model: GPT, weights: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Fill the model with `weights`; `path` is for the error.

    Raises:
        UserError: the shapes are not those of the model, or a number is not finite.
    """
    parameters = {n: p for n, p in model.named_parameters() if is_weight(n)}
    shapes = {name: array.shape for name, array in weights.items()}
    require_fit(path, shapes, {name: p.shape for name, p in parameters.items()})
    for name, parameter in parameters.items():
        if not np.isfinite(weights[name]).all():
            raise non_finite(path, name)
        parameter.set_value(paddle.to_tensor(np.ascontiguousarray(weights[name], np.float32)))
