"""Simulated INT8 and INT4 in float: the forward pass computes what the integer graph will, and the
backward pass is the straight-through estimator (Bengio et al. 2013; Jacob et al. 2018, section 3).

Static INT8: activations have one scale per tensor, which calibration sets and training keeps: one
that follows the largest values of training batches grows with their size, and rounds everything
more coarsely. Weights are symmetric, with one scale per output channel (or per tensor), computed
from the weight itself. Dynamic INT8, and INT4: weights have a scale for every group of inputs, and
so have activations, computed from each token, as in onnxruntime's `MatMulNBits` (accuracy level 4).
INT8 with a scale per token: the activations of each token have one scale, and weights those of
static INT8. Keys and values of the KV cache have a static scale per channel.
`lathe.model.integer_weights` rounds the weights.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lathe.model.architecture import HEAD
from lathe.model.by_block import embed, for_each, on
from lathe.model.gpt import GPT, Embedding
from lathe.model.integer_weights import QuantizedWeight, round_to_levels, split
from lathe.model.quantization import (
    ACTIVATION_LEVELS,
    INT8,
    LinearFormat,
    QuantizationPlan,
    WeightFormat,
)

log = logging.getLogger("lathe")

CACHE_MARGIN = 1.25
"""Range of a channel of cached keys or values, in units of its largest magnitude in calibration
text: other text exceeds that in some channels. Norms of pairs are exceeded more seldom."""


class Observer(nn.Module):
    """Fake-quantizes an activation with a static scale, which `calibrate` sets.

    `alpha`, unless None, is PACT's learned clipping bound (Choi et al. 2018).

    Attributes:
        absmax: the range.
        peaks: while calibrating, the largest magnitude in each text so far; None otherwise.
    """

    absmax: Tensor

    def __init__(self, scale: float | None = None, pact: bool = False) -> None:
        super().__init__()
        self.register_buffer("absmax", torch.tensor(ACTIVATION_LEVELS * scale if scale else 0.0))
        self.alpha = nn.Parameter(torch.tensor([100.0])) if pact else None  # FSDP shards vectors
        self.peaks: list[Tensor] | None = None

    @property
    def bound(self) -> Tensor:
        """Largest magnitude that is not clipped."""
        if self.alpha is None:
            return self.absmax
        return torch.minimum(self.absmax, self.alpha.detach())

    @property
    def scale(self) -> float:
        """The scale that the exported graph uses."""
        return float(self.bound) / ACTIVATION_LEVELS

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantize x; while calibrating, only track its range."""
        if hasattr(x, "to_local"):  # a DTensor of tensor parallelism: each process its shard
            from torch.distributed.tensor import DTensor

            assert isinstance(x, DTensor)
            y = self._quantize(x.to_local())
            # The check would compare the shards in a collective.
            return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)
        return self._quantize(x)

    def _quantize(self, x: Tensor) -> Tensor:
        if self.alpha is not None:  # the gradient of the clipped entries trains it
            x = torch.clamp(x, -self.alpha, self.alpha)
        if self.peaks is not None:
            self.peaks[-1] = torch.maximum(self.peaks[-1], x.detach().abs().amax())
            return x  # later layers are calibrated on float activations
        low, high = -ACTIVATION_LEVELS - 1, ACTIVATION_LEVELS
        return round_to_levels(x, (self.bound / high).to(x.dtype), low, high)


