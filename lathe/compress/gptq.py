"""GPTQ: round weights to minimize the error of the linear's output, without training.

Source: Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", section 3.3, with columns in decreasing order of the Hessian's diagonal
("act-order"). The scale of a group first minimizes the rounding error weighted with that diagonal,
as llama.cpp's quantization with an importance matrix does, and then, given the integers, the error
of the output: a least-squares problem, with whose solution the weights are rounded again.

What GPTQ has rounded may then be learned block by block: integers and scales of a Transformer
block's linears are trained until the block's output is close to that of the float weights. GPTQ
makes the output of every linear right by itself. Within a block, errors of one linear can cancel
those of another, and some do not matter, such as those of a gate that is closed. The integer of a
weight is the nearest to a latent value, which starts at the float weight and is trained with
straight-through gradients, together with the scale of its group; no other block needs to be in
memory. An error counts relative to the size of the token's hidden state, which the next norm
divides by.

Sources: Cheng et al. 2023, "Optimize Weight Rounding via Signed Gradient Descent for the
Quantization of LLMs" (AutoRound, arXiv:2309.05516), where rounding starts from the nearest; Chen et
al. 2024, "EfficientQAT" (arXiv:2407.11062), section 3.2.

Shapes: B batch, N texts, T tokens, C hidden size, O output channels and I inputs of a linear, G
groups of a row.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lathe.model.block import Block, Half
from lathe.model.by_block import by_halves, embed, for_each, hidden_states, on
from lathe.model.fake_quant import FakeQuantEmbedding, FakeQuantLinear
from lathe.model.gpt import GPT
from lathe.model.integer_weights import Grid, QuantizedWeight, split, weight_rounding
from lathe.model.quantization import WeightFormat
from lathe.train.loss import CHUNK_ELEMENTS
from lathe.train.room import pass_bytes
from lathe_base.progress import track

log = logging.getLogger("lathe")

DAMPING = 0.1  # of the diagonal's mean; with 0.01 small models gain nothing
MORE_DAMPING = (1, 10, 100)
"""Factors of the damping to try: sums of products in float32, or in TF32 on GPUs, may have negative
eigenvalues."""
RIDGE = 1e-5  # relative, for groups whose inputs depend on each other
MAX_CHANGE = 0.25  # of a scale, relative, when it is fitted
PASSES = 2  # of rounding and fitting scales; a third gains 1 % for the time of a second
COLUMNS = 128  # that are rounded before the columns after them are corrected
SCALES = [i / 40 for i in (40, *range(28, 40), 41, 42)]
"""Scales to try for a group, relative to that of rounding to nearest, which wins ties. Beyond
8 / 7.5, the entry of largest magnitude would not be rounded to -8, from which the scale is computed
again."""
STEP_TOKENS = 2048  # of a step of learning
TRAVEL = 1.2
"""Learning rate of the latent integers at the first step, times the number of steps: it decays
linearly, so no integer moves further than half of that."""
SCALE_TRAVEL = 0.12  # the same for scales, relative
MARGIN = 0.05  # the least distance of a latent integer from the next one's, when it starts
BETAS = 0.9, 0.95
# Memory, for `gptq_bytes`:
HESSIANS = 8  # matrices like the Hessian, in float64, while its inverse is factored
BUFFERS = 16  # like the rows that are rounded together
LATENTS = 14  # like the weights of a block whose rounding is learned

Weights = Mapping[FakeQuantLinear, Tensor]


@torch.no_grad()
def gptq(model: GPT, batches: Sequence[Tensor], steps: int = 0) -> None:
    """Round the weights of a fake-quantized, calibrated model in place: the embedding first, then
    every linear, given the inputs from the rounded ones before it.

    Rounding the result to nearest, as fake quantization and export do, changes nothing.

    Args:
        batches: tokens (B, T) each; together at least as many as a linear has inputs.
        steps: of `learn_rounding` for every block, which needs batches of the same length.
    """
    model.eval()
    head, device = model.output, batches[0].device
    if isinstance(head, FakeQuantEmbedding):
        # First, because a tied head is the embedding: the blocks are rounded for what they will
        # read. Its own inputs come from blocks that are still rounded to nearest.
        with on(device, head, model.head_input):
            finals = hidden_states(model, batches)
            _round_weight(model.config.tables[-1], head, model.head_input, finals, device)
            del finals  # gigabytes on the host
    names = {module: name for name, module in model.named_modules()}
    hidden = embed(model, batches)
    for block in track(model.blocks, "gptq", len(model.blocks)):
        assert isinstance(block, Block)
        with on(device, block):
            linears = learnable(block) if steps else []
            if not linears:
                hidden = by_halves(device, block, hidden, partial(_round_half, names, device))
                continue
            # The targets are the float block's outputs for the inputs that the rounded model has.
            before = {linear: linear.weight.clone() for linear in linears}
            with in_float(block):
                targets = for_each(device, block, hidden)
            by_halves(device, block, hidden, partial(_round_half, names, device))
            texts = torch.cat(hidden)
            learn_rounding(block, before, texts, torch.cat(targets), steps, device)
            hidden = for_each(device, block, hidden)


def gptq_bytes(model: GPT, tokens: int, steps: int) -> int:
    """Memory that `gptq` needs on the device of its batches, in bytes; see `lathe.train.room`.

    Args:
        tokens: those of a batch.
    """
    shapes = [
        x.weight.shape
        for x in model.modules()
        if isinstance(x, FakeQuantLinear | FakeQuantEmbedding)
    ]
    inputs = max(shape[1] for shape in shapes)
    hessians = HESSIANS * 8 * inputs**2
    rows = BUFFERS * 4 * min(max(shape.numel() for shape in shapes), CHUNK_ELEMENTS)
    learned = max((sum(x.weight.nbytes for x in learnable(b)) for b in model.blocks), default=0)
    rounding = max(hessians + rows, LATENTS * learned if steps else 0)
    if steps:
        return pass_bytes(model, max(tokens, STEP_TOKENS), gradients=True) + rounding
    return pass_bytes(model, tokens) + rounding


def _round_half(
    names: Mapping[nn.Module, str], device: torch.device, half: Half, hidden: Sequence[Tensor]
) -> list[Tensor]:
    """Round both linears of a half; returns the second one's inputs."""
    first, second = (getattr(half.part, name) for name in half.part.names)
    if isinstance(first, FakeQuantLinear):
        inputs = (half.norm(x.to(device, non_blocking=True)) for x in hidden)
        _round_weight(names[first], first, first.observer, inputs, device)
    # With the first one rounded.
    inner = for_each(device, lambda x: half.part.inner(half.norm(x)), hidden)
    if isinstance(second, FakeQuantLinear):
        _round_weight(names[second], second, second.observer, inner, device)
    return inner


