"""Converts folders in the compressed-tensors format (vLLM, llm-compressor) to float checkpoints.

A quantized linear has integers, as `weight` (int8) or packed into int32 as `weight_packed`, with
`weight_scale` and perhaps `weight_zero_point`, with one scale per tensor, per row or per group of
inputs. `config_groups` in `config.json` say which, and tensors that disagree are rejected. Weights
are dequantized; scales of activations and of the KV cache are dropped.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lathe.data.chat_template import FIX, sample_chat
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.compressed_schemes import Schemes, WeightScheme, read_schemes
from lathe.model.config import GPTConfig
from lathe.model.folder import WEIGHTS, weight_files
from lathe_base.artifacts.kinds import CHECKPOINT, read_json
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_folder, claim_output_folder

log = logging.getLogger("lathe")

WORD = 32
"""Bits of the integers into which weights are packed."""
KEYS = {
    *("weight", "weight_packed", "weight_shape"),
    *("weight_scale", "weight_zero_point", "weight_g_idx"),
}
"""Last words of the names of a quantized linear's tensors."""
RUNTIME = {
    f"{part}_{kind}"
    for part in ("input", "output", "q", "k", "v")
    for kind in ("scale", "zero_point")
}
"""Last words of names of activation scales, among them the KV cache's."""
HINT = "copy the folder again"
CONFIG_HINT = "use the config.json that belongs to these weights"


@attested("import", "source")
def import_compressed_tensors(recipe: Recipe, source: Path, output: Path) -> GPTConfig:
    """Write a checkpoint folder, with float32 weights, from a folder of compressed-tensors.

    Raises:
        UserError: another kind of quantization, inconsistent tensors, or a model that
            `load_checkpoint` rejects.
    """
    claim_output_folder(output, CHECKPOINT, source)
    values = read_json(source / "config.json", "give the folder of a Hugging Face model")
    plain_values = {k: x for k, x in values.items() if k != "quantization_config"}
    family = GPTConfig.from_json(plain_values, f"{source}/config.json").architecture
    schemes = read_schemes(values, family, source)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(source):
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: not safetensors: {error}", HINT, Code.MALFORMED) from None
    if dropped := [name for name in tensors if name.rpartition(".")[2] in RUNTIME]:
        log.warning(
            "%s: dropping %d scales and zero points of activations, such as %s: the checkpoint "
            "computes inputs, keys and values in float",
            *(source, len(dropped), dropped[0]),
        )
    with TemporaryDirectory(prefix="lathe-import-") as folder:
        plain = Path(folder)
        for path in source.iterdir():  # tokenizer, chat template, ends of a text
            if path.is_file() and path.suffix != ".safetensors" and "index" not in path.name:
                shutil.copyfile(path, plain / path.name)
        (plain / "config.json").write_text(json.dumps(plain_values), encoding="utf-8")
        save_file(dict(dequantized(tensors, schemes, source)), plain / WEIGHTS, {"format": "pt"})
        try:
            checkpoint = load_checkpoint(plain)
        except UserError as error:
            raise UserError(
                error.what.replace(str(plain), str(source)), error.hint, error.code
            ) from error
        if template := checkpoint.model.config.chat_template:
            sample_chat(template, str(source), FIX)
        with atomic_folder(output, CHECKPOINT) as work:
            save_checkpoint(work, checkpoint.model, checkpoint.tokenizer, "import", recipe)
    return checkpoint.model.config


