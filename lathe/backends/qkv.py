"""Converts between the two orders of a fused qkv's columns (..., 3 * H * D), for numpy arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def by_head(array: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """All q, all k, all v (HF's files) -> head by head (Paddle's models)."""
    parts = array.reshape(*array.shape[:-1], 3, -1, head_dim)
    return np.ascontiguousarray(parts.swapaxes(-3, -2)).reshape(array.shape)


def by_projection(array: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """The inverse of `by_head`."""
    parts = array.reshape(*array.shape[:-1], -1, 3, head_dim)
    return np.ascontiguousarray(parts.swapaxes(-3, -2)).reshape(array.shape)
