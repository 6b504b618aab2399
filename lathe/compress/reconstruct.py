"""Fit what stays of a pruned layer to its output before pruning, without training.

A removed head or channel is seldom independent of those that stay. The linear that reads them gets
the weights W' of least |W x - W' x'|^2 over calibration tokens, where x has the features of all
units and x' of those that stay, so that it still adds whatever of the removed units' output follows
from the others. The layers are fitted in order, each with the inputs that the fitted ones before it
give. Nothing but weights changes.

Source: He et al. 2017, "Channel Pruning for Accelerating Very Deep Neural Networks"
(arXiv:1707.06168), section 3.1, with a ridge towards the original weights.

Shapes: B batch, T tokens, C hidden size, I features that a linear reads, K of them that stay.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from lathe.compress.gptq import input_hessian
from lathe.compress.widths import KeptUnits, read_features
from lathe.model.block import Block, Half
from lathe.model.by_block import by_halves, embed, for_each, on
from lathe.model.gpt import GPT
from lathe_base.progress import track

RIDGE = 0.01  # of the mean square of an input
MATRICES = 5  # like I x I in float64, while a linear is fitted


@torch.no_grad()
def reconstruct(model: GPT, kept: Sequence[KeptUnits], batches: Sequence[Tensor]) -> None:
    """Change the linears that read heads and channels, in place, for `shrink`: they no longer read
    the units that it will remove, and make up for them.

    Args:
        batches: tokens (B, T) each, on the device on which the blocks are fitted, one after the
            other.
    """
    training = model.training
    model.eval()
    family, device = model.config.architecture, batches[0].device
    states = embed(model, batches)
    for i, block in enumerate(track(model.blocks, "reconstruction", len(model.blocks))):
        assert isinstance(block, Block)
        linears = (block.get_submodule(family.row(units).name) for units in ("heads", "channels"))
        features = dict(zip(linears, read_features(model.config, i, kept[i]), strict=True))
        with on(device, block):
            states = by_halves(device, block, states, partial(_fit_half, features, device))
    model.train(training)


def reconstruct_bytes(model: GPT) -> int:
    """Memory that `reconstruct` needs on the device of its batches beside that of a pass, in
    bytes."""
    widths = (model.config.layer_widths(i) for i in range(model.config.n_layer))
    return MATRICES * 8 * max(max(x["heads"], x["channels"]) for x in widths) ** 2


def _fit_half(
    features: Mapping[nn.Module, Tensor], device: torch.device, half: Half, states: Sequence[Tensor]
) -> list[Tensor]:
    """Fit the linear that reads a half's units; returns its inputs (B, T, I)."""
    linear = getattr(half.part, half.part.names[1])
    inputs = for_each(device, lambda x: half.part.inner(half.norm(x)), states)
    kept = features[linear].to(device)
    if len(kept) < linear.in_features:
        _fit(linear, kept, (x.to(device, non_blocking=True) for x in inputs))
    return inputs


def _fit(linear: nn.Linear, kept: Tensor, inputs: Iterable[Tensor]) -> None:
    """Change weight and bias, in place, for the features `kept` (K,) of inputs (B, T, I); those of
    the others become zero."""
    weight = linear.weight.double()
    if linear.bias is not None:  # the weight of a feature that is always 1
        weight = torch.cat([weight, linear.bias.double()[:, None]], 1)
        inputs = (functional.pad(x, (0, 1), value=1.0) for x in inputs)
        kept = torch.cat([kept, kept.new_tensor([linear.in_features])])
    products = input_hessian(inputs)
    ridge = RIDGE * products.diagonal().mean().clamp_min(1e-9)
    matrix = products[kept][:, kept]
    matrix.diagonal().add_(ridge)
    solution = torch.linalg.solve(matrix, (products @ weight.T + ridge * weight.T)[kept])
    fitted = torch.zeros_like(weight)
    fitted[:, kept] = solution.T
    linear.weight.copy_(fitted[:, : linear.in_features])
    if linear.bias is not None:
        linear.bias.copy_(fitted[:, -1])