def dequantized(
    tensors: Mapping[str, Tensor], schemes: Schemes, source: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield the float tensors by the names of a plain Hugging Face file.

    Raises:
        UserError: a tensor that disagrees with the scheme of its linear, or integers in an order of
            their own (`weight_g_idx`).
    """
    for name, tensor in tensors.items():
        path, _, kind = name.rpartition(".")
        if kind in RUNTIME:
            continue
        parts = {key: x for key in KEYS if (x := tensors.get(f"{path}.{key}")) is not None}
        is_quantized = "weight_packed" in parts or (
            "weight" in parts and parts["weight"].dtype == torch.int8
        )
        if not is_quantized:
            _require_float(name, parts, schemes, source)
            yield name, tensor
        elif kind in ("weight_packed", "weight"):
            yield f"{path}.weight", _dequantized(path, parts, schemes, source)
        elif kind not in KEYS:
            yield name, tensor


def _require_float(name: str, parts: Mapping[str, Tensor], schemes: Schemes, source: Path) -> None:
    """Raise UserError unless a tensor belongs to a module that is not quantized."""
    path, _, kind = name.rpartition(".")
    if kind in KEYS and kind != "weight":
        raise UserError(f"{source}: {path} has {kind}, but no integers", HINT, Code.INCOMPLETE)
    match = schemes.find(path) if kind == "weight" and parts["weight"].dim() == 2 else None
    if match is not None:
        dtype = str(parts["weight"].dtype).removeprefix("torch.")
        raise UserError(
            f"{source}: {name} is {dtype}, but {match[0]} of config_groups says "
            f"{match[1].num_bits} bits",
            CONFIG_HINT,
            Code.MISMATCH,
        )


def _dequantized(path: str, parts: Mapping[str, Tensor], schemes: Schemes, source: Path) -> Tensor:
    """The weight (O, I) of a linear in float32, from its `parts`, by the last word of their
    names."""
    if (match := schemes.find(path)) is None:
        raise UserError(
            f"{source}: {path} has integers, but by config_groups and ignore it has none",
            CONFIG_HINT,
            Code.MISMATCH,
        )
    if "weight_g_idx" in parts:
        raise UserError(
            f"{source}: {path} has weight_g_idx",
            "save it again with actorder=static or without activation ordering",
            Code.UNSUPPORTED,
        )
    group, scheme = match
    for key, is_needed in (("weight_scale", True), ("weight_zero_point", not scheme.symmetric)):
        if is_needed and key not in parts:
            raise UserError(
                f"{source}: {path} has no {key}, which {group} of config_groups requires",
                HINT,
                Code.INCOMPLETE,
            )
    linear = _Linear(path, parts, group, scheme, source)
    scales = linear.part("weight_scale", linear.scale_shapes)
    return _float(linear.integers(), scales, linear.zero_points())


@dataclass(frozen=True)
class _Linear:
    """The tensors of a quantized linear, checked against the scheme of its group."""

    path: str
    parts: Mapping[str, Tensor]
    group: str
    scheme: WeightScheme
    source: Path

    @property
    def is_packed(self) -> bool:
        return "weight_packed" in self.parts

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(O, I) of the weight."""
        shape = list(self.parts.get("weight", torch.empty(0)).shape)
        if self.is_packed:
            shape = self.parts.get("weight_shape", torch.empty(0)).flatten().tolist()
        if len(shape) != 2 or min(shape) < 1:
            raise UserError(
                f"{self.source}: {self.path} has no weight_shape of two numbers",
                HINT,
                Code.INCOMPLETE,
            )
        return shape[0], shape[1]

    @cached_property
    def n_groups(self) -> int:
        """Number of scales of a row."""
        if (n_groups := self.scheme.n_groups(self.shape[1])) is None:
            raise UserError(
                f"{self.source}: the {self.shape[1]} inputs of {self.path} are not a multiple of "
                f"the group size {self.scheme.group_size} of {self.group}",
                CONFIG_HINT,
                Code.MISMATCH,
            )
        return n_groups

    @property
    def scale_shapes(self) -> list[tuple[int, ...]]:
        if self.scheme.strategy == "tensor":
            return [(1,), (1, 1), ()]
        rows = self.shape[0]
        return [(rows, self.n_groups), *([(rows,)] if self.scheme.strategy == "channel" else [])]

    def integers(self) -> Tensor:
        """(O, I)."""
        rows, columns = self.shape
        if self.is_packed:
            words = self.part("weight_packed", [(rows, self._words(columns))])
            return unpacked(words, self.scheme.num_bits)[:, :columns]
        values = self.parts["weight"]
        low, high = (int(x) for x in values.aminmax())
        lowest, highest = self.scheme.range
        if low < lowest or high > highest:
            raise self._disagrees(
                "weight", f"has integers from {low} to {high}", f"{lowest} to {highest}"
            )
        return values

    def zero_points(self) -> Tensor | None:
        """In a shape of the scales; None if they are zero."""
        zero = self.parts.get("weight_zero_point")
        if zero is None:
            return None
        if self.scheme.symmetric:
            if bool(zero.any()):
                raise self._disagrees("weight_zero_point", "is not zero", "zero (symmetric)")
            return None
        if not self.is_packed or self.scheme.strategy == "tensor":
            return self.part("weight_zero_point", self.scale_shapes)
        rows = self.shape[0]
        words = self.part("weight_zero_point", [(self._words(rows), self.n_groups)])
        return unpacked(words.T, self.scheme.num_bits).T[:rows]

    def part(self, key: str, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """One of the tensors; raises UserError unless it has one of the shapes."""
        tensor = self.parts[key]
        if tuple(tensor.shape) not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise self._disagrees(key, f"is {tuple(tensor.shape)}", wanted)
        return tensor

    def _words(self, n: int) -> int:
        return -(-n * self.scheme.num_bits // WORD)

    def _disagrees(self, key: str, actual: str, wanted: str) -> UserError:
        scheme = self.scheme
        size = f" of {scheme.group_size}" if scheme.strategy == "group" else ""
        return UserError(
            f"{self.source}: {self.path}.{key} {actual}, but {self.group} of config_groups "
            f"({scheme.num_bits} bits, a scale for each {scheme.strategy}{size}) makes it {wanted}",
            CONFIG_HINT,
            Code.MISMATCH,
        )


def _float(values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Integers (O, I) with scales (), (1), (O), (O, 1) or (O, groups) -> (O, I) in float32."""
    scales = scale.float().reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)
    size = values.shape[1] // scales.shape[1]
    offset = 0 if zero is None else zero.reshape(scales.shape).repeat_interleave(size, 1).float()
    return (values.float() - offset) * scales.repeat_interleave(size, 1)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words into integers (O, words * 32 / bits): the first one is in the lowest bits,
    and 2 ** (bits - 1) is added to each."""
    apart = words[..., None].long() >> torch.arange(0, WORD, bits)
    values: Tensor = (apart & (2**bits - 1)).flatten(1) - 2 ** (bits - 1)
    return values