def _round_weight(
    name: str,
    module: FakeQuantLinear | FakeQuantEmbedding,
    observer: nn.Module | None,
    inputs: Iterable[Tensor],
    device: torch.device,
) -> None:
    """Round a weight on a device, in place, for its inputs (B, T, I), which its observer rounds."""
    here = (x.to(device, non_blocking=True) for x in inputs)
    rounded = (x if observer is None else observer(x) for x in here)
    if not round_columns(module.weight, module.quantized.fmt, input_hessian(rounded)):
        log.warning(
            "%s: the Hessian of its inputs is not positive definite; rounding to nearest", name
        )


def input_hessian(inputs: Iterable[Tensor]) -> Tensor:
    """Sum of x x^T over inputs (..., I): (I, I), float64. Half the second derivative of the squared
    error of an output channel by its weights."""
    products = (x.flatten(0, -2).T @ x.flatten(0, -2) for x in inputs)
    return sum(product.double() for product in products)  # type: ignore[return-value]


def round_columns(weight: Tensor, fmt: WeightFormat, hessian: Tensor) -> bool:
    """Round a weight (O, I), in place, so that e H e^T is small for the errors e (1, I) of every
    output channel (H: `hessian`).

    The largest entry of a group or channel is rounded to nearest, whatever its column should make
    up for, so that the scale computed from the rounded weight is the one it was rounded with; with
    zero points, so are the lowest and the highest entry.

    Returns:
        Whether errors are made up for: not if the Hessian is not positive definite, which leaves
        rounding to nearest.
    """
    # Columns with large inputs first, while many others are left to make up for their errors.
    order = hessian.diagonal().argsort(descending=True)
    factor = _inverse_factor(hessian[order][:, order])
    is_positive = factor is not None
    if factor is None:
        # With the identity nothing is made up for: rounding to nearest.
        hessian = factor = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    scales = None if fmt.group_size else weight_rounding(fmt).grid(weight).scale
    factor, products = factor.float(), hessian.to(weight.dtype)
    n_groups = -(-weight.shape[1] // (fmt.group_size or weight.shape[1]))
    n = max(1, CHUNK_ELEMENTS // max(weight.shape[1], n_groups**2))
    for start in range(0, len(weight), n):  # output channels do not depend on each other
        rows = weight[start : start + n]
        if scales is not None:
            grid = Grid(scales.expand_as(weight)[start : start + n])
            rows.copy_(_rounded_rows(rows, fmt, grid, order, factor))
            continue
        grid = _group_grid(rows, fmt, products.diagonal())
        for _ in range(PASSES):
            rounded = _rounded_rows(rows, fmt, grid, order, factor)
            scale, levels = _fitted_scales(rows, rounded, grid.scale, fmt, products)
            grid = Grid(scale, grid.zero_point)
        rows.copy_(levels * grid.scale)
    return is_positive


def _rounded_rows(
    weight: Tensor, fmt: WeightFormat, grid: Grid, order: Tensor, factor: Tensor
) -> Tensor:
    """`round_columns` for some rows, given the grid of every entry, both (O, I), the order of
    columns, and the factor of the inverse Hessian in that order."""
    scale, (low, high) = grid.scale, fmt.range
    zero = torch.as_tensor(grid.zero_point, dtype=weight.dtype, device=weight.device)
    zero = zero.expand_as(weight)
    pinned, nearest = _pinned(weight, fmt, scale)
    rest, rounded = weight[:, order], torch.empty_like(weight)
    # The columns that are not rounded yet make up for the error of each that is: at once within a
    # block, and beyond it in one product per block (the paper's lazy batch updates).
    for start in range(0, len(order), COLUMNS):
        block = slice(start, start + COLUMNS)
        errors = torch.zeros_like(rest[:, block])
        for i, column in enumerate(order[block].tolist(), start):
            s, z = scale[:, column], zero[:, column]
            integers = (torch.round(rest[:, i] / s) + z).clamp_(low, high)
            values = (torch.where(pinned[:, column], nearest[:, column], integers) - z) * s
            # Equation 2; the rows of the Cholesky factor stand for the inverse Hessians of the
            # columns that are left (the paper's step 3).
            error = (rest[:, i] - values) / factor[i, i]
            rest[:, i + 1 : start + COLUMNS] -= error[:, None] * factor[i, i + 1 : start + COLUMNS]
            errors[:, i - start] = error
            rounded[:, column] = values
        rest[:, start + COLUMNS :] -= errors @ factor[block, start + COLUMNS :]
    return rounded


def _pinned(weight: Tensor, fmt: WeightFormat, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries (O, I) determine the scale and the zero point, and the integers they have."""
    low, high = fmt.range
    groups = split(weight, fmt.group_size or weight.shape[1])
    if fmt.zero_points:
        lowest, highest = groups.aminmax(dim=-1, keepdim=True)
        is_lowest = (groups == lowest) & (lowest < 0)
        pinned = is_lowest | ((groups == highest) & (highest > 0))
        return _columns(pinned, weight), torch.where(_columns(is_lowest, weight), low, high)
    absolute = groups.abs()
    largest = _columns(absolute == absolute.amax(-1, keepdim=True), weight)
    nearest = torch.round(weight / scale).clamp_(low, high)
    if fmt.group_size:  # whatever its scale has been fitted to
        nearest = torch.where(nearest < 0, low, nearest)
    return largest, nearest


def _inverse_factor(hessian: Tensor) -> Tensor | None:
    """The upper Cholesky factor of the damped Hessian's inverse, (I, I); None if there is none."""
    # 1 where no input was ever different from zero: any will do.
    damping = DAMPING * float(hessian.diagonal().abs().mean()) or 1.0
    if not math.isfinite(damping):
        return None
    eye = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    for more in MORE_DAMPING:
        lower, failed = torch.linalg.cholesky_ex(hessian + more * damping * eye)
        if failed:
            continue
        factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and bool(factor.isfinite().all()):
            return factor  # type: ignore[no-any-return]
    return None


def _group_grid(weight: Tensor, fmt: WeightFormat, importance: Tensor) -> Grid:
    """The grid of every entry, both (O, I), that of its group: with the scale, of `SCALES`, of
    least rounding error, in which input i counts `importance[i]` times."""
    low, high = fmt.range
    groups, counts = split(weight, fmt.group_size), split(importance, fmt.group_size)
    kind = weight_rounding(fmt)
    nearest, zero = kind.grid(weight)
    best, best_error = nearest, torch.full_like(nearest, torch.inf)
    for ratio in SCALES:
        if fmt.zero_points and ratio > 1:
            continue  # the extremes would be rounded to other integers, from which it is computed
        scale = kind.storable(nearest * ratio)
        rounded = (groups / scale).round_().add_(zero).clamp_(low, high).sub_(zero).mul_(scale)
        error = ((rounded - groups).square_() * counts).sum(-1, keepdim=True)
        better = error < best_error
        best, best_error = torch.where(better, scale, best), torch.where(better, error, best_error)
    scales = _columns(best.expand_as(groups), weight)
    zeros = _columns(zero.expand_as(groups), weight) if isinstance(zero, Tensor) else zero
    return Grid(scales, zeros)


def _fitted_scales(
    weight: Tensor, rounded: Tensor, scale: Tensor, fmt: WeightFormat, hessian: Tensor
) -> tuple[Tensor, Tensor]:
    """The integers (O, I) of a rounded weight, less their zero points, and for these the scale (O,
    I) of least e H e^T.

    If q_g has the integers of group g, and zeros elsewhere, the scales s of a row w solve
    sum_h (q_g H q_h^T) s_h = q_g H w^T. A group whose integers are zero, or say too little about
    its scale, keeps the one it has.
    """
    size = fmt.group_size
    integers = torch.round(rounded / scale).nan_to_num_()  # a scale may be zero in float16
    n_groups = -(-weight.shape[1] // size)
    products = weight.new_empty(len(weight), n_groups, n_groups)
    for group in range(n_groups):  # a row of products at a time, so that no (O, I, I) is needed
        inputs = slice(group * size, (group + 1) * size)
        products[:, group] = split(integers[:, inputs] @ hessian[inputs] * integers, size).sum(-1)
    targets = split(weight @ hessian * integers, size).sum(-1)
    present = split(scale, size)[..., 0]
    diagonal = products.diagonal(dim1=1, dim2=2)
    diagonal += torch.where(diagonal == 0, torch.ones_like(diagonal), RIDGE * diagonal)
    solution, _ = torch.linalg.solve_ex(products, targets)
    solution = weight_rounding(fmt).storable(solution)
    is_near = (solution / present - 1).abs() < MAX_CHANGE  # not so if it is NaN
    fitted = torch.where(is_near, solution, present)
    return _columns(fitted[..., None].expand(-1, -1, size), weight), integers


def _columns(groups: Tensor, weight: Tensor) -> Tensor:
    """(O, groups, size) -> (O, I), without the padding of the last group."""
    return groups.flatten(-2)[:, : weight.shape[1]]


def learnable(block: nn.Module) -> list[FakeQuantLinear]:
    """The linears whose rounding is worth learning: those with 4-bit groups."""
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


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Latent(QuantizedWeight):
    """The weight of a linear as a function of trained parameters.

    Attributes:
        integers: latent ones (O, G, size).
        change: of the scales (O, G, 1), relative.
    """

    def __init__(self, linear: FakeQuantLinear, before: Tensor) -> None:
        super().__init__(linear.quantized.fmt)
        self.low, self.high = self.fmt.range
        self.scale, self.zero = weight_rounding(self.fmt).grid(linear.weight)
        groups = split(linear.weight, self.fmt.group_size)
        rounded = (groups / self.scale).round() + self.zero
        # From one entry of every group, which keeps the lowest integer, the scale is computed
        # again; with zero points, from the highest one too, unless the group ends at zero.
        self.pinned = torch.zeros_like(rounded, dtype=torch.bool)
        self.pinned.scatter_(-1, rounded.argmin(-1, keepdim=True), True)
        if self.fmt.zero_points:
            self.pinned &= groups < 0
            highest = torch.zeros_like(self.pinned)
            highest.scatter_(-1, rounded.argmax(-1, keepdim=True), True)
            self.pinned |= highest & (groups > 0)
        self.pins = rounded
        # The float weight, at most this far from GPTQ's integer: learning begins at its rounding.
        near = 0.5 - MARGIN
        wanted = split(before, self.fmt.group_size) / self.scale + self.zero
        self.integers = nn.Parameter(wanted.clamp(rounded - near, rounded + near))
        self.change = nn.Parameter(torch.zeros_like(self.scale))

    def __call__(self, weight: Tensor) -> Tensor:
        rounded: Tensor = _Round.apply(self.integers)  # type: ignore[no-untyped-call]
        levels = torch.where(self.pinned, self.pins, rounded) - self.zero
        values = levels * (self.scale * (1 + self.change))
        return values.flatten(-2)[:, : weight.shape[1]]

    @torch.no_grad()
    def clamp(self) -> None:
        """Keep the integers within the format's range."""
        self.integers.clamp_(self.low, self.high)

    @torch.no_grad()
    def freeze(self) -> None:
        """Round the scales to those that files can store."""
        scale = weight_rounding(self.fmt).storable(self.scale * (1 + self.change))
        self.scale, self.change = scale, nn.Parameter(torch.zeros_like(scale))


def learn_rounding(
    block: Block,
    before: Weights,
    inputs: Tensor,
    targets: Tensor,
    steps: int,
    device: torch.device,
) -> tuple[float, float]:
    """Train the rounding of a block whose weights GPTQ has rounded, in place. Rounding the result
    to nearest, as fake quantization and export do, changes nothing.

    Args:
        before: the float weights of `learnable`.
        inputs: hidden states (N, T, C) that the quantized blocks before it compute.
        targets: those that the block should compute from them.
        device: the block's, to which the rows of a step are moved.

    Returns:
        The mean squared error of the output before and after, relative to the targets. If it has
        not fallen, the weights are as before.
    """
    latents = {linear: _Latent(linear, weight) for linear, weight in before.items()}
    # bfloat16 where it is faster; errors are still summed in float32.
    in_half = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def error(rows: Tensor) -> Tensor:
        wanted = targets[rows].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=in_half):
            outputs = block(inputs[rows].to(device))
        importance = 1 / wanted.square().mean(-1, keepdim=True).clamp_(min=1e-12)
        errors: Tensor = (outputs.float() - wanted).square() * importance
        return errors.mean()

    def total() -> float:
        parts = torch.split(torch.arange(len(inputs)), size)
        with torch.no_grad():
            return sum(float(error(part)) * len(part) for part in parts) / len(inputs)

    size = max(1, STEP_TOKENS // inputs.shape[1])
    parameters = [x for latent in latents.values() for x in (latent.integers, latent.change)]
    groups = [
        {"params": parameters[0::2], "lr": TRAVEL / steps},
        {"params": parameters[1::2], "lr": SCALE_TRAVEL / steps},
    ]
    optimizer = torch.optim.Adam(groups, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    generator = torch.Generator().manual_seed(0)
    first = total()
    replaced = {linear: linear.quantized for linear in latents}
    # Texts are drawn without replacement: each counts as often as the others, up to one.
    queue = torch.empty(0, dtype=torch.int64)
    try:
        for linear, latent in latents.items():
            linear.quantized = latent
        for _ in range(steps):
            if len(queue) < size:
                queue = torch.cat((queue, torch.randperm(len(inputs), generator=generator)))
            rows, queue = queue[:size], queue[size:]
            with torch.enable_grad():
                gradients = torch.autograd.grad(error(rows), parameters)
            # Not backward(), which would fill in gradients of norms and biases too.
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            schedule.step()
            for latent in latents.values():
                latent.clamp()
        for latent in latents.values():
            latent.freeze()  # judged with the scales that files will have
        last = total()
        if last < first:
            for linear, latent in latents.items():
                linear.weight.copy_(latent(linear.weight))
    finally:
        for linear, quantized in replaced.items():
            linear.quantized = quantized
    return first, min(first, last)
