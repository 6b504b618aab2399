"""Load and save checkpoint folders as torch models; `lathe.model.folder` defines their files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from lathe.artifacts.origin import Origin
from lathe.config.settings import Recipe
from lathe.data.tokenizer import eos_id
from lathe.model import fake_quant
from lathe.model.config import GPTConfig, read_config
from lathe.model.folder import (
    WEIGHTS,
    checkpoint_digest,
    non_finite,
    read_marker,
    read_tensors,
    read_tokenizer,
    require_fit,
    require_size,
    resolve,
    write_folder,
)
from lathe.model.gpt import GPT


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: the model in eval mode, fake-quantized by its plan if it has one."""

    folder: Path
    model: GPT
    tokenizer: Tokenizer
    meta: dict[str, Any]  # lathe.json; empty for a plain HF folder

    @property
    def digest(self) -> str:
        """Identity of the checkpoint's weights and configuration."""
        return checkpoint_digest(self.folder)

    @property
    def eos_id(self) -> int:
        """The id of `<|endoftext|>`."""
        return eos_id(self.tokenizer)


def load_checkpoint(folder: Path | str) -> Checkpoint:
    """Load a checkpoint folder, an HF GPT-2 folder, or `hf://NAME` from the Hugging Face hub.

    Raises:
        UserError: missing, truncated, altered, pickled or non-finite weights; not a GPT-2; a
            tokenizer with more ids than the model.
    """
    folder = resolve(folder)
    config = read_config(folder)
    meta = read_marker(folder)
    require_size(folder / WEIGHTS, config)
    with torch.device("meta"):
        model = GPT(config)
    model.load_state_dict(_read_weights(folder / WEIGHTS, config), assign=True)
    if config.quantization is not None:
        fake_quant.insert(model, config.quantization)
    return Checkpoint(folder, model.eval(), read_tokenizer(folder, config), meta)


def save_checkpoint(
    folder: Path,
    model: GPT,
    tokenizer: Tokenizer,
    stage: str,
    recipe: Recipe,
    origin: Origin | None = None,
    metrics: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint into `folder`, `lathe.json` last; other files in it are kept.

    A fake-quantized model is saved as its float weights and, in `config.json`, its plan.
    """

    def write_weights(path: Path) -> None:
        prefix = model.config.architecture.prefix
        tensors = {prefix + name: t.contiguous() for name, t in HFTensors(model).items()}
        save_file(tensors, path, {"format": "pt"})

    write_folder(folder, write_weights, model.config, tokenizer, stage, recipe, origin, metrics)


def _read_weights(path: Path, config: GPTConfig) -> dict[str, Tensor]:
    state, family = {}, config.architecture
    for name, tensor in read_tensors(path, "pt", family):
        if family.is_conv1d(name):
            tensor = tensor.T
        if family.is_fused(name):
            tensor = by_head(tensor, config.head_dim)
        state[name] = tensor.float().contiguous()
    with torch.device("meta"):
        wanted = GPT(config).state_dict()
    require_fit(
        path, {n: t.shape for n, t in state.items()}, {n: t.shape for n, t in wanted.items()}
    )
    for name, tensor in state.items():
        if not all(extreme.isfinite() for extreme in tensor.aminmax()):
            raise non_finite(path, name)
    return state


class HFTensors(Mapping[str, Tensor]):
    """The float weights by HF name without `transformer.`, in HF's layout: linears are (in, out).

    Values are views where the layout allows it, otherwise copies made on access. Observers are left
    out, because the plan holds their scales.
    """

    def __init__(self, model: GPT) -> None:
        self._family, self._head_dim = model.config.architecture, model.config.head_dim
        self._parameters = {
            name: parameter.detach()
            for name, parameter in model.named_parameters()
            if "observer" not in name and not name.startswith("head_input")
        }

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._parameters[name]
        if self._family.is_fused(name):
            tensor = by_projection(tensor, self._head_dim)
        return tensor.T if self._family.is_conv1d(name) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def by_head(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows (3 * H * D, ...) of a fused qkv: all q, all k, all v (HF) -> head by head
    (`GPT`)."""
    return rows.view(3, -1, head_dim, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def by_projection(rows: Tensor, head_dim: int) -> Tensor:
    """The inverse of `by_head`."""
    return rows.view(-1, 3, head_dim, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)
