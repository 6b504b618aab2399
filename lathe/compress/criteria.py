"""Score the importance of attention heads and FFN channels, from weights or from data.

A head is scored by its q, k and v rows or by its attention output, a channel by its row of the
first FFN weight or by its activation. Scores from weights and activations only rank units of the
same layer and kind; those of `taylor` have a common unit, nats squared, and rank all units of a
model.

To add a criterion, add an entry to `CRITERIA` and its name to `PruneSettings.criterion`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lathe.model.by_block import backward, hidden_states, on
from lathe.model.gpt import GPT
from lathe.train.loss import head_loss
from lathe_base.progress import track


@dataclass(frozen=True)
class Importance:
    """Scores of heads, (H,) per layer, and FFN channels, (F,) per layer; the lowest are pruned."""

    heads: list[Tensor]
    channels: list[Tensor]


Score = Callable[[GPT, Sequence[Tensor], bool], Importance]
"""Scores a model in eval mode, on calibration tokens (B, T + 1) if it uses data; scores individual
query heads, or key-value heads with the query heads that share them."""


@dataclass(frozen=True)
class Criterion:
    """A pruning criterion.

    Attributes:
        comparable: the scores of all units of a model are comparable, so that heads, channels and
            layers can be ranked together; otherwise only units of one layer and kind.
    """

    score: Score
    comparable: bool = False


def importance(
    model: GPT, criterion: str, batches: Sequence[Tensor], of_queries: bool = False
) -> Importance:
    """Score every head and channel by one of `CRITERIA`.

    Args:
        batches: calibration tokens (B, T + 1), for criteria that use data; on the device on which
            the blocks are scored, one after the other, wherever the model is.
        of_queries: score individual query heads, not key-value heads with their query heads.
    """
    training = model.training
    model.eval()
    try:
        scores = CRITERIA[criterion].score(model, batches, of_queries)
        # Scores of a model on the meta device, as in a trial, have no values to copy.
        heads, channels = (
            [s if s.is_meta else s.cpu() for s in parts]
            for parts in (scores.heads, scores.channels)
        )
        return Importance(heads, channels)
    finally:
        model.train(training)


def _from_weights(score: Callable[[Tensor], Tensor]) -> Score:
    """Score the rows (units, weights) of a layer's first linears, without data."""

    def of_model(model: GPT, batches: Sequence[Tensor], of_queries: bool) -> Importance:
        heads, channels, family = [], [], model.config.architecture
        device = batches[0].device if batches else model.embedding.weight.device
        for i, block in enumerate(model.blocks):
            qkv = block.get_parameter(f"{family.column('heads').name}.weight")
            ffn = block.get_parameter(f"{family.column('channels').name}.weight")
            groups, n = model.config.n_kv_head[i], model.config.per_group[i]
            with on(device, block):
                # Of each group its queries, key and value.
                rows = qkv.detach().view(groups, n + 2, -1)
                rows = rows[:, :n].flatten(0, 1) if of_queries else rows.flatten(1)
                heads.append(score(rows))
                channels.append(score(ffn.detach().view(model.config.n_inner[i], -1)))
        return Importance(heads, channels)

    return of_model


def _output_projections(model: GPT) -> list[tuple[nn.Linear, nn.Linear]]:
    """The output projections of attention and FFN, which read the heads and channels, of every
    layer."""
    family = model.config.architecture
    names = family.row("heads").name, family.row("channels").name
    modules = [[block.get_submodule(name) for name in names] for block in model.blocks]
    return modules  # type: ignore[return-value]


def _heads(model: GPT, of_queries: bool) -> tuple[int, ...]:
    """Number of scored heads per layer."""
    return model.config.n_head if of_queries else model.config.n_kv_head


