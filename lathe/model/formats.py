"""Descriptions of a model's quantization formats, for its card and its bill of materials."""

from collections.abc import Iterable
from itertools import groupby

from lathe.model.architecture import HEAD
from lathe.model.config import GPTConfig
from lathe.model.quantization import LinearFormat


def describe_formats(config: GPTConfig) -> dict[str, str]:
    """The linears of each format: `INT8 per channel, INT8 inputs` -> `attn.c_attn (all blocks)`."""
    plan = config.quantization
    by_format: dict[str, list[str]] = {}
    for name in (*config.linear_names(), HEAD):
        linear_format = plan.linears.get(name) if plan else None
        by_format.setdefault(_format(linear_format), []).append(name)
    if plan and plan.position_embedding:
        by_format["INT8 per position"] = [config.architecture.embeddings[1]]
    return {fmt: _linears(names, config.n_layer) for fmt, names in by_format.items()}


def _format(linear: LinearFormat | None) -> str:
    if linear is None:
        return "float"
    weight = linear.weight
    scales = {
        "abs_max": "per tensor",
        "channel_wise_abs_max": "per channel",
        "group_wise": f"per group of {weight.group_size}",
    }
    inputs = {
        None: "float inputs",
        "int8": "INT8 inputs, static scale",
        "dynamic_int8": "INT8 inputs, dynamic scales",
    }
    return f"INT{weight.bits} {scales[weight.quantize_type]}, {inputs[linear.activation]}"


def _linears(names: Iterable[str], n_layer: int) -> str:
    """Linears, abbreviated: `attn.c_attn (blocks 0-3, 5), lm_head`."""
    blocks: dict[str, list[int]] = {}
    for name in names:
        _, block, linear = name.split(".", 2) if "." in name else ("", "", name)
        blocks.setdefault(linear, []).extend([int(block)] if block else [])
    parts = []
    for linear, layers in blocks.items():
        runs = [
            [block for _, block in run]
            for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])
        ]
        shown = ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
        some = f"block{'s' if len(layers) > 1 else ''} {shown}"
        where = "all blocks" if len(layers) == n_layer else some
        parts.append(f"{linear} ({where})" if layers else linear)
    return ", ".join(parts)
