"""Choose which heads, FFN channels and layers to keep, and remove the rest from a GPT.

Like PaddleFleetX's `Prune` it removes heads and FFN channels, and also whole layers. Hidden size
and embeddings are unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lathe.compress.criteria import Importance
from lathe.compress.feasible import kept_units
from lathe.model.architecture import Parts, Units
from lathe.model.block import Block
from lathe.model.by_block import embed, for_each, on
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.train.loss import head_losses
from lathe_base.progress import track


@dataclass(frozen=True)
class KeptUnits:
    """Indexes of one layer's surviving heads and FFN channels, ascending.

    Attributes:
        heads: key-value heads; with one query head each, these are the heads.
        queries: (len(heads), n) query heads that each keeps, counted from 0 within its group; None
            keeps all.
    """

    heads: Tensor
    channels: Tensor
    queries: Tensor | None = None


@dataclass(frozen=True)
class Cost:
    """Cost of a head and of an FFN channel, in any unit, such as parameters or seconds."""

    head: float
    channel: float

    @classmethod
    def parameters(cls, config: GPTConfig, of_queries: bool = False) -> "Cost":
        """Costs in parameters of a model of this shape, means over its layers; a head is a
        key-value head with its query heads, or a query head of every group of a layer."""
        heads, groups = sum(config.n_head), sum(config.n_kv_head)
        D, units = config.head_dim, sum(config.per_group) if of_queries else groups
        unit: dict[Parts, float] = {
            "heads": D * heads / units,
            "kv_heads": 0.0 if of_queries else D,
            "channels": 1,
        }
        none = dict.fromkeys(unit, 0.0)

        # The difference from a layer without the unit: a bias of the row linear stays.
        def of(units: Units) -> float:
            linears = ((x, x.name in config.biased) for x in config.unit_linears(units))
            C = config.n_embd
            return sum(x.n_params(C, unit, b) - x.n_params(C, none, b) for x, b in linears)

        return cls(head=of("heads"), channel=of("channels"))


def choose_uniform(scores: Importance, ratio: float, multiple: int = 1) -> list[KeptUnits]:
    """Remove the `round(n * ratio)` lowest-scoring heads and channels of every layer, but never
    all.

    Args:
        multiple: the number of remaining channels is rounded up to a multiple of it, or is n if n
            is smaller.
    """
    return [
        KeptUnits(
            largest_units(heads, kept_units(len(heads), ratio)),
            largest_units(channels, kept_units(len(channels), ratio, multiple)),
        )
        for heads, channels in zip(scores.heads, scores.channels, strict=True)
    ]


def choose_global(
    scores: Importance, cost: Cost, ratio: float, multiple: int = 1, comparable: bool = False
) -> list[KeptUnits]:
    """Remove the units with the lowest score per cost, in any layer, until `ratio` of the cost of
    all is gone, or as near to it as whole units come. At least one head and `multiple` channels
    per layer stay.

    Args:
        multiple: channels are removed in steps that leave a multiple of it.
        comparable: scores of all units are comparable: there is one ranking by score per cost.
            Otherwise scores are relative to the mean of their layer, and heads and channels are
            ranked separately.
    """
    heads = [_Group(s, 1, cost.head, comparable) for s in scores.heads]
    channels = [_Group(s, multiple, cost.channel, comparable) for s in scores.channels]
    of_heads, of_channels = (
        ratio * unit * sum(len(s) for s in layers)
        for layers, unit in ((scores.heads, cost.head), (scores.channels, cost.channel))
    )
    if comparable:
        _remove(heads + channels, of_heads + of_channels)
    else:
        _remove(heads, of_heads)
        _remove(channels, of_channels)
    return [
        KeptUnits(of_head.kept(), of_channel.kept())
        for of_head, of_channel in zip(heads, channels, strict=True)
    ]


@torch.no_grad()
def choose_layers(model: GPT, batches: Sequence[Tensor], remove: int) -> list[int]:
    """The layers to keep: repeatedly remove the one whose absence increases the loss least.

    Args:
        batches: tokens (B, T + 1) each, on the device that computes.
    """
    device, kept = batches[0].device, [*range(model.config.n_layer)]
    training = model.training
    model.eval()

    def run(part: nn.Module, states: Sequence[Tensor]) -> list[Tensor]:
        with on(device, part):
            return for_each(device, part, states)

    for removed in range(min(remove, len(kept) - 1)):
        losses = []
        # Before the layer to leave out: what comes before it is computed once for all of them.
        states = embed(model, [tokens[:, :-1] for tokens in batches])
        for i in track(range(len(kept)), f"choosing layer {removed + 1} of {remove}", len(kept)):
            after = states
            for layer in kept[i + 1 :]:
                after = run(model.blocks[layer], after)
            losses.append(sum(head_losses(model, run(model.final_norm, after), batches)))
            states = run(model.blocks[kept[i]], states)
        del kept[losses.index(min(losses))]
    model.train(training)
    return kept


def keep_layers(model: GPT, layers: Sequence[int]) -> GPT:
    """A new GPT with these layers of `model`, sharing their tensors."""
    old = model.config
    config = replace(
        old,
        n_head=tuple(old.n_head[i] for i in layers),
        kv_heads=tuple(old.kv_heads[i] for i in layers) if old.kv_heads else (),
        n_inner=tuple(old.n_inner[i] for i in layers),
        attention=tuple(old.attention[i] for i in layers) if old.attention else (),
    )
    family = config.architecture
    blocks = f"{family.blocks}."
    state = {n: t for n, t in model.state_dict().items() if not n.startswith(blocks)}
    for new, i in enumerate(layers):
        for name, tensor in model.blocks[i].state_dict().items():
            state[f"{family.block(new)}.{name}"] = tensor
    return _gpt_like(model, config, state)


def shrink(model: GPT, kept: Sequence[KeptUnits]) -> GPT:
    """A new GPT with only the kept heads and channels; the logits are those of `model` with the
    others' outputs zeroed, unless the family normalizes the queries and keys of all heads together.
    Dropout and recompute are kept, and unchanged tensors, such as the embeddings, are shared with
    `model`.

    Raises:
        ValueError: `model` is fake-quantized: prune first, then quantize.
    """
    if model.config.quantization is not None:
        raise ValueError("a quantized model cannot be pruned: prune first, then quantize")
    old, groups = model.config, tuple(len(k.heads) for k in kept)
    queries = [_kept_queries(old, i, layer) for i, layer in enumerate(kept)]
    config = replace(
        old,
        n_head=tuple(heads.numel() for heads in queries),
        kv_heads=groups if old.kv_heads else (),
        n_inner=tuple(len(k.channels) for k in kept),
    )
    state = dict(model.state_dict())
    for i, layer in enumerate(kept):
        n = old.per_group[i]
        # The rows of a fused qkv are group by group: its n queries, then its key and its value.
        key_value = torch.tensor([n, n + 1]).expand(len(layer.heads), 2)
        rows = torch.cat([queries[i], key_value], 1) + (n + 2) * layer.heads[:, None]
        of_heads, of_channels = read_features(old, i, layer)
        parts = len(old.architecture.column("channels").parts)
        indexes = {
            ("heads", "column"): _spans(rows.flatten(), old.head_dim),
            ("heads", "row"): of_heads,
            ("channels", "column"): _spans(layer.channels, parts),
            ("channels", "row"): of_channels,
        }
        for linear in config.architecture.linears:
            path = f"{config.architecture.block(i)}.{linear.name}"
            index = indexes[linear.units, linear.style]
            if linear.style == "column":  # units are outputs
                for name in {f"{path}.weight", f"{path}.bias"} & state.keys():
                    state[name] = state[name][index]
            else:
                state[f"{path}.weight"] = state[f"{path}.weight"][:, index]
        if config.architecture.norms_whole:  # their weights have an entry for every feature
            spans = indexes["heads", "row"], _spans(layer.heads, old.head_dim)
            for norm, index in zip(config.architecture.head_norms, spans, strict=True):
                name = f"{config.architecture.block(i)}.{norm}.weight"
                state[name] = state[name][index]
    return _gpt_like(model, config, state)


def read_features(config: GPTConfig, layer: int, kept: KeptUnits) -> tuple[Tensor, Tensor]:
    """Indexes of the kept units' features among the inputs of the linears that read heads and
    channels."""
    queries = _kept_queries(config, layer, kept) + config.per_group[layer] * kept.heads[:, None]
    return _spans(queries.flatten(), config.head_dim), kept.channels


def _kept_queries(config: GPTConfig, layer: int, kept: KeptUnits) -> Tensor:
    """The query heads (groups, n) that a layer keeps, counted from 0 within their groups."""
    if kept.queries is not None:
        return kept.queries
    return torch.arange(config.per_group[layer]).expand(len(kept.heads), -1)


def by_rank(scores: Importance, groups: Sequence[int]) -> tuple[Importance, list[Tensor]]:
    """Turn scores of query heads (H,) into scores of what can be removed from a layer: the r-th
    most important query head of every group together.

    Args:
        groups: key-value heads of each layer.

    Returns:
        Mean scores (H / groups,) by r, descending, and (groups, H / groups) query heads in that
        order.
    """
    apart = [
        s.view(n, -1).sort(1, descending=True) for s, n in zip(scores.heads, groups, strict=True)
    ]
    means = [ranked.values.mean(0) for ranked in apart]
    return Importance(means, scores.channels), [ranked.indices for ranked in apart]


def units_from_ranks(kept: Sequence[KeptUnits], order: Sequence[Tensor]) -> list[KeptUnits]:
    """The units for a choice among `by_rank`'s scores."""
    return [
        KeptUnits(torch.arange(len(o)), k.channels, o[:, k.heads].sort(1).values)
        for k, o in zip(kept, order, strict=True)
    ]