@torch.no_grad()
def _from_activations(model: GPT, batches: Sequence[Tensor], of_queries: bool) -> Importance:
    inputs = [batch[:, :-1] for batch in batches]
    device, tokens = inputs[0].device, sum(x.numel() for x in inputs)
    heads = [torch.zeros(n, device=device) for n in _heads(model, of_queries)]
    channels = [torch.zeros(n, device=device) for n in model.config.n_inner]

    def watch(sums: Tensor, magnitude: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
            sums.add_(magnitude(inputs[0]).sum((0, 1)))

        return hook

    def of_heads(y: Tensor, count: int) -> Tensor:  # (B, T, H * D) -> (B, T, count)
        norms: Tensor = torch.linalg.vector_norm(y.view(*y.shape[:2], count, -1), dim=3)
        return norms

    hooks = []
    for (attention, mlp), of_head, of_channel in zip(
        _output_projections(model), heads, channels, strict=True
    ):
        norms = partial(of_heads, count=len(of_head))
        hooks.append(attention.register_forward_pre_hook(watch(of_head, norms)))
        hooks.append(mlp.register_forward_pre_hook(watch(of_channel, torch.abs)))
    try:
        hidden_states(model, inputs, "importance")
    finally:
        for hook in hooks:
            hook.remove()
    return Importance([s / tokens for s in heads], [s / tokens for s in channels])


def gate_slopes(model: GPT, batches: Sequence[Tensor], of_queries: bool = False) -> Importance:
    """First-order change of each sequence's mean loss if a unit's output is zeroed: (N, H) and
    (N, F) per layer for N sequences.

    Multiplies each unit's output by a gate of 1 per sequence, and takes the loss's gradient with
    respect to the gate.

    Args:
        batches: tokens (B, T + 1) each.
    """
    linears = [linear for pair in _output_projections(model) for linear in pair]
    slopes: list[list[Tensor]] = [[] for _ in linears]
    counts = _heads(model, of_queries)
    gates: dict[nn.Module, Tensor] = {}

    def apply_gate(linear: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x, gate = inputs[0], gates[linear]
        units = x.view(*x.shape[:2], gate.shape[1], -1)  # (B, T, H, D), (B, T, F, 1)
        return ((units * gate[:, None, :, None]).flatten(2),)

    hooks = [linear.register_forward_pre_hook(apply_gate) for linear in linears]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        for batch in track(batches, "importance", len(batches)):
            B = len(batch)
            for groups, (attention, mlp) in zip(counts, _output_projections(model), strict=True):
                # One for each sequence: a batch gives a slope for every sequence in it.
                gates[attention] = torch.ones(B, groups, device=batch.device)
                gates[mlp] = torch.ones(B, mlp.in_features, device=batch.device)
            for gate in gates.values():
                gate.requires_grad_()

            # A batch's mean loss, times B, is the sum of its sequences' losses: the gradient at the
            # gate of a sequence is that of its own loss.
            def loss(hidden: Tensor, batch: Tensor = batch) -> Tensor:
                return head_loss(model, hidden, batch) * len(batch)

            backward(model, batch[:, :-1], loss)
            for slope_rows, gate in zip(slopes, gates.values(), strict=True):
                assert gate.grad is not None
                slope_rows.append(gate.grad)
    finally:
        for parameter in trained:
            parameter.requires_grad_()
        for hook in hooks:
            hook.remove()
    whole = [torch.cat(slope_rows) for slope_rows in slopes]
    return Importance(whole[0::2], whole[1::2])


def _from_gates(model: GPT, batches: Sequence[Tensor], of_queries: bool) -> Importance:
    slopes = gate_slopes(model, batches, of_queries)
    return Importance(
        [s.square().mean(0) for s in slopes.heads], [s.square().mean(0) for s in slopes.channels]
    )


CRITERIA = {
    "l1_norm": Criterion(_from_weights(lambda rows: rows.abs().mean(1))),
    "l2_norm": Criterion(_from_weights(lambda rows: rows.square().mean(1).sqrt())),
    "fpgm": Criterion(_from_weights(lambda rows: torch.cdist(rows, rows).mean(1))),
    "activation": Criterion(_from_activations),
    "taylor": Criterion(_from_gates, comparable=True),
}
"""The criteria by the names that `Compress.Prune.criterion` takes.

- `l1_norm`, `l2_norm`: mean |w|, root mean w^2 (Li et al. 2017, arXiv:1608.08710).
- `fpgm`: mean distance to the other units of the layer, so that replaceable units are pruned
  first (He et al. 2019, arXiv:1811.00250).
- `activation`: mean over tokens of a channel's |activation|, of a head's output's L2 norm
  (Minitron, Muralidharan et al. 2024, arXiv:2407.14679).
- `taylor`: the squared first-order change of the loss when the unit's output is zeroed, mean over
  sequences (Molchanov et al. 2019, arXiv:1906.10771, with a gate at every unit).
"""
