"""GPTQ: round weights to minimize the error of the linear's output, without training.

Source: Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", section 3.3, with columns in decreasing order of the Hessian's diagonal
("act-order"). The scale of a group first minimizes the rounding error weighted with that diagonal,
as llama.cpp's quantization with an importance matrix does, and then, given the integers, the error
of the output: a least-squares problem, with whose solution the weights are rounded again.

Weights of 4 bits are rounded for what errors cost the whole model: the error E (O, I) of a linear
costs tr(F E H E^T), where H is the Hessian of its inputs and F that of its outputs, in which tokens
count as `output_hessians` says. As the columns that are not rounded yet make up for errors of the
columns before them, so do output channels (Tseng et al. 2025, "Model-Preserving Adaptive Rounding",
arXiv:2505.22988, section 4).

Shapes: B batch, T tokens, O output channels and I inputs of a linear, G groups of a row.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lathe.compress.output_hessians import OutputHessian, output_hessians, part_sizes
from lathe.model.block import Block, Half
from lathe.model.by_block import by_halves, embed, for_each, hidden_states, on
from lathe.model.fake_quant import (
    FakeQuantEmbedding,
    FakeQuantLinear,
    int4_linears,
)
from lathe.model.gpt import GPT
from lathe.model.integer_weights import Grid, split, weight_rounding
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
CHANNELS = 64
"""Output channels that are rounded together: errors of one change only the channels after them."""
OUTPUT_DAMPING = 0.1  # a share of the diagonal's mean
SCALES = [i / 40 for i in (40, *range(28, 40), 41, 42)]
"""Scales to try for a group, relative to that of rounding to nearest, which wins ties. Beyond
8 / 7.5, the entry of largest magnitude would not be rounded to -8, from which the scale is computed
again."""
# Memory, for `gptq_bytes`:
HESSIANS = 8  # matrices like the Hessian, in float64, while its inverse is factored
OUTPUTS = 4  # matrices like all parts of the outputs' Hessian, in float32, while it is factored
BUFFERS = 16  # like the rows that are rounded together

Outputs = Mapping[FakeQuantLinear, OutputHessian]


@torch.no_grad()
def gptq(model: GPT, batches: Sequence[Tensor]) -> None:
    """Round the weights of a fake-quantized, calibrated model in place: the embedding first, then
    every linear, given the inputs from the rounded ones before it.

    Rounding the result to nearest, as fake quantization and export do, changes nothing.

    Args:
        batches: tokens (B, T) each; together at least as many as a linear has inputs.
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
    has_int4 = any(int4_linears(block) for block in model.blocks)
    outputs = output_hessians(model, batches) if has_int4 else {}
    round_half = partial(_round_half, names, outputs, device)
    hidden = embed(model, batches)
    for block in track(model.blocks, "gptq", len(model.blocks)):
        assert isinstance(block, Block)
        with on(device, block):
            hidden = by_halves(device, block, hidden, round_half)


def gptq_bytes(model: GPT, tokens: int) -> int:
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
    int4 = [int4_linears(block) for block in model.blocks]
    squares = [sum(n**2 for n in part_sizes(x.out_features)) for linears in int4 for x in linears]
    outputs = OUTPUTS * 4 * max(squares, default=0)
    return pass_bytes(model, tokens, gradients=outputs > 0) + hessians + outputs + rows


def _round_half(
    names: Mapping[nn.Module, str],
    outputs: Outputs,
    device: torch.device,
    half: Half,
    hidden: Sequence[Tensor],
) -> list[Tensor]:
    """Round both linears of a half; returns the second one's inputs."""
    first, second = (getattr(half.part, name) for name in half.part.names)

    def round_linear(linear: FakeQuantLinear, inputs: Iterable[Tensor]) -> None:
        of_outputs = outputs.get(linear)
        _round_weight(names[linear], linear, linear.observer, inputs, device, of_outputs)

    if isinstance(first, FakeQuantLinear):
        inputs = (half.norm(x.to(device, non_blocking=True)) for x in hidden)
        round_linear(first, inputs)
    # With the first one rounded.
    inner = for_each(device, lambda x: half.part.inner(half.norm(x)), hidden)
    if isinstance(second, FakeQuantLinear):
        round_linear(second, inner)
    return inner


def _round_weight(
    name: str,
    module: FakeQuantLinear | FakeQuantEmbedding,
    observer: nn.Module | None,
    inputs: Iterable[Tensor],
    device: torch.device,
    outputs: OutputHessian | None = None,
) -> None:
    """Round a weight on a device, in place, for its inputs (B, T, I), which its observer rounds."""
    here = (x.to(device, non_blocking=True) for x in inputs)
    rounded = (x if observer is None else observer(x) for x in here)
    parts = []
    if outputs is not None:
        parts = [part.to(device) for part in outputs.parts]
        norms = (norm.to(device) for norm in outputs.norms)
        rounded = (x * norm.sqrt() for x, norm in zip(rounded, norms, strict=True))
    hessian = input_hessian(rounded)
    if not round_columns(module.weight, module.quantized.fmt, hessian, parts):
        log.warning(
            "%s: the Hessian of its inputs is not positive definite; rounding to nearest", name
        )


