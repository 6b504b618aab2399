"""The `quantization_config` of a compressed-tensors folder: the scheme of each linear.

Source: the package `compressed-tensors`, `quantization/quant_config.py` and `utils/match.py`.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from lathe.model.architecture import Architecture
from lathe_base.artifacts.kinds import checked
from lathe_base.errors import Code, UserError

METHOD = "compressed-tensors"
FORMATS = ("int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
QUANTIZED_HINT = (
    "give the float checkpoint that it was made from, or a compressed-tensors folder or GGUF file "
    "of the model, which lathe import reads"
)
BITS = (4, 8)
INTEGERS = "give a folder with integer weights of 4 or 8 bits, with scales per tensor, row or group"
LINEAR, EMBEDDING = ("Linear", "Module"), ("Embedding", "Module")
"""Names of a module's class and its parents, which a target may be."""


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
        if self.strategy is None:
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
        targets = sorted(self.by_target, key=lambda target: ("re:" in target, target))
        named = [target for target in targets if _names(target, path)]
        named += [target for target in targets if target in classes]
        name, scheme = self.by_target[named[0]] if named else ("", None)
        return None if scheme is None else (name, scheme)


def _names(target: str, path: str) -> bool:
    if target.startswith("re:"):
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
    if method != METHOD:
        raise UserError(
            f"{source}: quant_method is {method!r}, but Lathe imports {METHOD} only",
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
    if transforms := config.get("transform_config") or values.get("transform_config"):
        groups = transforms.get("config_groups", {}) if isinstance(transforms, dict) else {}
        raise UserError(
            f"{source}: transform_config has rotations ({', '.join(groups) or 'unnamed'}), which "
            "are applied online and which Lathe does not compute",
            "give a checkpoint that was quantized without SpinQuant, QuIP or other transforms",
            Code.UNSUPPORTED,
        )
    where = f"{source}: quantization_config"
    parsed = checked(config, _Quantization, where, INTEGERS)
    by_target: dict[str, tuple[str, WeightScheme | None]] = {}
    for name, group in parsed.config_groups.items():
        _require_integers(name, group.weights, source)
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
    tables = [f"{name}.weight" for name in family.embeddings]
    embeddings = [family.stored_name(name).removesuffix(".weight") for name in tables]
    return Schemes(by_target, parsed.ignore or (), embeddings)


def _require_integers(name: str, scheme: WeightScheme | None, source: Path) -> None:
    if scheme is None:
        return
    for key, value, supported in (
        ("type", scheme.type, ("int",)),
        ("num_bits", scheme.num_bits, BITS),
        ("strategy", scheme.strategy, ("tensor", "channel", "group")),
    ):
        if value not in supported:
            raise UserError(
                f"{source}: {key} of the weights of {name} is {value!r}, but Lathe imports only "
                f"{', '.join(map(str, supported))}",
                INTEGERS,
                Code.UNSUPPORTED,
            )
