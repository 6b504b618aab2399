"""GPTQ: round weights to minimize the error of the linear's output, without training.

Source: Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", section 3.3, with columns in decreasing order of the Hessian's diagonal
("act-order"). The scale of a group first minimizes the rounding error weighted with that diagonal,
as llama.cpp's quantization with an importance matrix does, and then, given the integers, the error
of the output: a least-squares problem, with whose solution the weights are rounded again.

Shapes: B batch, T tokens, C hidden size, O output channels and I inputs of a linear.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lathe.compress.learned_rounding import in_float, learn_rounding, learnable
from lathe.model.block import Block, Half
from lathe.model.fake_quant import FakeQuantEmbedding, FakeQuantLinear
from lathe.model.gpt import GPT
from lathe.model.integer_weights import Grid, split, storable_scale, weight_grid, weight_scales
from lathe.model.quantization import WeightFormat
from lathe.train.chunks import CHUNK_ELEMENTS
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
    head = model.output
    if isinstance(head, FakeQuantEmbedding):
        finals = (_rounded(model.head_input, model.hidden(tokens)) for tokens in batches)
        _round_weight(model.config.tables[-1], head, input_hessian(finals))
    names = {module: name for name, module in model.named_modules()}
    hidden = [model.embed(tokens) for tokens in batches]
    for block in track(model.blocks, "gptq", len(model.blocks)):
        assert isinstance(block, Block)
        linears = learnable(block) if steps else []
        if not linears:
            hidden = block.by_halves(hidden, partial(_round_half, names))
            continue
        before = {linear: linear.weight.clone() for linear in linears}
        with in_float(block):
            targets = [block(x) for x in hidden]
        block.by_halves(hidden, partial(_round_half, names))
        learn_rounding(block, before, torch.cat(hidden), torch.cat(targets), steps)
        hidden = [block(x) for x in hidden]


def _round_half(
    names: Mapping[nn.Module, str], half: Half, hidden: Sequence[Tensor]
) -> list[Tensor]:
    """Round both linears of a half; returns the second one's outputs."""
    first, second = (getattr(half.part, name) for name in half.part.names)
    _round_linear(names[first], first, (half.norm(x) for x in hidden))
    inner = [half.part.inner(half.norm(x)) for x in hidden]
    _round_linear(names[second], second, inner)
    return [second(y) for y in inner]


def _round_linear(name: str, linear: nn.Module, inputs: Iterable[Tensor]) -> None:
    """Round the weight of a linear, if it is quantized, for its inputs (B, T, I)."""
    if isinstance(linear, FakeQuantLinear):
        rounded = (_rounded(linear.observer, x) for x in inputs)
        _round_weight(name, linear, input_hessian(rounded))


def _round_weight(name: str, module: FakeQuantLinear | FakeQuantEmbedding, hessian: Tensor) -> None:
    if not round_columns(module.weight, module.quantized.fmt, hessian):
        log.warning(
            "%s: the Hessian of its inputs is not positive definite; rounding to nearest", name
        )


def _rounded(observer: nn.Module | None, x: Tensor) -> Tensor:
    return x if observer is None else observer(x)


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
    whole = None if fmt.group_size else weight_scales(weight, fmt).expand(len(weight), 1)
    factor, products = factor.float(), hessian.to(weight.dtype)
    n_groups = -(-weight.shape[1] // (fmt.group_size or weight.shape[1]))
    n = max(1, CHUNK_ELEMENTS // max(weight.shape[1], n_groups**2))
    for start in range(0, len(weight), n):  # output channels do not depend on each other
        rows = weight[start : start + n]
        if whole is not None:
            grid = Grid(whole[start : start + n].expand_as(rows))
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
    nearest, zero = weight_grid(weight, fmt)
    best, best_error = nearest, torch.full_like(nearest, torch.inf)
    for ratio in SCALES:
        if fmt.zero_points and ratio > 1:
            continue  # the extremes would be rounded to other integers, from which it is computed
        scale = storable_scale(nearest * ratio, fmt)
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
    for group in range(n_groups):
        inputs = slice(group * size, (group + 1) * size)
        products[:, group] = split(integers[:, inputs] @ hessian[inputs] * integers, size).sum(-1)
    targets = split(weight @ hessian * integers, size).sum(-1)
    present = split(scale, size)[..., 0]
    diagonal = products.diagonal(dim1=1, dim2=2)
    diagonal += torch.where(diagonal == 0, torch.ones_like(diagonal), RIDGE * diagonal)
    solution, _ = torch.linalg.solve_ex(products, targets)
    solution = storable_scale(solution, fmt)
    is_near = (solution / present - 1).abs() < MAX_CHANGE  # not so if it is NaN
    fitted = torch.where(is_near, solution, present)
    return _columns(fitted[..., None].expand(-1, -1, size), weight), integers


def _columns(groups: Tensor, weight: Tensor) -> Tensor:
    """(O, groups, size) -> (O, I), without the padding of the last group."""
    return groups.flatten(-2)[:, : weight.shape[1]]
