"""Activations that backward makes again instead of keeping them (Chen et al. 2016)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import paddle
from paddle import Tensor, nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn.quant.quant_layers import FakeQuantMovingAverageAbsMax


def recomputed(
    layer: nn.Layer, function: Callable[..., Tensor], *inputs: Tensor, is_random: bool
) -> Tensor:
    """What `function`, which is of `layer`, gives; its own activations are not kept.

    Args:
        is_random: whether it drops units, which the second pass must drop again: on GPUs only.
    """
    needs_grad = paddle.is_grad_enabled() and not all(x.stop_gradient for x in inputs)
    if not (layer.training and needs_grad):
        return function(*inputs)

    def run(*inputs: Tensor) -> Tensor:
        if not paddle.is_grad_enabled():  # the first pass
            return function(*inputs)
        with _observers_at_rest(layer):
            return function(*inputs)

    result: Tensor = recompute(run, *inputs, preserve_rng_state=is_random)
    return result


@contextmanager
def _observers_at_rest(layer: nn.Layer) -> Iterator[None]:
    """A range is what the first pass left: it must not see the same input again."""
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
