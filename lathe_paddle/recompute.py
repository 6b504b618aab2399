"""Recomputation: the backward pass recomputes activations instead of storing them (Chen et al.
2016)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import paddle
from paddle import Tensor, nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn.quant.quant_layers import FakeQuantMovingAverageAbsMax


def recomputed(
    layer: nn.Layer, function: Callable[..., Tensor], *inputs: Tensor, is_random: bool
) -> Tensor:
    """The result of `function`, which belongs to `layer`; its activations are not stored.

    Args:
        is_random: whether it has dropout; the second pass then has to drop the same units, which
            Paddle supports on GPUs only.
    """
    needs_grad = paddle.is_grad_enabled() and not all(x.stop_gradient for x in inputs)
    if not (layer.training and needs_grad):
        return function(*inputs)

    def run(*inputs: Tensor) -> Tensor:
        if not paddle.is_grad_enabled():  # the first pass
            return function(*inputs)
        with _observers_paused(layer):
            return function(*inputs)

    result: Tensor = recompute(run, *inputs, preserve_rng_state=is_random)
    return result


@contextmanager
def _observers_paused(layer: nn.Layer) -> Iterator[None]:
    """Pause the observers: their ranges must not count the same input a second time."""
    observers = [
        part for part in layer.sublayers() if isinstance(part, FakeQuantMovingAverageAbsMax)
    ]
    for observer in observers:
        observer.training = False
    try:
        yield
    finally:
        for observer in observers:
            observer.training = True
