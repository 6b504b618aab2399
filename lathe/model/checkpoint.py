"""Load and save checkpoint folders as torch models; `lathe.model.folder` defines their files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from lathe.data.tokenizer import eos_id
from lathe.model import fake_quant
from lathe.model.config import GPTConfig
from lathe.model.folder import (
    HINT,
    CheckpointFolder,
    drop_tied_head,
    non_finite,
    open_folder,
    read_tensors,
    require_fit,
    require_size,
    write_folder,
)
from lathe.model.gpt import GPT
from lathe_base.artifacts.metadata import Origin
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: the model in eval mode, fake-quantized by its plan if it has one."""

    source: CheckpointFolder
    model: GPT
    tokenizer: Tokenizer

    @property
    def folder(self) -> Path:
        """The folder that it was loaded from."""
        return self.source.path

    @property
    def meta(self) -> dict[str, Any]:
        """`lathe.json`; empty for a plain Hugging Face folder."""
        return self.source.meta

    @property
    def digest(self) -> str:
        """Identity of the checkpoint's weights and configuration."""
        return self.source.digest

    @property
    def eos_id(self) -> int:
        """The id of the end of a document."""
        return eos_id(self.tokenizer)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a generated text: the end of a document, and others of the model's."""
        return tuple(dict.fromkeys((self.eos_id, *self.model.config.end_ids)))


def load_checkpoint(folder: Path | str | CheckpointFolder) -> Checkpoint:
    """Load a checkpoint folder, an HF folder, or `hf://NAME` from the Hugging Face Hub.

    Raises:
        UserError: missing, truncated, altered, pickled or non-finite weights; an unsupported model;
            a tokenizer with more ids than the model.
    """
    source = open_folder(folder).verified
    files, config, family = source.weights, source.config, source.config.architecture
    require_size(files, config)
    tensors: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in read_tensors(path, "pt", family):
            if name in tensors:
                raise UserError(
                    f"{path}: contains {name}, which is also in another file", HINT, Code.DUPLICATE
                )
            tensors[name] = tensor
    if config.tie_word_embeddings:
        drop_tied_head(tensors, family, files[0])
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    require_fit(files[0], shapes, dict(config.tensor_shapes()))  # unknown tensors are rejected
    # The model's parameters take no memory until the tensors of the files become them.
    with torch.device("meta"):
        model = GPT(config)
    state = {}
    for name in model.state_dict():
        parts = []
        for stored in family.stored_names(name):
            part = tensors.pop(stored).float()  # popped, so that a model is not in memory twice
            # The extremes of a tensor with NaN are NaN: no mask of its size is needed.
            if not all(extreme.isfinite() for extreme in part.aminmax()):
                raise non_finite(files[0], stored)
            parts.append(part.T if family.is_conv1d(name) else part)
        if fused := fused_apart(config, name):
            groups, sizes = fused
            parts = [join_rows(torch.split(parts[0], sizes) if len(parts) == 1 else parts, groups)]
        state[name] = parts[0].contiguous()
    model.load_state_dict(state, assign=True)
    if config.quantization is not None:
        fake_quant.insert(model, config.quantization)
        for name, scale in fake_quant.cache_scales(model).items():
            scale.copy_(tensors.pop(name))
            if not (scale.isfinite() & (scale > 0)).all():
                raise UserError(f"{files[0]}: {name} is not positive", HINT, Code.MALFORMED)
    return Checkpoint(source, model.eval(), source.tokenizer)


def save_checkpoint(
    folder: Path,
    model: GPT,
    tokenizer: Tokenizer,
    stage: str,
    recipe: Recipe,
    origin: Origin | None = None,
    metrics: dict[str, Any] | None = None,
    write_more: Callable[[Path], Sequence[str]] | None = None,
) -> None:
    """Write a checkpoint into `folder`, `lathe.json` last; other files in it are kept.

    A fake-quantized model is saved as its float weights and, in `config.json`, its plan.

    Args:
        write_more: see `write_folder`.
    """

    def write_weights(path: Path) -> None:
        stored = model.config.architecture.stored_name
        # safetensors rejects views in another order than their memory's.
        tensors = {**HFTensors(model), **fake_quant.cache_scales(model)}
        tensors = {stored(name): tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, path, {"format": "pt"})

    write_folder(
        *(folder, write_weights, model.config, tokenizer, stage, recipe, origin, metrics),
        write_more=write_more,
    )


def fused_apart(config: GPTConfig, name: str) -> tuple[int, list[int]] | None:
    """`fused_rows` of a parameter whose rows have a different order in the files than in the
    model."""
    linear = config.architecture.find_linear(name)
    return None if linear is None or linear.is_grouped else fused_rows(config, name)


def fused_rows(config: GPTConfig, name: str) -> tuple[int, list[int]] | None:
    """Number of row groups of a fused parameter and the rows of each of its parts; None if it is
    not fused."""
    linear = config.architecture.find_linear(name)
    if linear is None or not config.architecture.is_fused(name):
        return None
    layer = int(name.removeprefix(f"{config.architecture.blocks}.").partition(".")[0])
    widths = config.layer_widths(layer)
    return config.groups(linear, layer), [widths[part] for part in linear.parts]


class HFTensors(Mapping[str, Tensor]):
    """The float weights by HF name without the prefix, in HF's layout: GPT-2's linears are (in,
    out).

    Values are views if the layout allows it, otherwise copies made on access. Observers are
    omitted, because the plan contains their scales, and so are the scales of the KV cache, which
    other formats do not have.
    """

    def __init__(self, model: GPT) -> None:
        self._config = model.config
        self._stored: dict[str, tuple[str, Tensor, int]] = {}
        for name, parameter in model.named_parameters():
            if "observer" not in name and not name.startswith("head_input"):
                for part, stored in enumerate(model.config.architecture.stored_names(name)):
                    self._stored[stored] = name, parameter.detach(), part
        for name, buffer in model.named_buffers():
            if name.endswith(".prefix"):
                self._stored[name] = name, buffer, 0

    def __getitem__(self, stored: str) -> Tensor:
        name, tensor, part = self._stored[stored]
        family = self._config.architecture
        if fused := fused_apart(self._config, name):
            parts = split_rows(tensor, *fused)
            is_apart = len(family.stored_names(name)) > 1
            tensor = parts[part] if is_apart else torch.cat(parts)
        return tensor.T if family.is_conv1d(name) else tensor

    def parameter_name(self, stored: str) -> str:
        """The model's name of the parameter that contains a tensor."""
        return self._stored[stored][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def by_projection(rows: Tensor, config: GPTConfig, name: str) -> Tensor:
    """Reorder the rows of the fused parameter `name`: group by group (`GPT`) -> one matrix after
    the other (HF)."""
    fused = fused_rows(config, name)
    return torch.cat(split_rows(rows, *fused)) if fused else rows


def join_rows(parts: Sequence[Tensor], groups: int) -> Tensor:
    """Rows of several matrices (groups * n_i, ...) -> the rows of one (groups * sum n_i, ...): for
    each group those of the first part, then those of the second, and so on."""
    apart = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]  # (groups, n_i, ...)
    return torch.cat(apart, 1).flatten(0, 1)


def split_rows(rows: Tensor, groups: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The inverse of `join_rows`; `sizes` are the rows of each part."""
    apart = rows.reshape(groups, -1, *rows.shape[1:])
    pieces = torch.split(apart, [size // groups for size in sizes], 1)
    return tuple(part.flatten(0, 1) for part in pieces)
