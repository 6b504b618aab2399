"""PaddleSlim's quantization-aware training on a `GPT`, and its ranges as a `QuantizationPlan`.

Fake quantization is PaddleSlim's own. It rounds an activation to clip(round(x / s), -127, 127) * s.
The served graph and `lathe.model.fake_quant` go down to -128, which matters only for inputs beyond
the range. PaddleSlim's moving average follows every forward pass of the training, Lathe's own
scales stay as calibrated.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray
from paddle import Tensor, nn
from paddle.nn.quant.quant_layers import (
    FakeQuantChannelWiseAbsMax,
    FakeQuantMovingAverageAbsMax,
    QuantizedColumnParallelLinear,
    QuantizedLinear,
    QuantizedRowParallelLinear,
)

from lathe.model.architecture import HEAD
from lathe.model.quantization import ACTIVATION_LEVELS, INT8, QuantizationPlan, WeightFormat
from lathe_base.errors import Code, UserError
from lathe_paddle.gpt import GPT

QUANTIZED = (QuantizedLinear, QuantizedColumnParallelLinear, QuantizedRowParallelLinear)


def insert(model: GPT, plan: QuantizationPlan, pact: bool = False, moving_rate: float = 0.9) -> Any:
    """Replace the linears of the plan, in place, with PaddleSlim's.

    A scale of 0 means "not known yet": calibrate before use.

    Returns:
        The `paddleslim.dygraph.quant.QAT`, which also saves the static model.

    Raises:
        UserError: the plan has a linear with a float input.
    """
    from paddleslim.dygraph.quant import QAT

    # PaddleSlim replaces every linear of a type unless it has this attribute.
    paths = model.config.linear_names()
    for path in paths:
        layer_at(model, path).skip_quant = path not in plan.linears
    weight = _weight_format(plan)
    qat = QAT(
        {
            "weight_quantize_type": weight.quantize_type,
            "activation_quantize_type": "moving_average_abs_max",
            "activation_preprocess_type": "PACT" if pact else None,
            "weight_bits": weight.bits,
            "activation_bits": 8,
            "moving_rate": moving_rate,
            "quantizable_layer_type": ["Linear", "ColumnParallelLinear", "RowParallelLinear"],
            "onnx_format": True,
        }
    )
    # Inputs only: `quantize` also tracks every linear's output, which the static model would then
    # quantize, although training did not.
    qat.imperative_qat._quantize_inputs.apply(model)
    if plan.quantize_embedding:
        V = model.config.vocab_size
        model.table_quantizer = FakeQuantChannelWiseAbsMax(
            "table", channel_num=V, quant_axis=0, quant_on_weight=True
        )
        model.head_input = FakeQuantMovingAverageAbsMax("head", moving_rate)
    if plan.position_embedding:
        table = model.wpe.weight
        table.set_value(fake_quantize_weight(table, INT8, channel=0))
    # A scale that is known goes on as the state of PaddleSlim's moving average.
    for name, quantizer in activation_quantizers(model):
        scale = plan.linears[name].activation_scale
        if scale:
            set_range(quantizer, ACTIVATION_LEVELS * scale)
    return qat


@paddle.no_grad()
def fake_quantize_weight(weight: Tensor, fmt: WeightFormat, channel: int) -> Tensor:
    """A matrix, rounded as by PaddleSlim; `channel` is the axis of the scales, if several."""
    per_channel = fmt.quantize_type == "channel_wise_abs_max"
    absmax = weight.abs().max(axis=1 - channel if per_channel else [0, 1], keepdim=True)
    scale = paddle.where(absmax > 0, absmax, paddle.ones_like(absmax)) / fmt.levels
    return _fake_quantize(weight, scale, fmt.levels)


def fake_quantize_input(x: Tensor, scale: float) -> Tensor:
    """An activation, rounded with a static scale."""
    return _fake_quantize(x, paddle.to_tensor(scale, dtype=x.dtype), ACTIVATION_LEVELS)


def _fake_quantize(x: Tensor, scale: Tensor, high: int) -> Tensor:
    return paddle.clip(paddle.round(x / scale), -high, high) * scale


def _weight_format(plan: QuantizationPlan) -> WeightFormat:
    """The weight format of the block linears. PaddleSlim quantizes all of them alike, weight and
    input together."""
    if plan.kv_cache_bits:
        raise UserError(
            "the model has an INT8 KV cache, which PaddleSlim does not support",
            "use Compress.engine=torch",
            Code.UNSUPPORTED,
        )
    if in_float := plan.linears.keys() - plan.activation_scales.keys():
        raise UserError(
            f"{min(in_float)} is not INT8 in weight and input, which PaddleSlim does not support",
            "use Compress.engine=torch",
            Code.UNSUPPORTED,
        )
    formats = {fmt.weight for name, fmt in plan.linears.items() if name != HEAD}
    assert len(formats) <= 1, formats
    return formats.pop() if formats else INT8


@contextmanager
def inserted(model: GPT, plan: QuantizationPlan) -> Iterator[None]:
    """`insert` for the duration of a `with` block; afterwards the model is as before."""
    before = {path: layer_at(model, path) for path in model.config.linear_names()}
    was_training = model.training
    insert(model, plan)
    model.train() if was_training else model.eval()
    try:
        yield
    finally:
        for path, layer in before.items():
            parent, _, attribute = path.rpartition(".")
            setattr(layer_at(model, parent), attribute, layer)
        model.head_input = model.table_quantizer = None


def layer_at(model: nn.Layer, path: str) -> Any:
    """The layer at a dotted path."""
    layer: Any = model
    for part in path.split("."):
        layer = layer[int(part)] if part.isdigit() else getattr(layer, part)
    return layer


def quantized_linears(model: GPT) -> Iterator[tuple[str, Any]]:
    """Yield (path, PaddleSlim's quantized linear)."""
    for name, layer in model.named_sublayers():
        if isinstance(layer, QUANTIZED):
            yield name, layer


def activation_quantizers(model: GPT) -> Iterator[tuple[str, Any]]:
    """Yield (path of the linear or `lm_head`, the quantizer of its input)."""
    for name, layer in quantized_linears(model):
        yield name, layer._fake_quant_input
    if model.head_input is not None:
        yield HEAD, model.head_input


def set_range(quantizer: Any, absmax: float) -> None:
    """Set the range to `absmax`, from which the moving average continues.

    PaddleSlim's average is (rate * accum + max) / (rate * state + 1). With state = 1 / (1 - rate)
    and accum = absmax * state, it is rate * absmax + (1 - rate) * max.
    """
    state = 1 / (1 - quantizer._moving_rate)
    for tensor, value in (
        (quantizer._scale, absmax),
        (quantizer._state, state),
        (quantizer._accum, absmax * state),
    ):
        tensor.set_value(paddle.to_tensor([value], dtype=tensor.dtype))


def scales(model: GPT) -> dict[str, float]:
    """Path -> scale of its input, as the exported graph uses it, limited by PACT's bound."""
    bounds = {
        name: float(layer._act_preprocess.alpha)
        for name, layer in quantized_linears(model)
        if layer._act_preprocess is not None
    }
    return {
        name: min(float(quantizer._scale), bounds.get(name, np.inf)) / ACTIVATION_LEVELS
        for name, quantizer in activation_quantizers(model)
    }


@paddle.no_grad()
def calibrate(model: GPT, batches: Iterable[NDArray[np.int64]]) -> dict[str, float]:
    """Set every range to the mean of the largest magnitudes in each text of `batches` (B, T), with
    weights quantized and activations not, as `lathe.model.fake_quant.calibrate`.

    Returns:
        Path -> scale.
    """
    quantizers = dict(activation_quantizers(model))
    seen: dict[str, list[float]] = {name: [] for name in quantizers}
    hooks = []
    for name, quantizer in quantizers.items():

        def watch(layer: Any, inputs: Any, output: Any, name: str = name) -> Any:
            seen[name].append(float(inputs[0].abs().max()))
            return inputs[0]

        hooks.append(quantizer.register_forward_post_hook(watch))
    # In eval mode the quantizers keep their ranges, and the hooks return the input unchanged.
    training = model.training
    model.eval()
    for text in chain.from_iterable(batches):
        model(paddle.to_tensor(text[None]))
    for hook in hooks:
        hook.remove()
    for name, quantizer in quantizers.items():
        set_range(quantizer, fmean(seen[name]))
    model.train() if training else model.eval()
    return scales(model)


def share_ranges(model: GPT) -> None:
    """Give all processes the widest range that any of them has seen."""
    for _, quantizer in activation_quantizers(model):
        for tensor in (quantizer._scale, quantizer._accum):
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
