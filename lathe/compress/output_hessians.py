"""What errors of a linear's outputs cost the whole model: the second factor of GPTQ's objective.

The predictions of a model whose linear adds e to its outputs y (O,) differ by KL = 1/2 e F e, in
nats, where F is the Fisher information: the mean of g g^T over tokens drawn from the model's own
predictions, and g (O,) the gradient of their log-likelihood by y. Few directions of y matter:
what the next norm divides out, what no later linear reads and a closed gate cost nothing.

An error E (O, I) of the weight thus costs tr(F E H E^T), where H is the Hessian of the inputs.

Sources: Martens and Grosse 2015, "Optimizing Neural Networks with Kronecker-factored Approximate
Curvature" (K-FAC, arXiv:1503.05671); to round weights with it, Tseng et al. 2025, "Model-Preserving
Adaptive Rounding" (YAQA, arXiv:2505.22988).

Shapes: B batch, T tokens, C hidden size, V vocabulary, O outputs of a linear.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lathe.model.by_block import embed, for_each, on
from lathe.model.fake_quant import FakeQuantLinear, in_float, int4_linears
from lathe.model.gpt import GPT
from lathe.train.loss import chunk_rows, linear_cross_entropy
from lathe_base.progress import bar

MAX_OUTPUTS = 1024
"""Outputs whose errors are seen together. Wider linears are divided into equal parts, of which each
is as if the others had no errors: the whole matrices take three times as long, need gigabytes for
large models, and gain nothing more."""


@torch.no_grad()
def output_hessians(
    model: GPT, batches: Sequence[Tensor]
) -> dict[FakeQuantLinear, Sequence[Tensor]]:
    """F, up to a factor, of every part of every linear with 4-bit weights: (parts, n, n) float32,
    on the host, in the order of the outputs. The last part may be smaller.

    The model computes with its float weights. Hidden states of all blocks wait on the host.

    Args:
        batches: tokens (B, T) each, on the device on which the blocks are computed.
    """
    device, states = batches[0].device, embed(model, batches)
    draw = torch.Generator().manual_seed(0)  # on the CPU: the same numbers on every device
    found: dict[FakeQuantLinear, Sequence[Tensor]] = {}
    with bar("output hessians", 2 * len(model.blocks) + 1) as progress:
        inputs = []
        for block in model.blocks:
            inputs.append(states)
            with on(device, block), in_float(block):
                states = for_each(device, block, states)
            progress.advance()
        with on(device, model.final_norm, model.output, model.head_input):
            gradients = for_each(device, partial(_gradient, model, draw), states)
        progress.advance()
        for block in reversed(model.blocks):
            totals = {
                linear: [torch.zeros(n, n, device=device) for n in part_sizes(linear.out_features)]
                for linear in int4_linears(block)
            }
            with on(device, block), in_float(block):
                add = partial(_add_products, block, totals)
                gradients = for_each(device, add, inputs.pop(), gradients)
            found |= {linear: [x.cpu() for x in parts] for linear, parts in totals.items()}
            progress.advance()
    return found


def part_sizes(outputs: int) -> list[int]:
    """The sizes of the parts into which a linear's outputs are divided."""
    size = -(-outputs // -(-outputs // MAX_OUTPUTS))
    return [min(size, outputs - first) for first in range(0, outputs, size)]


def _gradient(model: GPT, draw: torch.Generator, hidden: Tensor) -> Tensor:
    """The gradient (B, T, C), by the last block's outputs, of the loss on tokens drawn from the
    model's predictions."""
    leaf, table = hidden.detach().requires_grad_(), model.output.table().detach()
    with torch.enable_grad():
        final = model.final_norm(leaf)
        if model.head_input is not None:
            final = model.head_input(final)
        loss = linear_cross_entropy(final, table, _drawn(final.detach(), table, draw))
        return torch.autograd.grad(loss, leaf)[0]


def _drawn(hidden: Tensor, table: Tensor, draw: torch.Generator) -> Tensor:
    """Ids (B, T) drawn from the predictions of final hidden states (B, T, C) with a head (V, C)."""
    rows = hidden.flatten(0, 1)
    uniform = torch.rand(len(rows), 1, generator=draw).to(rows.device)
    n, ids = chunk_rows(len(rows), len(table)), []
    for x, share in zip(torch.split(rows, n), torch.split(uniform, n), strict=True):
        up_to = (x @ table.T).float().softmax(-1).cumsum(-1)
        ids.append(torch.searchsorted(up_to, share * up_to[:, -1:]).clamp_(max=len(table) - 1))
    return torch.cat(ids).view(hidden.shape[:2])


def _add_products(
    block: nn.Module, totals: Mapping[FakeQuantLinear, Sequence[Tensor]], x: Tensor, after: Tensor
) -> Tensor:
    """Add g g^T of every token to `totals`; returns the gradient of a block's inputs x (B, T, C),
    given that of its outputs."""

    def watch(parts: Sequence[Tensor], outputs: Tensor) -> None:
        def add(gradient: Tensor) -> None:
            rows = gradient.flatten(0, -2)
            sizes = [len(part) for part in parts]
            for part, g in zip(parts, torch.split(rows, sizes, 1), strict=True):
                part.addmm_(g.T, g)

        outputs.register_hook(add)  # type: ignore[no-untyped-call]

    hooks = [
        linear.register_forward_hook(lambda _, __, outputs, parts=parts: watch(parts, outputs))
        for linear, parts in totals.items()
    ]
    try:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(block(leaf), leaf, after)[0]
    finally:
        for hook in hooks:
            hook.remove()
