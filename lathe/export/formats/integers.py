"""The integers and scales of a fake-quantized model, as file formats store them.

Shapes: O outputs of a linear, I its inputs, G groups of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lathe.model.architecture import HEAD
from lathe.model.checkpoint import HFTensors
from lathe.model.fake_quant import weight_scale
from lathe.model.gpt import GPT
from lathe.model.groups import weight_groups
from lathe.model.quantization import LinearFormat


@dataclass(frozen=True)
class Integers:
    """A quantized matrix.

    Attributes:
        fmt: the format of its linear.
        values: int8 (O, I).
        scales: float32 (O, G); a group has `form.weight.group_size` inputs (the last one may have
            fewer), or the whole row without groups.
    """

    fmt: LinearFormat
    values: Tensor
    scales: Tensor

    @property
    def bits(self) -> int:
        """Bits of an integer."""
        return self.fmt.weight.bits

    @property
    def floats(self) -> Tensor:
        """The dequantized values, float32 (O, I)."""
        return self.values * self.spread_scales(1)

    def rows(self, order: Tensor) -> "Integers":
        """The rows `order`, in that order."""
        return replace(self, values=self.values[order], scales=self.scales[order])

    def spread_scales(self, size: int) -> Tensor:
        """Scales (O, I / size) for groups of `size` inputs, a divisor of the group size and of
        I."""
        count = self.values.shape[1] // size
        per_group = (self.fmt.weight.group_size or self.values.shape[1]) // size
        return self.scales.repeat_interleave(per_group, 1)[:, :count]


@torch.no_grad()
def stored_matrices(model: GPT) -> Iterator[tuple[str, Tensor | Integers]]:
    """Yield every tensor with its Hugging Face name, without the prefix, in Hugging Face's layout
    except that linears are always (out, in); quantized ones as integers."""
    config = model.config
    family, plan = config.architecture, config.quantization
    linears = dict(plan.linears) if plan else {}
    if HEAD in linears:
        linears |= dict.fromkeys(config.tables, linears[HEAD])
    forms = {f"{name}.weight": fmt for name, fmt in linears.items()}
    if plan and plan.position_embedding:
        forms[f"{family.embeddings[1]}.weight"] = LinearFormat(activation=None)
    stored = HFTensors(model)
    for name, tensor in stored.items():
        whole = stored.parameter_name(name)
        fmt = forms.get(whole)
        matrix = tensor.T if family.is_conv1d(name) else tensor
        if fmt is None:
            yield name, matrix.contiguous()
            continue
        scale = None
        if fmt.weight.quantize_type == "abs_max":  # one scale for all that is fused
            scale = weight_scale(model.get_parameter(whole), fmt.weight)
        yield name, quantized(matrix, fmt, scale)


def quantized(weight: Tensor, fmt: LinearFormat, scale: Tensor | None = None) -> Integers:
    """Round a weight (O, I) as in training and in the ONNX graph.

    Args:
        scale: scale of the whole weight, if `weight` is only a part of it.
    """
    if size := fmt.weight.group_size:
        groups, scales = weight_groups(weight, size, fmt.weight.bits)
        values = groups.flatten(1)[:, : weight.shape[1]]
        return Integers(fmt, values.to(torch.int8), scales.squeeze(-1))
    weight_scales = weight_scale(weight, fmt.weight) if scale is None else scale
    levels = fmt.weight.levels
    values = torch.round(weight / weight_scales).clamp_(-levels, levels)
    return Integers(fmt, values.to(torch.int8), weight_scales.expand(len(weight), 1).contiguous())
