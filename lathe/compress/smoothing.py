"""Smoothing: move the range of a linear's input into its weight, per channel, before both are
rounded.

A channel of the input that is larger than the others decides their scale. Dividing it by a factor,
and multiplying its column of the weight by the same factor, leaves the function unchanged; the
division is folded into whatever produces the channel: the norm, if there is one, before queries,
keys, values and the FFN's first matrix, the rows of the values before attention's output
projection, and those of a gated FFN's second factor. Nothing can be folded between GPT-2's two FFN
matrices, because GELU is between them.

Sources: Xiao et al. 2023, "SmoothQuant" (arXiv:2211.10438), equation 4, where factors come from the
largest value of a channel and of its weights; Lin et al. 2024, "AWQ" (arXiv:2306.00978), equation
4, where they are a power of a channel's mean magnitude. Every linear gets the factors with the
smallest error of its output when it is rounded to nearest; for GPTQ in 4 bits, SmoothQuant's from
mean magnitudes.

Shapes: T tokens of all batches, I inputs of a linear, O its outputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lathe.model.block import Attention, Block, Half
from lathe.model.by_block import by_halves, embed, for_each, on
from lathe.model.fake_quant import make_observer
from lathe.model.gpt import GPT
from lathe.model.integer_weights import fake_quantize_weight
from lathe.model.quantization import ACTIVATION_LEVELS, LinearFormat
from lathe_base.progress import track

STRENGTHS = (0.35, 0.5, 0.65, 0.8)
"""Candidate strengths for SmoothQuant's factors, from a channel's largest value."""
MAX_STATIC_STRENGTH = 0.65
"""Maximum strength for static scales: with more, every channel of the input has the same range on
the calibration text, and whatever exceeds it in other text is clipped."""
MEAN_STRENGTHS = (0.2, 0.3, 0.4, 0.5, 0.6)
"""Candidate strengths for AWQ's factors, from a channel's mean magnitude."""
GPTQ_STRENGTH = 0.2
"""Strength of SmoothQuant's factors, from mean magnitudes, for weights that GPTQ rounds to 4 bits.
GPTQ makes up for the errors of columns with large inputs itself, but not for a column that is
larger than the others of its group and decides their scale."""
TOKENS = 512
"""Maximum number of tokens on which strengths are compared."""
MAX_FACTOR = 1e3
"""Upper bound of the factors, and inverse of the lower bound, so that rarely used channels do not
get huge factors."""
GAIN = 0.95
"""A linear is smoothed if its error is at most this share of the error without smoothing."""

Factors = Mapping[str, Tensor]
"""Path of a linear -> divisors of its inputs, (groups, 1, size)."""


@dataclass(frozen=True)
class FoldableLinear:
    """A linear before which a division can be folded.

    Attributes:
        shared, size: factors (groups, 1, size) are broadcast over the inputs, which are (groups,
            shared, size), because the query heads of a group read the same values.
        parameters, rows: what produces the inputs, and the rows to divide,
        offset: after adding this to them.
    """

    name: str
    linear: nn.Linear
    shared: int
    size: int
    parameters: tuple[nn.Parameter, ...]
    rows: Tensor
    offset: float = 0.0

    def largest(self, values: Tensor) -> Tensor:
        """(..., I) -> the largest magnitude for every factor."""
        absolute = values.detach().abs().flatten(0, -2).amax(0)
        return absolute.view(-1, self.shared, self.size).amax(1, keepdim=True)

    def mean(self, values: Tensor) -> Tensor:
        """(..., I) -> the mean magnitude for every factor."""
        absolute = values.detach().abs().flatten(0, -2).mean(0)
        return absolute.view(-1, self.shared, self.size).mean(1, keepdim=True)

    def spread(self, factors: Tensor) -> Tensor:
        """Factors -> (I,)."""
        return factors.expand(-1, self.shared, -1).flatten()

    def fold(self, factors: Tensor) -> None:
        """Divide the inputs, and multiply the weight's columns."""
        self.linear.weight.mul_(self.spread(factors))
        for parameter in self.parameters:
            by = factors.flatten().view(-1, *[1] * (parameter.dim() - 1))
            parameter[self.rows] = (parameter[self.rows] + self.offset) / by - self.offset


FoldableLinears = tuple[FoldableLinear | None, FoldableLinear | None]


def _foldable_linear(path: str, half: Half, second: bool) -> FoldableLinear | None:
    part = half.part
    name = f"{path}.{part.names[second]}"
    linear: nn.Linear = getattr(part, part.names[second])
    size = linear.in_features
    if not second:  # before the first linear a norm, whose weight and bias are divided
        makers, offset = tuple(half.norm.parameters()), getattr(half.norm, "offset", 0.0)
        return (
            FoldableLinear(name, linear, 1, size, makers, torch.arange(size), offset)
            if makers
            else None
        )
    column: nn.Linear = getattr(part, part.names[0])
    rows = torch.arange(column.out_features)
    makers = tuple(column.parameters())
    if isinstance(part, Attention):
        # The rows of the values only, the last of every group: they reach the output projection
        # linearly, and queries and keys through the softmax.
        values = rows.view(-1, part.per_group + 2, part.head_dim)[:, -1].flatten()
        return FoldableLinear(name, linear, part.per_group, part.head_dim, makers, values)
    # Rows alternate between gate and up projection; the activation is on the gate, so a division
    # of the up projection is linear. Without a gate it would have to pass the activation.
    return FoldableLinear(name, linear, 1, size, makers, rows[1::2]) if part.gated else None


