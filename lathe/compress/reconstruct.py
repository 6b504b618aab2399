"""Fit what stays of a pruned model to what it computed before pruning, without training.

A removed head or channel is seldom independent of those that stay. The linear that reads them gets
the weights W' of least |W x - W' x'|^2 over calibration tokens, where x has the features of all
units and x' of those that stay, so that it still adds whatever of the removed units' output follows
from the others. The layers are fitted in order, each with the inputs that the fitted ones before it
give. Nothing but weights changes.

Where whole layers are removed, the FFN before them gets the weights of least error for its output
and theirs together.

Source: He et al. 2017, "Channel Pruning for Accelerating Very Deep Neural Networks"
(arXiv:1707.06168), section 3.1, with a ridge towards the original weights; for layers, Shopkhoev et
al. 2025, "ReplaceMe" (arXiv:2505.02819), with all of the FFN's last linear instead of a map of its
output.

Shapes: B batch, T tokens, C hidden size, I features that a linear reads, K of them that stay.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

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
    family, device = model.config.architecture, batches[0].device
    features: dict[nn.Module, Tensor] = {}
    for i, block in enumerate(model.blocks):
        linears = (block.get_submodule(family.row(units).name) for units in ("heads", "channels"))
        for linear, read in zip(linears, read_features(model.config, i, kept[i]), strict=True):
            assert isinstance(linear, nn.Linear)
            if len(read) < linear.in_features:
                features[linear] = read
    if not features:
        return
    training = model.training
    model.eval()
    states = embed(model, batches)
    for block in track(model.blocks, "reconstruction", len(model.blocks)):
        assert isinstance(block, Block)
        with on(device, block):
            fit = partial(_fit_half, device, features, [None] * len(states))
            states = by_halves(device, block, states, fit)
    model.train(training)


@torch.no_grad()
def reconstruct_layers(model: GPT, kept: Sequence[int], batches: Sequence[Tensor]) -> None:
    """Change the FFN before each gap between the layers `kept`, in place, for `keep_layers`: it
    also adds whatever of the missing layers' output follows from its features.

    It has to be the last in its layer: families that normalize its output stay as they are.

    Args:
        batches: tokens (B, T) each, on the device on which the blocks are fitted, one after the
            other.
    """
    spans = [*zip(kept, (*kept[1:], len(model.blocks)), strict=True)]
    while spans and spans[-1][1] == spans[-1][0] + 1:
        spans.pop()  # nothing is missing after these
    if not spans or model.config.architecture.output_norms:
        return
    training = model.training
    model.eval()
    device, states = batches[0].device, embed(model, batches)
    for i, end in track(spans, "reconstruction", len(spans)):
        block = model.blocks[i]
        assert isinstance(block, Block)
        with on(device, block):
            outputs = for_each(device, block, states)
        if end == i + 1:
            states = outputs
            continue
        wanted = outputs
        for removed in model.blocks[i + 1 : end]:
            with on(device, removed):
                wanted = for_each(device, removed, wanted)
        missing = for_each(device, torch.sub, wanted, outputs)
        ffn = block.halves[1].part
        linear = getattr(ffn, ffn.names[1])
        with on(device, block):
            fit = partial(_fit_half, device, {linear: torch.arange(linear.in_features)}, missing)
            states = by_halves(device, block, states, fit)
    model.train(training)


def reconstruct_bytes(model: GPT) -> int:
    """Memory that `reconstruct` and `reconstruct_layers` need on the device of the batches beside
    that of a pass, in bytes."""
    widths = (model.config.layer_widths(i) for i in range(model.config.n_layer))
    return MATRICES * 8 * max(max(x["heads"], x["channels"]) for x in widths) ** 2


def _fit_half(
    device: torch.device,
    features: Mapping[nn.Module, Tensor],
    missing: Sequence[Tensor | None],
    half: Half,
    states: Sequence[Tensor],
) -> list[Tensor]:
    """Fit a half's second linear if it is among `features`, for what each batch's output misses;
    returns its inputs (B, T, I)."""
    linear = getattr(half.part, half.part.names[1])
    inputs = for_each(device, lambda x: half.part.inner(half.norm(x)), states)
    if linear in features:
        _fit(device, linear, features[linear].to(device), zip(inputs, missing, strict=True))
    return inputs


def _fit(
    device: torch.device,
    linear: nn.Linear,
    kept: Tensor,
    pairs: Iterable[tuple[Tensor, Tensor | None]],
) -> None:
    """Change weight and bias, in place, for the features `kept` (K,) of the inputs; those of the
    others become zero.

    Args:
        pairs: inputs (B, T, I), and what the linear should add (B, T, O) to its present output.
    """
    weight = linear.weight.double()
    if linear.bias is not None:  # the weight of a feature that is always 1
        weight = torch.cat([weight, linear.bias.double()[:, None]], 1)
        kept = torch.cat([kept, kept.new_tensor([linear.in_features])])
    outputs, features = weight.shape
    products, added = (
        torch.zeros(features, n, dtype=torch.float64, device=device) for n in (features, outputs)
    )
    for batch, more in pairs:
        x = batch.to(device, non_blocking=True).flatten(0, -2)
        if linear.bias is not None:
            x = functional.pad(x, (0, 1), value=1.0)
        products += x.T @ x
        if more is not None:
            added += x.T @ more.to(device, non_blocking=True).flatten(0, -2)
    ridge = RIDGE * products.diagonal().mean().clamp_min(1e-9)
    matrix = products[kept][:, kept]
    matrix.diagonal().add_(ridge)
    wanted = products @ weight.T + ridge * weight.T + added
    fitted = torch.zeros_like(weight)
    fitted[:, kept] = torch.linalg.solve(matrix, wanted[kept]).T
    linear.weight.copy_(fitted[:, : linear.in_features])
    if linear.bias is not None:
        linear.bias.copy_(fitted[:, -1])