def input_hessian(inputs: Iterable[Tensor]) -> Tensor:
    """Sum of x x^T over inputs (..., I): (I, I), float64. Half the second derivative of the squared
    error of an output channel by its weights."""
    products = (x.flatten(0, -2).T @ x.flatten(0, -2) for x in inputs)
    return sum(product.double() for product in products)  # type: ignore[return-value]


def round_columns(
    weight: Tensor, fmt: WeightFormat, hessian: Tensor, outputs: Sequence[Tensor] = ()
) -> bool:
    """Round a weight (O, I), in place, so that tr(F e H e^T) is small for its errors e (O, I) (H:
    `hessian`, (I, I)).

    The largest entry of a group or channel is rounded to nearest, whatever its column should make
    up for, so that the scale computed from the rounded weight is the one it was rounded with; with
    zero points, so are the lowest and the highest entry.

    Args:
        outputs: the parts of F: matrices along its diagonal, outside which it is zero; none for the
            identity. Only with groups.

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
        outputs = ()
    factor, products = factor.float(), hessian.to(weight.dtype)

    def round_rows(rows: Tensor) -> Tensor:
        grid = _group_grid(rows, fmt, products.diagonal())
        for _ in range(PASSES):
            rounded = _rounded_rows(rows, fmt, grid, order, factor)
            scale, levels = _fitted_scales(rows, rounded, grid.scale, fmt, products)
            grid = Grid(scale, grid.zero_point)
        return levels * grid.scale

    if outputs:
        _round_coupled(weight, outputs, round_rows)
        return is_positive
    scales = None if fmt.group_size else weight_rounding(fmt).grid(weight).scale
    n_groups = -(-weight.shape[1] // (fmt.group_size or weight.shape[1]))
    n = max(1, CHUNK_ELEMENTS // max(weight.shape[1], n_groups**2))
    for start in range(0, len(weight), n):  # output channels do not depend on each other
        rows = weight[start : start + n]
        if scales is None:
            rows.copy_(round_rows(rows))
        else:
            grid = Grid(scales.expand_as(weight)[start : start + n])
            rows.copy_(_rounded_rows(rows, fmt, grid, order, factor))
    return is_positive


def _round_coupled(
    weight: Tensor, outputs: Sequence[Tensor], round_rows: Callable[[Tensor], Tensor]
) -> None:
    """`round_columns` with parts of F, whose factor L L^T = F makes the objective the sum over rows
    i of |L_ii e_i + sum over k > i of L_ki e_k|^2, in the metric H: the rows k, rounded before,
    change what row i should be."""
    before, parts, first = weight.clone(), [], 0
    for part in outputs:
        # The last rows are rounded first: those whose errors cost most.
        order = part.diagonal().argsort()
        damping = OUTPUT_DAMPING * float(part.diagonal().mean()) or 1.0
        damped = part[order][:, order]
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed or not lower.isfinite().all():
            lower = torch.eye(len(part), device=part.device)  # each row by itself
        parts.append((order + first, lower))
        first += len(part)
    for end in range(max(len(part) for part in outputs), 0, -CHANNELS):
        together, targets = [], []
        for rows, lower in parts:  # parts do not depend on each other
            here, done = slice(max(0, end - CHANNELS), end), slice(end, None)
            if not len(rows[here]):
                continue
            errors = weight[rows[done]] - before[rows[done]]
            change = torch.linalg.solve_triangular(
                lower[here, here].T, lower[done, here].T @ errors, upper=True
            )
            together.append(rows[here])
            targets.append(before[rows[here]] - change)
        weight[torch.cat(together)] = round_rows(torch.cat(targets))


def _rounded_rows(
    weight: Tensor, fmt: WeightFormat, grid: Grid, order: Tensor, factor: Tensor
) -> Tensor:
    """`round_columns` for some rows, given the grid of every entry, both (O, I), the order of
    columns, and the factor of the inverse Hessian in that order."""
    low, high = fmt.range
    zero = torch.as_tensor(grid.zero_point, dtype=weight.dtype, device=weight.device)
    pinned, nearest = _pinned(weight, fmt, grid.scale)
    least, most = (torch.where(pinned, nearest, x) - zero for x in (low, high))
    # In that order, and transposed: one column after the other is contiguous.
    rest, scale, least, most = (x.T[order] for x in (weight, grid.scale, least, most))
    # The columns that are not rounded yet make up for the error of each that is: at once within a
    # block, and beyond it in one product per block (the paper's lazy batch updates).
    for start in range(0, len(order), COLUMNS):
        block = slice(start, start + COLUMNS)
        errors, here = torch.empty_like(rest[block]), factor[block, block]
        columns = zip(rest[block], scale[block], least[block], most[block], errors, strict=True)
        for i, (x, s, lowest, highest, error) in enumerate(columns):
            levels = torch.div(x, s).round_().clamp_(lowest, highest)
            # Equation 2; the rows of the Cholesky factor stand for the inverse Hessians of the
            # columns that are left (the paper's step 3).
            torch.addcmul(x, levels, s, value=-1, out=error).div_(here[i, i])
            torch.mul(levels, s, out=x)
            rest[start + i + 1 : start + COLUMNS].addr_(here[i, i + 1 :], error, alpha=-1)
        rest[start + COLUMNS :].addmm_(factor[block, start + COLUMNS :].T, errors, alpha=-1)
    return rest[order.argsort()].T.contiguous()


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
