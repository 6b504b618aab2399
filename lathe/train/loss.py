"""Cross-entropy of a language-model head that never materializes full-batch logits.

Shapes: B batch, T tokens, C hidden size, V vocabulary rows on this rank, n tokens of a chunk.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lathe.model.by_block import hidden_states, on
from lathe.model.gpt import GPT

CHUNK_ELEMENTS = 2**26
"""Logits per chunk: 256 MiB in float32. At V = 50304 that is 1,334 tokens: enough for full-speed
matmuls and few additions to the weight's gradient."""
TILE = 128
"""Rows of a matmul that a GPU computes together: a part of a tile costs as much as all of it."""
NARROW_BLOCKS = 4
"""Blocks of float32 probabilities whose 16-bit logits are in memory together."""


def next_token_loss(model: GPT, tokens: Tensor) -> Tensor:
    """Mean cross-entropy, nats per token, of a whole model predicting tokens[:, 1:] of (B, T +
    1)."""
    return head_loss(model, model.hidden(tokens[:, :-1]), tokens)


def head_loss(model: GPT, hidden: Tensor, tokens: Tensor) -> Tensor:
    """`next_token_loss`, given the final hidden states (B, T, C)."""
    if model.head_input is not None:
        hidden = model.head_input(hidden)
    return linear_cross_entropy(hidden, model.output.table(), tokens[:, 1:])


@torch.no_grad()
def batch_losses(model: GPT, batches: Sequence[Tensor]) -> list[float]:
    """`next_token_loss` of every batch, on the batches' device, wherever the model is."""
    return head_losses(model, hidden_states(model, [x[:, :-1] for x in batches]), batches)


@torch.no_grad()
def head_losses(model: GPT, states: Sequence[Tensor], batches: Sequence[Tensor]) -> list[float]:
    """`batch_losses`, given the final hidden states (B, T, C)."""
    device = batches[0].device
    with on(device, model.output, model.head_input):
        pairs = zip(states, batches, strict=True)
        return [float(head_loss(model, x.to(device), tokens)) for x, tokens in pairs]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
    is_compiled: bool = False,
) -> Tensor:
    """Mean cross-entropy, nats per token, of predicting `targets` with logits `hidden @ weight.T`.

    Processes the tokens in chunks and computes the gradients together with the loss, so that logits
    are freed with their chunk and never recomputed. Backward only scales the gradients, in place,
    so it can run once. Matmuls run in autocast's dtype, the rest in float32 (float64 for float64).

    Source: the method of Liger Kernel's fused linear cross-entropy (Hsu et al. 2024,
    arXiv:2410.10989); for the memory at stake, Cut Cross-Entropy (Wijmans et al. 2024,
    arXiv:2411.09009).

    Args:
        hidden: (B, T, C), the same on every rank of `group`.
        weight: (V, C), or this rank's equal, contiguous slice of vocabulary rows, in rank order.
        targets: (B, T) ids of the whole vocabulary.
        group: the ranks that share the vocabulary; None if this rank holds all of it.
        is_compiled: compute loss and slope from the logits in one compiled kernel, which moves half
            of the bytes; not with a group, whose ranks exchange sums in between.

    Returns:
        () loss over the whole vocabulary. The gradient of `hidden` is already summed over `group`.
    """
    out: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, group, torch.is_grad_enabled(), is_compiled and group is None
    )
    return out


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        grad_enabled: bool,
        is_compiled: bool,
    ) -> Tensor:
        dtype, wide = compute_dtypes(hidden)
        h, w = hidden.flatten(0, 1).to(dtype), weight.to(dtype)
        N, V = len(h), len(w)
        ids = targets.flatten()[:, None]
        mask = torch.ones_like(ids, dtype=wide)  # 1 where the target's row is on this rank
        if group is not None:  # the vocabulary is divided: this rank's rows begin at rank * V
            ids = ids - dist.get_rank(group) * V
            mask = ((ids >= 0) & (ids < V)).to(wide)
            ids = ids.clamp(0, V - 1)  # `gather` needs a row of this rank; the mask ignores it

        needs_hidden, needs_weight = (grad_enabled and need for need in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(h, dtype=hidden.dtype) if needs_hidden else None
        grad_weight: Tensor | None = None
        loss = torch.zeros((), dtype=wide, device=h.device)
        # All buffers are made once. 16-bit logits of several blocks together, because each chunk
        # costs a pass over the float32 gradient (V, C); their probabilities in float32 one block
        # after the other.
        n = chunk_rows(N, V, (1 if dtype == wide else NARROW_BLOCKS) * CHUNK_ELEMENTS)
        rows = chunk_rows(n, V)
        logits_buffer = h.new_empty(n, V)
        is_in_place = dtype == wide or is_compiled
        wide_buffer = None if is_in_place else h.new_empty(rows, V, dtype=wide)
        for chunk in (slice(i, min(i + n, N)) for i in range(0, N, n)):
            x = h[chunk]
            # The logits, which are replaced by the loss's slope block by block.
            slope = torch.mm(x, w.T, out=logits_buffer[: len(x)])
            if is_compiled:  # the whole chunk in one kernel
                loss += _compiled_slope()(slope, ids[chunk])
            for i in () if is_compiled else range(0, len(x), rows):
                logits = slope[i : i + rows]
                target, here = (t[chunk][i : i + rows] for t in (ids, mask))
                p = logits if wide_buffer is None else wide_buffer[: len(logits)]
                some = logits[:, :1].to(wide, copy=True)  # in float32 `p` overwrites the logits
                torch.log_softmax(logits, 1, wide, out=p)
                if group is not None:
                    # Any logit minus its log-probability is the log of this rank's sum of exp; with
                    # the log of the sum over all ranks, the log-probabilities are those of all
                    # rows.
                    local_log_sum = some - p[:, :1]
                    gathered = [torch.empty_like(some) for _ in range(dist.get_world_size(group))]
                    dist.all_gather(gathered, local_log_sum, group)
                    p += local_log_sum - torch.stack(gathered).logsumexp(0)
                log_p = p.gather(1, target)
                loss -= (log_p * here).sum()
                if not (needs_hidden or needs_weight):
                    continue
                # d loss / d logits times N: of order 1, where fp16 would lose 1 / N of it.
                if wide_buffer is None:
                    p.exp_().scatter_add_(1, target, -here)
                else:  # rounds in the same pass; the target's, maybe 1 - 1, after the difference
                    torch.exp(p, out=logits).scatter_(1, target, (log_p.exp() - here).to(dtype))
            # Both gradients of the chunk, before the next one overwrites its slope: backward only
            # scales them.
            if grad_hidden is not None:
                grad_hidden[chunk] = slope @ w
            if needs_weight:
                grad_weight = add_weight_gradient(grad_weight, slope, x, wide)
        if group is not None:
            dist.all_reduce(loss, group=group)
            if grad_hidden is not None:
                dist.all_reduce(grad_hidden, group=group)
        keep_gradients(ctx, grad_hidden, grad_weight, hidden.shape, weight.dtype)
        return loss / N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, grad), None, None, None, None


