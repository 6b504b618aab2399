"""The two orders of a fused qkv's columns (..., 3 * H * D), of arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def by_head(array: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """All of q, of k, of v, as HF's files have -> head by head, as Paddle's models have."""
    parts = array.reshape(*array.shape[:-1], 3, -1, head_dim)
    return np.ascontiguousarray(parts.swapaxes(-3, -2)).reshape(array.shape)


def by_projection(array: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """The inverse of `by_head`."""
    parts = array.reshape(*array.shape[:-1], -1, 3, head_dim)
    return np.ascontiguousarray(parts.swapaxes(-3, -2)).reshape(array.shape)
