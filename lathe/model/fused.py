"""Row orders of fused linears: one matrix after the other, as in files, and group by group, as in
models, so that a slice of rows is a slice of key-value groups or channels."""

from collections.abc import Sequence

import torch
from torch import Tensor


def join(parts: Sequence[Tensor], groups: int) -> Tensor:
    """Rows of several matrices (groups * n_i, ...) -> the rows of one (groups * sum n_i, ...): for
    each group those of the first part, then those of the second, and so on."""
    apart = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(apart, 1).flatten(0, 1)


def split(rows: Tensor, groups: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The inverse of `join`; `sizes` are the rows of each part."""
    apart = rows.reshape(groups, -1, *rows.shape[1:])
    pieces = torch.split(apart, [size // groups for size in sizes], 1)
    return tuple(part.flatten(0, 1) for part in pieces)
