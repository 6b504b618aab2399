"""Tensor parallelism: every block linear is divided over processes. Paddle 2.6 supports it on GPUs
only."""

import numpy as np
import paddle
from paddle.distributed import fleet

from lathe.model.architecture import Architecture
from lathe_base.errors import Code, UserError
from lathe_paddle import fake_quant
from lathe_paddle.checkpoint import Arrays, float_weights, is_weight
from lathe_paddle.gpt import GPT
from lathe_paddle.workers import Workers


def divide(model: GPT, workers: Workers) -> None:
    """Replace every block linear, in place, with this process's part: heads and FFN channels.

    Embedding, head and norms are whole in every process. Does nothing if mp is 1.

    Raises:
        UserError: mp does not divide a layer's heads or channels.
    """
    if workers.mp == 1:
        return
    parts, part = workers.mp, workers.mp_rank
    config = model.config
    for i, (heads, inner) in enumerate(zip(config.n_head, config.n_inner, strict=True)):
        if heads % parts or inner % parts:
            raise UserError(
                f"layer {i} has {heads} heads and {inner} FFN channels, which "
                f"Distributed.mp_degree "
                f"{parts} does not divide",
                "choose another degree, or prune to a multiple of it",
                Code.LAYOUT,
            )
    for path in config.linear_names():
        linear = fake_quant.layer_at(model, path)
        n_in, n_out = linear.weight.shape
        is_column = split_axis(f"{path}.weight", config.architecture) == 1
        if is_column:
            layer = fleet.meta_parallel.ColumnParallelLinear(
                n_in, n_out, has_bias=True, gather_output=False
            )
        else:
            layer = fleet.meta_parallel.RowParallelLinear(
                n_in, n_out, has_bias=True, input_is_parallel=True
            )
        axis = 1 if is_column else 0
        layer.weight.set_value(np.split(linear.weight.numpy(), parts, axis)[part])
        bias = linear.bias.numpy()
        layer.bias.set_value(np.split(bias, parts)[part] if is_column else bias)
        parent, _, attribute = path.rpartition(".")
        setattr(fake_quant.layer_at(model, parent), attribute, layer)


def whole_weights(model: GPT, workers: Workers) -> Arrays:
    """The whole weights, gathered from all parts, in every process."""
    if workers.mp == 1:
        return float_weights(model)
    whole: Arrays = {}
    for name, parameter in model.named_parameters():
        if not is_weight(name):
            continue
        arrays, axis = [parameter], split_axis(name, model.config.architecture)
        if axis is not None:
            arrays = []
            paddle.distributed.all_gather(arrays, parameter.detach(), group=workers.parts)
        whole[name] = np.concatenate([x.numpy() for x in arrays], axis or 0).astype(np.float32)
    return whole


def split_axis(name: str, architecture: Architecture) -> int | None:
    """The axis along which a parameter is divided; None if every process has it whole."""
    linear, is_weight = architecture.find_linear(name), name.endswith(".weight")
    if linear is not None and linear.style == "column":
        return 1 if is_weight else 0
    return 0 if linear is not None and is_weight else None
