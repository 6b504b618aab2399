"""What errors of a linear's outputs cost the whole model: the second factor of GPTQ's objective.

If a linear adds e (O,) to its outputs y of a token, the model's predictions change by 1/2 (g e)^2
nats, in the mean over tokens drawn from them, where g (O,) is the gradient of their log-likelihood
by y. Few directions of y matter: what the next norm divides out, what no later linear reads and a
closed gate cost nothing. Few tokens matter, too: the first of a text, to which all later ones
attend, may have most of all gradients.

An error E (O, I) of the weight costs 1/2 (g E x)^2 at a token with the inputs x (I,). The sum of
(g E x)^2 over tokens is approximated by tr(F E H E^T), where each counts in both factors by the
size of its gradient: F is the sum of g g^T / |g|, H that of |g| x x^T. With g g^T and x x^T (K-FAC)
a few tokens would decide F, and hardly count in H.

Sources: Martens and Grosse 2015, "Optimizing Neural Networks with Kronecker-factored Approximate
Curvature" (K-FAC, arXiv:1503.05671); to round weights with it, Tseng et al. 2025, "Model-Preserving
Adaptive Rounding" (YAQA, arXiv:2505.22988).

Shapes: B batch, T tokens, C hidden size, V vocabulary, O outputs of a linear.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lathe.model.by_block import backward
from lathe.model.fake_quant import FakeQuantLinear, in_float, int4_linears
from lathe.model.gpt import GPT
from lathe.train.loss import chunk_rows
from lathe_base.progress import track

MAX_OUTPUTS = 1024
"""Outputs whose errors are seen together. Wider linears are divided into equal parts, of which each
is as if the others had no errors: the whole matrices take three times as long, need gigabytes for
large models, and gain nothing more."""
TINY = 1e-30


@dataclass(frozen=True)
class OutputHessian:
    """The second factor of GPTQ's objective for a linear, on the host, in float32.

    Attributes:
        parts: F of every part of the outputs, in their order: (n, n) each. The last one may be
            smaller.
        norms: |g| of every token, (B, T, 1) for every batch, in nats per unit of the output.
    """

    parts: list[Tensor]
    norms: list[Tensor]


def output_hessians(model: GPT, batches: Sequence[Tensor]) -> dict[FakeQuantLinear, OutputHessian]:
    """The second factor of GPTQ's objective for all linears with 4-bit weights.

    The model computes with its float weights, one block after the other; see `by_block.backward`.

    Args:
        batches: tokens (B, T) each, on the device on which the blocks are computed.
    """
    linears = [linear for block in model.blocks for linear in int4_linears(block)]
    found = {
        x: OutputHessian([torch.zeros(n, n) for n in part_sizes(x.out_features)], [])
        for x in linears
    }

    def add(linear: FakeQuantLinear, gradient: Tensor) -> None:
        parts, norms = found[linear].parts, found[linear].norms
        norm = gradient.norm(dim=-1, keepdim=True)
        norms.append(norm.float().cpu())
        # Of which the products are g g^T / |g|; a token without a gradient has none.
        roots = (gradient * norm.clamp(min=TINY).rsqrt()).flatten(0, -2)
        rows = torch.split(roots, [len(part) for part in parts], 1)
        for part, g in zip(parts, rows, strict=True):
            part.copy_(torch.addmm(part.to(g.device), g.T, g))

    _show_gradients(model, batches, linears, "output hessians", lambda x, _: partial(add, x))
    return found


def rounding_costs(
    model: GPT, rounded: Mapping[str, Tensor], batches: Sequence[Tensor]
) -> dict[str, float]:
    """The KL divergence from the float model that rounding each linear with 4-bit weights would
    cost by itself, estimated in nats per token, by its name.

    It is the mean of 1/2 (g E x)^2, with the error E (O, I) of the weight, over all tokens.

    Args:
        model, batches: see `output_hessians`.
        rounded: the weights (O, I) after rounding, by the linears' names.
    """
    linears = [linear for block in model.blocks for linear in int4_linears(block)]
    names = {module: name for name, module in model.named_modules()}
    costs = {names[linear]: 0.0 for linear in linears}
    count = sum(tokens.numel() for tokens in batches)

    def add(linear: FakeQuantLinear, inputs: Tensor, gradient: Tensor) -> None:
        name = names[linear]
        error = rounded[name].to(inputs.device) - linear.weight.detach()
        products = ((inputs @ error.T) * gradient).sum(-1)
        costs[name] += float(products.square().sum()) / 2 / count

    _show_gradients(model, batches, linears, "costs of rounding", lambda *x: partial(add, *x))
    return costs


def _show_gradients(
    model: GPT,
    batches: Sequence[Tensor],
    linears: Sequence[FakeQuantLinear],
    title: str,
    hook_for: Callable[[FakeQuantLinear, Tensor], Callable[[Tensor], None]],
) -> None:
    """Show the gradients (B, T, O) by every linear's outputs, for every batch, of the
    log-likelihood of tokens that are drawn from the float model's predictions.

    Args:
        title: that of the progress bar.
        hook_for: given a linear and its inputs (B, T, I), returns what is called with the
            gradients; inputs that it does not keep need no memory until then.
    """
    draw = torch.Generator().manual_seed(0)  # on the CPU: the same numbers on every device

    def watch(linear: nn.Module, inputs: tuple[Tensor], outputs: Tensor) -> None:
        assert isinstance(linear, FakeQuantLinear)
        if outputs.requires_grad:
            (x,) = inputs
            outputs.register_hook(hook_for(linear, x.detach()))  # type: ignore[no-untyped-call]

    def log_likelihood(hidden: Tensor) -> Tensor:
        """Not its value, but its gradient."""
        final = hidden if model.head_input is None else model.head_input(hidden)
        score = _score_of_drawn(final.detach(), model.output.table().detach(), draw)
        return (final * score).sum()

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)  # gradients of outputs are all that is wanted
    hooks = [linear.register_forward_hook(watch) for linear in linears]
    try:
        with torch.enable_grad(), in_float(model):
            for tokens in track(batches, title, len(batches)):
                backward(model, tokens, log_likelihood)
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trained:
            parameter.requires_grad_()


def part_sizes(outputs: int) -> list[int]:
    """The sizes of the parts into which a linear's outputs are divided."""
    size = -(-outputs // -(-outputs // MAX_OUTPUTS))
    return [min(size, outputs - first) for first in range(0, outputs, size)]


@torch.no_grad()
def _score_of_drawn(hidden: Tensor, table: Tensor, draw: torch.Generator) -> Tensor:
    """The gradient (B, T, C), by final hidden states (B, T, C), of the log-likelihood of tokens
    that are drawn from their predictions with a head (V, C)."""
    rows = hidden.flatten(0, 1)
    uniform = torch.rand(len(rows), 1, generator=draw).to(rows.device)
    n, scores = chunk_rows(len(rows), len(table)), []
    for x, share in zip(torch.split(rows, n), torch.split(uniform, n), strict=True):
        predicted = (x @ table.T).float().softmax(-1)
        up_to = predicted.cumsum(-1)
        drawn = torch.searchsorted(up_to, share * up_to[:, -1:]).clamp_(max=len(table) - 1)
        scores.append(table[drawn[:, 0]] - predicted.to(table.dtype) @ table)
    return torch.cat(scores).view(hidden.shape)