def largest_units(scores: Tensor, count: int) -> Tensor:
    """Indexes of the `count` units with the highest scores, ascending."""
    return scores.topk(count).indices.sort().values


class _Group:
    """The units of one layer and kind, least important first."""

    def __init__(self, scores: Tensor, multiple: int, cost: float, comparable: bool) -> None:
        self.scores = scores.double()
        if not comparable:
            self.scores = self.scores / self.scores.mean().clamp_min(1e-30)
        self.order = self.scores.argsort(stable=True)
        self.cost, self.n_removed = cost, 0
        # The first step takes what is above a multiple, so that every further step leaves one.
        first = len(scores) % multiple or multiple
        self.ends = list(range(first, len(scores) - multiple + 1, multiple))

    def steps(self) -> list[tuple[float, int]]:
        """(mean score per cost, units removed so far) of every removal step, in order."""
        # Prefix sums: the score of a step is a difference of two.
        sums = torch.cat([torch.zeros(1).double(), self.scores[self.order].cumsum(0)])
        starts = [0, *self.ends[:-1]]
        return [
            (float(sums[end] - sums[start]) / (self.cost * (end - start)), end)
            for start, end in zip(starts, self.ends, strict=False)
        ]

    def kept(self) -> Tensor:
        return self.order[self.n_removed :].sort().values


