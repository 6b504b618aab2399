"""Choose the linears to quantize, all except those that the recipe or an analysis excludes, and
their formats."""

from collections.abc import Collection
from pathlib import Path

from lathe.compress.sensitivity.result import read_analysis
from lathe.config.settings import QuantizationSettings
from lathe.errors import UserError
from lathe.model.architecture import HEAD
from lathe.model.config import GPTConfig
from lathe.model.quantization import (
    INT8,
    ActivationFormat,
    LinearFormat,
    QuantizationPlan,
    WeightFormat,
)


def quantizable(config: GPTConfig, settings: QuantizationSettings) -> list[str]:
    """Paths of all quantizable linears; the tied head only together with the embedding."""
    head = [HEAD] if settings.quantize_embedding else []
    return config.linear_names() + head


def make_plan(
    config: GPTConfig,
    settings: QuantizationSettings,
    skip: Collection[str] = (),
    int8: Collection[str] = (),
) -> QuantizationPlan:
    """A plan for every quantizable linear but `skip`, its scales not known yet (0).

    Args:
        int8: linears that have 8 bits even if `weight_bits` is 4.
    """

    def linear(name: str) -> LinearFormat:
        activation: ActivationFormat | None
        if settings.weight_bits == 4 and name not in int8:
            weight, activation = WeightFormat.int4(settings.group_size), "dynamic_int8"
        else:
            weight = INT8 if name == HEAD else WeightFormat(settings.weight_quantize_type)
            activation = "int8"
        return LinearFormat(
            weight, None if settings.activation_quantize_type == "none" else activation
        )

    names = [name for name in quantizable(config, settings) if name not in skip]
    return QuantizationPlan({name: linear(name) for name in names})


def skip_names(
    config: GPTConfig, settings: QuantizationSettings, sensitivity: Path | None
) -> frozenset[str]:
    """Linears to leave in float, from the recipe's map and from a sensitivity analysis."""
    names = set()
    named = {linear.skip_name: linear.name for linear in config.architecture.linears}
    for block, linears in settings.skip_tensor_map.items():
        index = block.removeprefix("block_")
        if not index.isdigit() or int(index) >= config.n_layer:
            raise UserError(
                f"Compress.Quantization.skip_tensor_map names {block!r}",
                f"the model's blocks are block_0 to block_{config.n_layer - 1}",
            )
        names |= {f"h.{int(index)}.{named[linear]}" for linear in linears}
    if sensitivity is not None:
        chosen = read_analysis(sensitivity).skip
        unknown = set(chosen) - {*quantizable(config, settings), HEAD}
        if unknown:
            raise UserError(
                f"{sensitivity}: skips {sorted(unknown)}, which this model does not have",
                "analyze this model instead",
            )
        names |= set(chosen)
    return frozenset(names)