def _replace_by_slope(logits: Tensor, target: Tensor) -> Tensor:
    """Replace logits (n, V) by the slope of their summed cross-entropy with target ids (n, 1);
    returns that sum, ()."""
    log_p = torch.log_softmax(logits, 1, torch.promote_types(logits.dtype, torch.float32))
    is_target = torch.arange(logits.shape[1], device=logits.device) == target
    loss = -log_p.gather(1, target).sum()
    logits.copy_(log_p.exp() - is_target.to(log_p.dtype))
    return loss


@cache
def _compiled_slope() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(_replace_by_slope, fullgraph=True)


def chunk_rows(rows: int, vocabulary: int | float, elements: int | None = None) -> int:
    """The rows of each chunk but the last: as equal as multiples of `TILE` allow, with at most
    `elements` logits; default: CHUNK_ELEMENTS."""
    limit = max(1, int((elements or CHUNK_ELEMENTS) // vocabulary))
    tile = TILE if limit >= TILE else 1
    # As few chunks as the limit allows, then rows spread evenly over them.
    count = -(-rows // (limit // tile * tile))
    return min(rows, -(-rows // (count * tile)) * tile)


def compute_dtypes(hidden: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of matmuls, autocast's if enabled, and of the rest, at least float32."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    return dtype, torch.promote_types(dtype, torch.float32)


def add_weight_gradient(
    total: Tensor | None, slope: Tensor, x: Tensor, wide: torch.dtype
) -> Tensor:
    """Add a chunk's gradient of the weight, slope (n, V) and hidden states x (n, C), to `total`
    (V, C) in place; the first chunk's is the total."""
    if total is None:  # not zeros that are added to: saves a pass over (V, C)
        return (slope.T @ x).to(wide)
    return total.addmm_(slope.T, x) if slope.dtype == wide else total.add_(slope.T @ x)


def keep_gradients(
    ctx: Any,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    shape: torch.Size,
    weight_dtype: torch.dtype,
) -> None:
    """Save the gradients of the sum over tokens that the forward pass of a mean has computed.

    Args:
        shape: of the hidden states (B, T, C); `grad_hidden` is (B * T, C).
    """
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.shape, ctx.weight_dtype, ctx.tokens = shape, weight_dtype, shape[:-1].numel()


def kept_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden states and weight given the mean's `grad`; in place, so only once."""
    grad_hidden, grad_weight = ctx.saved_tensors
    scale = grad / ctx.tokens
    if grad_hidden is not None:
        grad_hidden = grad_hidden.mul_(scale).view(ctx.shape)
    if grad_weight is not None:
        grad_weight = grad_weight.mul_(scale).to(ctx.weight_dtype)
    return grad_hidden, grad_weight