class CacheRounding(nn.Module):
    """Rounds keys or values to INT8 as they enter the KV cache, with a static scale for every
    channel of every head, which `calibrate` sets.

    Rotary positions turn every pair of a key's channels by an angle that grows with the position,
    so that a channel's values further on in a text are those of its partner in the calibration
    text. Both have the range of the pair's largest norm, which rotation keeps.

    Attributes:
        scale: (G, D); 0 means not known yet. A DTensor under tensor parallelism.
        n_rotated: number of a head's first channels that rotary positions turn, i and i +
            n_rotated / 2 together.
        peaks: while calibrating, the ranges (G, D) so far; None otherwise.
    """

    scale: Tensor

    def __init__(self, n_heads: int, head_dim: int, n_rotated: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(n_heads, head_dim))
        self.n_rotated = n_rotated
        self.peaks: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantize x (..., G, T, D); while calibrating, only track its ranges."""
        if self.peaks is not None:
            found = self._ranges(x.detach())
            self.peaks = torch.maximum(self.peaks, found.to(self.peaks.device))
            return x  # later layers are calibrated on float keys and values
        scale: Tensor = self.scale.to_local() if hasattr(self.scale, "to_local") else self.scale
        low, high = -ACTIVATION_LEVELS - 1, ACTIVATION_LEVELS
        return round_to_levels(x, scale[:, None].to(x.dtype), low, high)

    def _ranges(self, x: Tensor) -> Tensor:
        turned, kept = x[..., : self.n_rotated], x[..., self.n_rotated :]
        norms = torch.hypot(*turned.chunk(2, dim=-1))
        found = torch.cat((norms, norms, CACHE_MARGIN * kept.abs()), -1)
        return found.amax(-2).reshape(-1, *self.scale.shape).amax(0)

    def set_scale(self) -> None:
        """End calibration: set the scales from the ranges."""
        assert self.peaks is not None
        # A channel that is always zero gets any scale but 0, by which values are divided.
        ranges = torch.where(self.peaks > 0, self.peaks, torch.ones_like(self.peaks))
        self.scale.copy_(ranges / ACTIVATION_LEVELS)
        self.peaks = None


class RoundGroups(nn.Module):
    """Rounds activations to INT8, each token with scales of its own: `round_activation`.

    Attributes:
        size: of a group; 0: a token has one scale.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., in)."""
        return round_activation(x, self.size)


def round_activation(x: Tensor, size: int) -> Tensor:
    """Round activations (..., in) to INT8 and back, with straight-through gradients.

    The scale of a group is its largest magnitude / 127.

    Args:
        size: of a group; 0: all inputs of a token are one.
    """
    y: Tensor = _RoundActivation.apply(x, size)  # type: ignore[no-untyped-call]
    return y


def activation_scales(groups: Tensor) -> Tensor:
    """Scales (..., groups, 1) of activations (..., groups, size)."""
    absmax = groups.abs().amax(-1, keepdim=True)
    return torch.where(absmax > 0, absmax, torch.ones_like(absmax)) / ACTIVATION_LEVELS


class _RoundActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        groups = split(x, size or x.shape[-1])
        scale = activation_scales(groups)
        rounded = torch.round(groups / scale).mul_(scale)
        return rounded.flatten(-2)[..., : x.shape[-1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class FakeQuantLinear(nn.Linear):
    """`nn.Linear` with a fake-quantized weight, and a fake-quantized input if it has an
    observer."""

    observer: Observer | RoundGroups | None

    def __init__(
        self,
        linear: nn.Linear,
        observer: Observer | RoundGroups | None,
        quantized: QuantizedWeight,
    ) -> None:
        nn.Module.__init__(self)
        # Not nn.Linear's initializer, which would allocate and fill another weight.
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.register_module("observer", observer)
        self.quantized = quantized

    def forward(self, x: Tensor) -> Tensor:
        """The linear of fake-quantized input and weight."""
        if self.observer is not None:
            x = self.observer(x)
        return F.linear(x, self.quantized(self.weight), self.bias)


class FakeQuantEmbedding(Embedding):
    """`Embedding` with a fake-quantized table."""

    def __init__(self, embedding: nn.Embedding, fmt: WeightFormat) -> None:
        V, C = embedding.weight.shape
        super().__init__(V, C, device="meta")
        self.weight, self.quantized = embedding.weight, QuantizedWeight(fmt)

    def table(self) -> Tensor:
        """The fake-quantized embedding table (V, C)."""
        return self.quantized(self.weight)


def insert(model: GPT, plan: QuantizationPlan, pact: bool = False) -> None:
    """Replace the linears and embeddings of the plan, in place, with fake-quantized ones.

    A scale of 0 means "not known yet": calibrate before use.
    """
    for name, fmt in plan.linears.items():
        observer = make_observer(fmt, pact)
        if name == HEAD:  # no nn.Linear, but a product with a table
            model.head_input = observer
            for table in model.config.tables:
                _quantize_table(model, table, fmt.weight)
        else:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            quantized = QuantizedWeight(fmt.weight)
            replace_module(model, name, FakeQuantLinear(linear, observer, quantized))
    if plan.position_embedding:
        for table in model.config.architecture.embeddings[1:]:
            _quantize_table(model, table, INT8)
    if plan.kv_cache_bits:
        config = model.config
        for layer, (heads, kind) in enumerate(zip(config.n_kv_head, config.kinds, strict=True)):
            key, value = config.architecture.cached_parts(layer)
            n_rotated = kind.rope.n_rotated(config.head_dim) if kind.rope else 0
            replace_module(model, key, CacheRounding(heads, config.head_dim, n_rotated))
            replace_module(model, value, CacheRounding(heads, config.head_dim, 0))


def _quantize_table(model: GPT, name: str, fmt: WeightFormat) -> None:
    table = model.get_submodule(name)
    assert isinstance(table, nn.Embedding)
    replace_module(model, name, FakeQuantEmbedding(table, fmt))


def make_observer(fmt: LinearFormat, pact: bool = False) -> Observer | RoundGroups | None:
    """The observer for the input of a linear with this format; None if the input is not
    quantized."""
    if fmt.activation == "dynamic_int8":
        return RoundGroups(fmt.weight.group_size)
    return Observer(fmt.activation_scale, pact) if fmt.activation else None


@contextmanager
def inserted(model: GPT, plan: QuantizationPlan) -> Iterator[None]:
    """`insert` for the duration of a `with` block; afterwards the model is as before."""
    config = model.config
    names = [n for n in plan.linears if n != HEAD]
    names += config.cached_parts() if plan.kv_cache_bits else []
    names += [*config.tables, *config.architecture.embeddings[1:]]
    head_input, before = model.head_input, {name: model.get_submodule(name) for name in names}
    insert(model, plan)
    try:
        yield
    finally:
        for name, module in before.items():
            replace_module(model, name, module)
        model.head_input = head_input


def without_quantization(model: GPT) -> GPT:
    """The float model that shares the weights of `model`, in evaluation mode."""
    with torch.device("meta"):
        plain = GPT(model.config.with_quantization(None))
    weights = model.state_dict()  # with those of observers
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()}, assign=True)
    return plain.eval()


def int4_linears(block: nn.Module) -> list[FakeQuantLinear]:
    """The linears of a block whose weights are 4-bit groups."""
    linears = (x for x in block.modules() if isinstance(x, FakeQuantLinear))
    return [x for x in linears if x.quantized.fmt.group_size and x.quantized.fmt.bits == 4]


@contextmanager
def in_float(block: nn.Module) -> Iterator[None]:
    """Compute with the float weights and inputs of a block for the duration of a `with` block."""
    linears = [x for x in block.modules() if isinstance(x, FakeQuantLinear)]
    replaced = [(linear, linear.quantized, linear.observer) for linear in linears]
    for linear in linears:
        linear.quantized, linear.observer = _Float(linear.quantized.fmt), None
    try:
        yield
    finally:
        for linear, quantized, observer in replaced:
            linear.quantized, linear.observer = quantized, observer


class _Float(QuantizedWeight):
    def __call__(self, weight: Tensor) -> Tensor:
        return weight


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a submodule, by its dotted name."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def calibrate(model: GPT, batches: Iterable[Tensor]) -> dict[str, float]:
    """Set every observer's range to the mean over all texts of the largest magnitude in each, with
    quantized weights and float activations; and the scales of the KV cache.

    The maximum over all texts, or over those of a batch, would grow with their number because of
    rare tokens, and round all others more coarsely. Channels of the KV cache, of which each has few
    values, get the maximum.

    Args:
        batches: tokens (B, T) each.

    Returns:
        Module path -> scale of an observer; empty, without reading a batch, if no activation is
        quantized.
    """
    observers_by_name = dict(observers(model))
    caches = [module for module in model.modules() if isinstance(module, CacheRounding)]
    if not observers_by_name and not caches:
        return {}
    model.eval()
    for cache in caches:
        cache.peaks = torch.zeros_like(cache.scale)
    for observer in observers_by_name.values():
        observer.peaks = []
    texts = [text for tokens in batches for text in torch.split(tokens, 1)]
    device = texts[0].device
    with torch.no_grad():
        states = embed(model, texts)
        for block in model.blocks:
            states = _tracked(device, block, states)
        if isinstance(model.head_input, Observer):
            with on(device, model.final_norm):
                states = for_each(device, model.final_norm, states)
            _tracked(device, model.head_input, states)
    for name, observer in observers_by_name.items():
        if observer.peaks:
            observer.absmax.copy_(torch.stack(observer.peaks).mean())
        observer.peaks = None
        if not observer.absmax:
            log.warning("the input of %s is zero in all calibration batches", name)
            observer.absmax.fill_(1.0)  # any scale will do, but not 0, by which values are divided
    for cache in caches:
        cache.set_scale()
    return {name: observer.scale for name, observer in observers_by_name.items()}


def _tracked(device: torch.device, module: nn.Module, states: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a module for one text after the other, whose ranges its observers track."""

    def compute(x: Tensor) -> Tensor:
        for _, observer in observers(module):
            assert observer.peaks is not None
            observer.peaks.append(x.new_zeros(()))
        y: Tensor = module(x)
        return y

    with on(device, module):
        return for_each(device, compute, states)


def cache_scales(model: nn.Module) -> dict[str, Tensor]:
    """The scales (G, D) of keys and values in the KV cache by their names in a checkpoint, those of
    a layer's keys before those of its values; empty if the cache is float."""
    modules = model.named_modules()
    return {f"{name}.scale": x.scale for name, x in modules if isinstance(x, CacheRounding)}


def observers(model: nn.Module) -> Iterator[tuple[str, Observer]]:
    """Yield (path of the linear or `lm_head`, its observer)."""
    for name, module in model.named_modules():
        if isinstance(module, Observer):
            yield (HEAD if name == "head_input" else name.removesuffix(".observer")), module
