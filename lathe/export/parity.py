"""Compares every quantized linear of the running graph with torch's on the same input."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lathe.export.weight_formats import GROUPED, kernel_rounding
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import by_projection
from lathe.model.fake_quant import FakeQuantLinear, Observer, RoundGroups, activation_scales
from lathe.model.gpt import GPT
from lathe.model.integer_weights import split
from lathe_serving.runtime.open_session import open_session
from lathe_serving.runtime.session import OnnxModel

EMBEDDINGS = "embeddings"
# Relative to the largest output: error of a float32 sum. Observed: 6e-7.
ROUNDING = 1e-5
# In units of the scale: this close to the midpoint of two levels, the quotient's last bit decides
# to which of them it rounds.
EDGE = 1e-4


def linear_errors(
    model: GPT, onnx_model: OnnxModel, path: Path, prompts: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Error of each quantized linear, and of the sum of the embeddings, against torch's, by name; 1
    is what rounding can explain.

    Rounding explains the error of a float32 sum and, if inputs are rounded, one level for every
    input on the edge between two levels, and the error of the kernel's offsets.

    Args:
        model: fake-quantized, in evaluation mode.
        onnx_model: its export.
        path: the graph of the export; a copy gets the linears' inputs and outputs as additional
            outputs.

    Returns:
        Error by name; empty for a model that is not quantized.
    """
    plan = model.config.quantization
    if plan is None:
        return {}
    rounded, graph = plan.activation_scales, onnx.load(path)
    tensors_by_linear = {
        name: _input_and_output(graph, name, name in rounded) for name in plan.linears
    }
    family = model.config.architecture
    if family.block_norms:
        first_norm = f"{family.block(0)}.{family.block_norms[0]}"
        embedded = next(node.input[0] for node in graph.graph.node if node.name == first_norm)
    else:
        first_linear = f"{family.block(0)}.{family.column('heads').name}"
        embedded, _ = _input_and_output(graph, first_linear, first_linear in rounded)
    watched = sorted(
        {embedded, *(x for pair in tensors_by_linear.values() for x in pair)} - {"logits"}
    )
    graph.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in watched
    )
    session = open_session(graph.SerializeToString(), torch.get_num_threads())
    errors = dict.fromkeys([*plan.linears, EMBEDDINGS], 0.0)
    for prompt in prompts:
        tokens, length = np.array([list(prompt)]), len(prompt)
        feeds = onnx_model.feeds(tokens, np.array([length]), np.arange(length)[None])
        tensors = [*watched, "logits"]
        seen = dict(zip(tensors, session.run(tensors, feeds), strict=True))
        for name, (source, result) in tensors_by_linear.items():
            error = _error(model, name, seen[source], seen[result])
            errors[name] = float(np.maximum(errors[name], error))  # NaN if either is
        expected = model.embed(torch.from_numpy(tokens))
        error = _relative(
            torch.from_numpy(seen[embedded]), expected, ROUNDING * expected.abs().max()
        )
        errors[EMBEDDINGS] = float(np.maximum(errors[EMBEDDINGS], error))
    return errors


def _error(model: GPT, name: str, x: NDArray[np.float32], outputs: NDArray[np.float32]) -> float:
    inputs = torch.from_numpy(x)
    observer: nn.Module | None
    if name == HEAD:
        observer, weight = model.head_input, model.output.table()
        expected = model.head(inputs)
    else:
        linear = model.get_submodule(name)
        assert isinstance(linear, FakeQuantLinear)
        observer, weight = linear.observer, linear.quantized(linear.weight)
        expected = linear(inputs)
    allowed = ROUNDING * expected.abs().max()
    if observer is not None:
        assert isinstance(observer, Observer | RoundGroups)
        allowed = allowed + _level_changes(inputs, observer, weight)
    if isinstance(observer, RoundGroups):
        allowed = allowed + kernel_rounding(inputs, weight, observer.size)
    allowed = allowed.broadcast_to(expected.shape)
    if model.config.architecture.is_fused(name):
        expected, allowed = (
            by_projection(part.movedim(-1, 0), model.config, name).movedim(0, -1)
            for part in (expected, allowed)
        )
    return _relative(torch.from_numpy(outputs), expected, allowed)


def _relative(found: Tensor, expected: Tensor, allowed: Tensor) -> float:
    """The largest error in units of the allowed one, which is 0 for a linear whose outputs are."""
    difference = (found - expected).abs()
    return float(torch.where(difference == 0, 0.0, difference / allowed).max())


def _level_changes(x: Tensor, observer: Observer | RoundGroups, weight: Tensor) -> Tensor:
    """(..., 1): the maximum change of outputs if every input x (..., in) on an edge between two
    levels rounds the other way."""
    if isinstance(observer, Observer):
        scales = torch.full_like(x, observer.scale)
    else:
        scales = activation_scales(split(x, observer.size)).repeat_interleave(observer.size, -1)
        scales = scales.flatten(-2)[..., : x.shape[-1]]  # without the padding of the last group
    levels = x / scales
    edges = ((levels - levels.floor() - 0.5).abs() < EDGE).to(x.dtype)
    return ((edges * scales) @ weight.abs().amax(0))[..., None]


def _input_and_output(graph: onnx.ModelProto, linear: str, is_rounded: bool) -> tuple[str, str]:
    """Names of a linear's input before rounding, and of its output."""
    made_by = {output: node for node in graph.graph.node for output in node.output}
    result = "logits" if linear == HEAD else linear
    if made_by[result].op_type == GROUPED:
        return made_by[result].input[0], result
    product = made_by.get(f"{linear}.matmul", made_by[result])  # the sum with a bias comes after
    if not is_rounded:
        return product.input[0], result
    rounded = made_by[product.input[0]]
    return made_by[rounded.input[0]].input[0], result
