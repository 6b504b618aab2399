"""Converts folders in the compressed-tensors format (vLLM, llm-compressor) to float checkpoints.

A quantized linear has integers, as `weight` (int8) or packed into int32 as `weight_packed`, with
`weight_scale` and perhaps `weight_zero_point`, with one scale per tensor, per row or per group of
inputs. `config_groups` in `config.json` say which, and tensors that disagree are rejected. Weights
are dequantized; scales of activations and of the KV cache are dropped.

Source: the package `compressed-tensors`, `quantization/quant_config.py` and `utils/match.py`.
"""

import json
import logging
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lathe.data.chat_template import FIX, sample_chat
from lathe.model.architecture import Architecture
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.config import COMPRESSED_TENSORS, QUANTIZED_HINT, GPTConfig
from lathe.model.folder import WEIGHTS, weight_files
from lathe_base.artifacts.kinds import CHECKPOINT, checked, read_json
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
FORMATS = ("int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
SUPPORTED = {"type": ("int",), "num_bits": (4, 8), "strategy": ("tensor", "channel", "group")}
"""Attributes of a `WeightScheme` -> the values that Lathe imports."""
INTEGERS = "give a folder with integer weights of 4 or 8 bits, with scales per tensor, row or group"
LINEAR, EMBEDDING = ("Linear", "Module"), ("Embedding", "Module")
"""Names of a module's class and its parents, which a target may be."""


@attested("import", "source")
def import_compressed_tensors(recipe: Recipe, source: Path, output: Path) -> GPTConfig:
    """Write a checkpoint folder, with float32 weights, from a folder of compressed-tensors.

    Raises:
        UserError: another kind of quantization, inconsistent tensors, or a model that
            `load_checkpoint` rejects.
    """
    claim_output_folder(output, CHECKPOINT, source)
    values = read_json(source / "config.json", "give the folder of a Hugging Face model")
    # Without the key, `config.json` is that of the float model, and is checked as such.
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
    # A float folder is written and loaded as any other, so that it passes the same checks.
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
            # The user has never seen the temporary folder.
            raise UserError(
                error.what.replace(str(plain), str(source)), error.hint, error.code
            ) from error
        if template := checkpoint.model.config.chat_template:
            sample_chat(template, str(source), FIX)
        with atomic_folder(output, CHECKPOINT) as work:
            save_checkpoint(work, checkpoint.model, checkpoint.tokenizer, "import", recipe)
    return checkpoint.model.config


class WeightScheme(BaseModel):
    """How the weights of a group's linears are quantized; the defaults are the package's."""

    model_config = ConfigDict(strict=True)

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None

    @model_validator(mode="after")
    def _with_strategy(self) -> "WeightScheme":
        size = self.group_size
        if self.strategy is None:  # as the package infers it
            self.strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        if self.strategy == "group" and (size is None or size < 1):
            raise ValueError(f"strategy is group, but group_size is {size}")
        return self

    @property
    def range(self) -> tuple[int, int]:
        """The lowest and the highest integer."""
        return -(2 ** (self.num_bits - 1)), 2 ** (self.num_bits - 1) - 1

    def n_groups(self, columns: int) -> int | None:
        """Number of scales of a row with this many inputs; None if they do not fill the groups."""
        if self.strategy != "group":
            return 1
        assert self.group_size is not None
        return None if columns % self.group_size else columns // self.group_size


class _SchemeGroup(BaseModel):
    targets: list[str]
    weights: WeightScheme | None = None


class _Quantization(BaseModel):
    config_groups: dict[str, _SchemeGroup]
    ignore: list[str] | None = None


@dataclass(frozen=True)
class Schemes:
    """The schemes of a folder's linears.

    Attributes:
        by_target: target (a path, `re:` and an expression for paths, or a class) -> the group's
            name and its scheme, None if its weights are not quantized.
        ignore: targets of modules that are not quantized.
        embeddings: paths of the embeddings; all other matrices are linears.
    """

    by_target: Mapping[str, tuple[str, WeightScheme | None]]
    ignore: Collection[str]
    embeddings: Collection[str]

    def find(self, path: str) -> tuple[str, WeightScheme] | None:
        """The name of the group of a module and its scheme, of the most specific target: a path
        before an expression before a class. None if its weights are not quantized."""
        classes = EMBEDDING if path in self.embeddings else LINEAR
        if any(_names(target, path) or target in classes for target in self.ignore):
            return None
        # False sorts before True: paths, then expressions; classes are appended.
        targets = sorted(self.by_target, key=lambda target: ("re:" in target, target))
        named = [target for target in targets if _names(target, path)]
        named += [target for target in targets if target in classes]
        name, scheme = self.by_target[named[0]] if named else ("", None)
        return None if scheme is None else (name, scheme)


def _names(target: str, path: str) -> bool:
    if target.startswith("re:"):
        # From the beginning, but not to the end, as in the package.
        return re.match(target.removeprefix("re:"), path) is not None
    return target == path


def read_schemes(values: Mapping[str, Any], family: Architecture, source: Path) -> Schemes:
    """Read the schemes from the values of a `config.json`.

    Raises:
        UserError: another quantization method, weights that are not integers of 4 or 8 bits, or
            online rotations.
    """
    config = values.get("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method != COMPRESSED_TENSORS:
        raise UserError(
            f"{source}: quant_method is {method!r}, but Lathe imports {COMPRESSED_TENSORS} only",
            QUANTIZED_HINT
            if method
            else "pass an ordinary checkpoint folder directly to the command that needs it",
            Code.UNSUPPORTED,
        )
    assert isinstance(config, dict)
    if config.get("format") not in FORMATS:
        raise UserError(
            f"{source}: format is {config.get('format')!r}, not one of {', '.join(FORMATS)}",
            "give a folder with integer weights",
            Code.UNSUPPORTED,
        )
    # Rotations that are not folded into the weights are computed at run time.
    if transforms := config.get("transform_config") or values.get("transform_config"):
        groups = transforms.get("config_groups", {}) if isinstance(transforms, dict) else {}
        raise UserError(
            f"{source}: transform_config has rotations ({', '.join(groups) or 'unnamed'}), which "
            "are applied online and which Lathe does not compute",
            "give a checkpoint that was quantized without SpinQuant, QuIP or other transforms",
            Code.UNSUPPORTED,
        )
    # Each group has targets, which are looked up for every module in `Schemes.find`.
    where = f"{source}: quantization_config"
    parsed = checked(config, _Quantization, where, INTEGERS)
    by_target: dict[str, tuple[str, WeightScheme | None]] = {}
    for name, group in parsed.config_groups.items():
        for key, supported in SUPPORTED.items():
            if group.weights and (value := getattr(group.weights, key)) not in supported:
                raise UserError(
                    f"{source}: {key} of the weights of {name} is {value!r}, but Lathe imports "
                    f"only {', '.join(map(str, supported))}",
                    INTEGERS,
                    Code.UNSUPPORTED,
                )
        by_target |= dict.fromkeys(group.targets, (name, group.weights))
    for target in (*by_target, *(parsed.ignore or ())):
        if target.startswith("re:"):
            try:
                re.compile(target.removeprefix("re:"))
            except re.error as error:
                raise UserError(
                    f"{source}: target {target!r} is not a regular expression: {error}",
                    "copy the folder again",
                    Code.MALFORMED,
                ) from None
    # There are only names here, no modules: they tell embeddings from linears.
    tables = [f"{name}.weight" for name in family.embeddings]
    embeddings = [family.stored_name(name).removesuffix(".weight") for name in tables]
    return Schemes(by_target, parsed.ignore or (), embeddings)


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
            # Passed on as it is, if by its name and by config_groups it is not quantized either.
            if kind in KEYS and kind != "weight":
                raise UserError(
                    f"{source}: {path} has {kind}, but no integers", HINT, Code.INCOMPLETE
                )
            match = schemes.find(path) if kind == "weight" and tensor.dim() == 2 else None
            if match is not None:
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise UserError(
                    f"{source}: {name} is {dtype}, but {match[0]} of config_groups says "
                    f"{match[1].num_bits} bits",
                    CONFIG_HINT,
                    Code.MISMATCH,
                )
            yield name, tensor
        elif kind in ("weight_packed", "weight"):
            yield f"{path}.weight", _dequantized(path, parts, schemes, source)
        elif kind not in KEYS:
            yield name, tensor


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
    values, zeros = linear.integers(), linear.zero_points()
    # Scales (), (1), (O), (O, 1) or (O, groups) -> (1 or O, groups), one for `size` inputs each.
    scales = scales.float().reshape(-1, scales.shape[-1] if scales.dim() > 1 else 1)
    size = values.shape[1] // scales.shape[1]
    offset = 0 if zeros is None else zeros.reshape(scales.shape).repeat_interleave(size, 1).float()
    return (values.float() - offset) * scales.repeat_interleave(size, 1)


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
        # Packed along the rows, whereas weights are packed along their inputs.
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


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words into integers (O, words * 32 / bits): the first one is in the lowest bits,
    and 2 ** (bits - 1) is added to each."""
    apart = words[..., None].long() >> torch.arange(0, WORD, bits)
    values: Tensor = (apart & (2**bits - 1)).flatten(1) - 2 ** (bits - 1)
    return values