def _remove(groups: list[_Group], budget: float) -> None:
    """Take removal steps, the lowest score per cost first, until the removed cost is as close to
    `budget` as possible:

    Dantzig's greedy approximation of a knapsack ("Discrete-Variable Extremum Problems", 1957). A
    group's own steps come in their order, since their mean scores ascend.

    Args:
        budget: in the unit of `_Group.cost`, such as parameters.
    """
    queue = sorted(
        (score, end, index) for index, group in enumerate(groups) for score, end in group.steps()
    )
    for _, end, index in queue:
        group = groups[index]
        cost = (end - group.n_removed) * group.cost
        if cost / 2 <= budget:  # at least half of it is wanted: gone is nearer than kept
            budget -= cost
            group.n_removed = end


def _gpt_like(model: GPT, config: GPTConfig, state: dict[str, Tensor]) -> GPT:
    """A GPT that shares these tensors, with the dropout and recompute of `model`."""
    first = model.blocks[0]
    assert isinstance(first, Block)
    with torch.device("meta"):  # no memory: it gets the tensors of `state`
        small = GPT(config, first.drop.p, first.attention.dropout)
    small.set_recompute(model.recompute)
    small.load_state_dict(state, assign=True)
    return small


def _spans(units: Tensor, length: int) -> Tensor:
    """Indexes of the units' rows or columns, `length` per unit."""
    return (units[:, None] * length + torch.arange(length)).flatten()
