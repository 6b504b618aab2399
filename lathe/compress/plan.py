"""Chooses the format of every linear: the recipe's default, unless an analysis or the recipe names
another."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lathe.compress.sensitivity.result import read_analysis
from lathe.model.architecture import HEAD
from lathe.model.config import GPTConfig
from lathe.model.quantization import (
    INT8,
    LinearFormat,
    QuantizationPlan,
    WeightFormat,
)
from lathe_base.config.settings import QuantizationSettings
from lathe_base.config.settings.types import FORMATS, ActivationScales, Format
from lathe_base.errors import Code, UserError

INT8_FORMATS: Mapping[ActivationScales, Sequence[Format]] = {
    "auto": ("static_int8", "dynamic_int8"),
    "moving_average_abs_max": ("static_int8",),
    "dynamic": ("dynamic_int8",),
    "none": ("weight_only_int8",),
}
"""The formats that `int8` stands for; for `auto` both, the default first."""


def quantizable(config: GPTConfig, settings: QuantizationSettings) -> list[str]:
    """Paths of all quantizable linears; the tied head only together with the embedding."""
    head = [HEAD] if settings.quantize_embedding else []
    return config.linear_names() + head


def all_int8(config: GPTConfig, settings: QuantizationSettings) -> dict[str, Format]:
    """INT8 for every quantizable linear."""
    return dict.fromkeys(quantizable(config, settings), "int8")


def formats(
    settings: QuantizationSettings, int8: Sequence[Format] = (), named: bool = True
) -> list[Format]:
    """The formats that a linear may have, the narrowest first.

    Args:
        int8: the INT8 formats to choose from; by default all that the recipe allows.
        named: whether to include those that the recipe sets for individual linears.
    """
    offered = {"float", *(int8 or INT8_FORMATS[settings.activation_quantize_type])}
    offered |= {"int4"} if settings.weight_bits == 4 else set()
    offered |= settings.named if named else set()
    return [fmt for fmt in FORMATS if fmt in offered]


def make_plan(
    config: GPTConfig, settings: QuantizationSettings, formats: Mapping[str, Format] | None = None
) -> QuantizationPlan:
    """A plan for every quantizable linear, with unknown scales (0); `auto` activation scales are
    static (see `lathe.compress.activation`).

    Args:
        formats: those of individual linears; the others follow `weight_bits`.
    """
    usual: Format = "int4" if settings.weight_bits == 4 else "int8"
    chosen = {name: (formats or {}).get(name, usual) for name in quantizable(config, settings)}
    in_float = settings.activation_quantize_type == "none"

    def linear(name: str, fmt: Format) -> LinearFormat:
        if fmt == "int8":
            fmt = INT8_FORMATS[settings.activation_quantize_type][0]
        facts = FORMATS[fmt]
        if facts.bits and facts.is_grouped:
            has_zeros = settings.zero_points and facts.bits == 4
            weight = WeightFormat.grouped(settings.group_size, facts.bits, has_zeros)
        else:
            weight = INT8 if name == HEAD else WeightFormat(settings.weight_quantize_type)
        return LinearFormat(weight, None if in_float and fmt == "int4" else facts.activation)

    return QuantizationPlan({n: linear(n, fmt) for n, fmt in chosen.items() if fmt != "float"})


def named_formats(
    config: GPTConfig, settings: QuantizationSettings, sensitivity: Path | None
) -> dict[str, Format]:
    """Formats of individual linears: those chosen by a sensitivity analysis, overridden by the
    recipe's.

    Raises:
        UserError: a linear or a block that the model does not have.
    """
    known, named = quantizable(config, settings), dict[str, Format]()
    if sensitivity is not None:
        analysis = read_analysis(sensitivity)
        allowed = formats(settings)
        named.update({name: fmt for name, fmt in analysis.formats.items() if fmt in allowed})
        named.update(dict.fromkeys(analysis.skip, "float"))
        if unknown := named.keys() - {*known, HEAD}:
            raise UserError(
                f"{sensitivity}: chooses formats for {sorted(unknown)}, which this model does not "
                "have",
                "analyze this model instead",
                Code.MISMATCH,
            )
    by_name = {linear.skip_name: linear.name for linear in config.architecture.linears}
    in_float: Format = "float"
    skipped = {b: dict.fromkeys(x, in_float) for b, x in settings.skip_tensor_map.items()}
    for key, blocks in (("skip_tensor_map", skipped), ("formats", settings.formats)):
        for block, linears in blocks.items():
            index = int(block.removeprefix("block_"))
            if linears and index >= config.n_layer:
                raise UserError(
                    f"Compress.Quantization.{key} names {block!r}",
                    f"the model's blocks are block_0 to block_{config.n_layer - 1}",
                    Code.UNKNOWN_NAME,
                )
            path = config.architecture.block(index)
            named.update({f"{path}.{by_name[x]}": fmt for x, fmt in linears.items()})
    if settings.head_format is not None:
        if not settings.quantize_embedding:
            raise UserError(
                f"Compress.Quantization.head_format is {settings.head_format}, but the output "
                "layer is the token embedding, which is not quantized",
                "set Compress.Quantization.quantize_embedding=True",
                Code.CONFLICTING_OPTIONS,
            )
        named[HEAD] = settings.head_format
    return named