@torch.no_grad()
def find_factors(
    model: GPT, batches: Sequence[Tensor], formats: Mapping[str, LinearFormat], for_gptq: bool
) -> Factors:
    """Find the smoothing factors of linears; those that do not benefit are omitted.

    Args:
        model: in float; unchanged.
        batches: tokens (B, T), of the same shape each.
        formats: those of the linears that will be quantized, by path.
        for_gptq: whether GPTQ will round the weights.
    """
    model.eval()
    factors: dict[str, Tensor] = {}
    step = max(1, sum(tokens.numel() for tokens in batches) // TOKENS)
    device, hidden = batches[0].device, embed(model, batches)
    for path, block in track(_blocks(model), "smoothing", model.config.n_layer):
        foldable = iter(_halves(path, block))

        def run(
            half: Half, read: Sequence[Tensor], foldable: Iterator[FoldableLinears] = foldable
        ) -> list[Tensor]:
            normed = for_each(device, half.norm, read)
            inner = for_each(device, half.part.inner, normed)
            for normalized, inputs in zip(next(foldable), (normed, inner), strict=True):
                if normalized is None or normalized.name not in formats:
                    continue
                # The float model's inputs: factors of one linear do not depend on others'.
                rows = (x.to(device).flatten(0, 1) for x in inputs)
                parts = [(normalized.largest(x), normalized.mean(x), x[::step]) for x in rows]
                largest, means, samples = (list(part) for part in zip(*parts, strict=True))
                largest_x, mean_x = torch.stack(largest).amax(0), torch.stack(means).mean(0)
                fmt = formats[normalized.name]
                if for_gptq and fmt.weight.bits == 4 and fmt.activation != "int8":
                    best = _gptq_factors(normalized, mean_x)
                else:
                    best = _best_factors(normalized, largest_x, mean_x, torch.cat(samples), fmt)
                if best is not None:
                    factors[normalized.name] = best.cpu()
            return inner

        with on(device, block):
            hidden = by_halves(device, block, hidden, run)
    return factors


@torch.no_grad()
def fold(model: GPT, factors: Factors) -> None:
    """Fold factors into a float model, in place; it computes the same up to rounding."""
    for path, block in _blocks(model):
        for half in _halves(path, block):
            for normalized in half:
                if normalized is not None and normalized.name in factors:
                    normalized.fold(factors[normalized.name].to(normalized.linear.weight.device))


def _blocks(model: GPT) -> Iterator[tuple[str, Block]]:
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        yield model.config.architecture.block(i), block


def _halves(path: str, block: Block) -> list[FoldableLinears]:
    """The first and the second linear of each half, where a division can be folded before it."""
    return [
        (
            _foldable_linear(f"{path}.{name}", half, False),
            _foldable_linear(f"{path}.{name}", half, True),
        )
        for name, half in zip(block.names, block.halves, strict=True)
    ]


def _gptq_factors(normalized: FoldableLinear, x: Tensor) -> Tensor | None:
    """See `GPTQ_STRENGTH`, for mean magnitudes `x` of inputs; None if there is nothing to
    balance."""
    w = normalized.mean(normalized.linear.weight)
    used = (x > 0) & (w > 0)
    return _limited(x**GPTQ_STRENGTH / w ** (1 - GPTQ_STRENGTH), used) if used.any() else None


def _limited(factors: Tensor, used: Tensor) -> Tensor:
    """Factors within `MAX_FACTOR`; 1 for channels that are not used."""
    return torch.where(used, factors.clamp(1 / MAX_FACTOR, MAX_FACTOR), torch.ones_like(factors))


def _best_factors(
    normalized: FoldableLinear, x: Tensor, mean: Tensor, sample: Tensor, fmt: LinearFormat
) -> Tensor | None:
    """The factors whose strength minimizes the error of the output, if they help.

    Args:
        x, mean: the largest and the mean magnitudes of inputs, for every factor.
        sample: some of the inputs, (T, I).
    """
    weight = normalized.linear.weight
    expected, w = sample @ weight.T, normalized.largest(weight)

    def error(factors: Tensor) -> float:
        spread = normalized.spread(factors)
        weights = fake_quantize_weight(weight * spread, fmt.weight)
        # The scale is that of all inputs, also of those that are not in the sample.
        scale = float((x / factors).amax()) / ACTIVATION_LEVELS
        observer = make_observer(replace(fmt, activation_scale=scale))
        inputs = sample / spread if observer is None else observer.eval()(sample / spread)
        return float((inputs @ weights.T - expected).square().sum())

    # A channel that is always zero, or that no output reads, has nothing to balance.
    used = (x > 0) & (w > 0)
    if not used.any():
        return None
    is_static = fmt.activation == "int8"
    strengths = [a for a in STRENGTHS if a <= MAX_STATIC_STRENGTH or not is_static]
    candidates = [x**a / w ** (1 - a) for a in strengths]  # SmoothQuant's, then AWQ's
    candidates += [(mean / mean[used].mean()) ** a for a in MEAN_STRENGTHS]
    options = [_limited(factors, used) for factors in candidates]
    errors = [error(factors) for factors in options]
    best = min(range(len(options)), key=errors.__getitem__)
    return options[best] if errors[best] < GAIN * error(torch.ones_like(x)) else None
