"""Exports a checkpoint as Paddle's static model and as paddle2onnx's graph, and proves both.

These files are for users of Paddle Inference. Lathe itself serves the graph with a KV cache that
`lathe.export` writes from the same checkpoint; it is compared with Paddle's logits too.

paddle2onnx 1.2.6 writes the erf GELU instead of the tanh one, keeps int8 weights as floats before a
QuantizeLinear, and loses the fake quantization of an embedding and of a head that is its transpose.
`convert` corrects its graph.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped]
import paddle
import paddle2onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from paddle.static import InputSpec

from lathe.export.prompts import held_out_prompts
from lathe.model.architecture import HEAD
from lathe.model.quantization import INT8
from lathe_base.artifacts.kinds import PADDLE_EXPORT
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, StageError
from lathe_base.storage import atomic_folder
from lathe_paddle import fake_quant
from lathe_paddle.checkpoint import Arrays, float_weights, load_checkpoint, set_weights
from lathe_paddle.environment import VERSIONS
from lathe_paddle.gpt import GPT
from lathe_serving.runtime.session import OnnxModel

log = logging.getLogger("lathe")

NAME = "model"
OPSET = 13
METADATA = PADDLE_EXPORT.metadata_file
# Limits of the mean error of logits. In float, relative to their standard deviation: correct graphs
# measure 3e-7, one with erf GELU 1.4e-4. In INT8, relative to the change that quantization made;
# see `lathe.export.proof`.
NOISE = 1e-5
QUANTIZATION_SHARE = 1.5

Logits = NDArray[np.float32]  # (T, V) of a prompt
Run = Callable[[NDArray[np.int64]], Logits]


class PaddleProofError(StageError):
    """A file does not compute what the checkpoint computes."""


@dataclass(frozen=True)
class LogitDifference:
    """Error of logits against those of the checkpoint in Paddle."""

    max_error: float
    mean_error: float
    mean_limit: float
    argmax_agreement: float


def export(
    recipe: Recipe, model: Path, data: Path, output: Path, served: Path | None = None
) -> dict[str, Any]:
    """Write `model.pdmodel`, `model.pdiparams`, `model.onnx` and `paddle.json`, the proof.

    Args:
        served: an export folder of the same checkpoint, to compare with.

    Raises:
        PaddleProofError: a file's logits differ from the checkpoint's, or paddle2onnx lost
            quantized MatMuls.
    """
    paddle.set_device("cpu")
    checkpoint = load_checkpoint(model)
    config = checkpoint.model.config
    plan, weights = config.quantization, float_weights(checkpoint.model)
    prompts = held_out_prompts(
        checkpoint.tokenizer, data, recipe.Export.prompts, config.n_positions
    )
    in_float = [_dygraph(checkpoint.model)(_row(prompt)) for prompt in prompts]
    net, qat = _build(weights, config, model)
    reference = [_dygraph(net)(_row(prompt)) for prompt in prompts]

    def compare(name: str, run: Run) -> LogitDifference:
        logits = [run(_row(prompt)) for prompt in prompts]
        return _compare(name, logits, reference, in_float if plan else None)

    with atomic_folder(output, PADDLE_EXPORT) as work:
        _save(net, qat, work / NAME)
        differences = {"paddle.inference": compare("model.pdmodel", _inference(work / NAME))}
        graph = _onnx(weights, config, model)
        wanted = len(plan.linears) if plan else 0
        if (count := count_quantized(graph)) != wanted:
            raise PaddleProofError(
                f"paddle2onnx's graph has {count} quantized MatMuls, but the plan has {wanted}",
                Code.NOT_PROVED,
            )
        onnx.save(graph, str(work / f"{NAME}.onnx"))
        differences["paddle2onnx"] = compare("model.onnx", _onnxruntime(work / f"{NAME}.onnx"))
        if served is not None:
            served_model = OnnxModel(served)
            differences["served"] = compare(
                "the served graph", lambda row: served_model.logits(row)[0]
            )
        metadata = {
            "source": checkpoint.digest,
            "versions": {package: wanted for package, (wanted, _) in VERSIONS.items()},
            "quantized_matmuls": wanted,
            "differences": {name: asdict(difference) for name, difference in differences.items()},
        }
        (work / METADATA).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    for name, difference in differences.items():
        log.info(
            "%s: logits within %.2g of Paddle's (mean %.2g), argmax the same at %.1f %%",
            *(name, difference.max_error, difference.mean_error, 100 * difference.argmax_agreement),
        )
    return metadata


def _build(weights: Arrays, config: Any, source: Path) -> tuple[GPT, Any]:
    """The model, and if it has a plan, its fake quantization and PaddleSlim's QAT."""
    net = GPT(replace(config, quantization=None))
    set_weights(net, weights, source)
    qat = fake_quant.insert(net, config.quantization) if config.quantization else None
    net.eval()
    _dygraph(net)(_row([0]))  # a forward pass sets the scales of the weights
    return net, qat


def _save(net: GPT, qat: Any, path: Path) -> None:
    spec = [InputSpec([None, None], "int64", "tokens")]
    if qat is None:
        paddle.jit.save(net, str(path), input_spec=spec)
    else:
        # In its own scope, because its passes look up variables by names that recur.
        with paddle.static.scope_guard(paddle.static.Scope()):
            qat.save_quantized_model(net, str(path), spec)
    paddle.disable_static()  # saving a quantized model leaves it on


def _onnx(weights: Arrays, config: Any, source: Path) -> Any:
    """paddle2onnx's graph. paddle2onnx would lose the quantization of the embedding and the head,
    so they are converted in float and quantized afterwards."""
    plan = config.quantization
    table = head = None
    if plan is not None:
        head = plan.activation_scales.get(HEAD)
        linears = plan.part(plan.linears.keys() - {HEAD})
        if plan.quantize_embedding:
            net, _ = _build(weights, config, source)
            table = net.table().numpy()
            weights = weights | {config.architecture.table: table}
        config = replace(config, quantization=linears if linears.linears else None)
    with TemporaryDirectory(prefix="lathe-paddle-") as scratch:
        _save(*_build(weights, config, source), Path(scratch) / NAME)
        return convert(Path(scratch) / NAME, head, table)


def _row(prompt: Sequence[int]) -> NDArray[np.int64]:
    return np.array([list(prompt)], np.int64)


def _dygraph(net: GPT) -> Run:
    def run(row: NDArray[np.int64]) -> Logits:
        with paddle.no_grad():
            return net(paddle.to_tensor(row)).numpy()[0]

    return run


def _inference(path: Path) -> Run:
    from paddle import inference

    settings = inference.Config(f"{path}.pdmodel", f"{path}.pdiparams")
    settings.disable_glog_info()
    predictor = inference.create_predictor(settings)

    def run(row: NDArray[np.int64]) -> Logits:
        predictor.get_input_handle(predictor.get_input_names()[0]).copy_from_cpu(row)
        predictor.run()
        return predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()[0]

    return run


def _onnxruntime(path: Path) -> Run:
    options = ort.SessionOptions()
    # As the graph is written: on an x86 without VNNI the fused integer kernel overflows.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(row: NDArray[np.int64]) -> Logits:
        return session.run(None, {name: row})[0][0]

    return run


def _compare(
    name: str, actual: list[Logits], reference: list[Logits], in_float: list[Logits] | None
) -> LogitDifference:
    """Compare logits; raises ProofError if the mean error is above its limit."""
    ours, theirs = np.concatenate(actual), np.concatenate(reference)  # (sum of T, V)
    error = np.abs(ours - theirs)
    if in_float is None:
        limit = NOISE * float(theirs.std())
    else:
        limit = QUANTIZATION_SHARE * float(np.abs(np.concatenate(in_float) - theirs).mean())
    difference = LogitDifference(
        max_error=float(error.max()),
        mean_error=float(error.mean()),
        mean_limit=limit,
        argmax_agreement=float((ours.argmax(1) == theirs.argmax(1)).mean()),
    )
    if not difference.mean_error <= limit:
        raise PaddleProofError(
            f"{name}: logits differ from Paddle's by {difference.mean_error:.3g} on average "
            f"(limit {limit:.3g}) and by {difference.max_error:.3g} at most",
            Code.NOT_PROVED,
        )
    return difference


def convert(static: Path, head_scale: float | None, table: NDArray[np.float32] | None) -> Any:
    """The ONNX model of a static Paddle model.

    Args:
        static: path of the `.pdmodel` without its suffix; the embedding and the head are float.
        head_scale: scale of the head's input, if that is quantized.
        table: the embedding (V, C) on its int8 grid, one scale per row, if it is quantized.

    Raises:
        StageError: the result is not a valid graph.
    """
    text = paddle2onnx.export(
        f"{static}.pdmodel", f"{static}.pdiparams", opset_version=OPSET, verbose=False
    )
    graph = _PaddleGraph(onnx.load_from_string(text))
    graph.fix_gelu()
    graph.fold_weights()
    if table is not None:
        graph.quantize_table(table)
    if head_scale is not None:
        graph.quantize_head(head_scale)
    return graph.finish()


def count_quantized(model: Any) -> int:
    """MatMuls whose two inputs are both dequantized integers."""
    made = {name: node for node in model.graph.node for name in node.output}

    def is_integer(name: str) -> bool:
        while name in made and made[name].op_type in ("Transpose", "Identity"):
            name = made[name].input[0]
        return name in made and made[name].op_type == "DequantizeLinear"

    matmuls = [node for node in model.graph.node if node.op_type == "MatMul"]
    return sum(all(map(is_integer, node.input)) for node in matmuls)


class _PaddleGraph:
    """Nodes in order, and the constants among their inputs as arrays."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.nodes = [n for n in model.graph.node if n.op_type != "Constant"]
        self.constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant":
                self.constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)

    def fix_gelu(self) -> None:
        """0.5 x (1 + erf(x / sqrt 2)) -> 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
        made = {name: node for node in self.nodes for name in node.output}
        for node in [n for n in self.nodes if n.op_type == "Erf"]:
            x, argument = made[node.input[0]].input[0], node.output[0]
            inner = [
                ("Mul", [x, x], "square"),
                ("Mul", [f"{argument}.square", self._scalar(0.044715)], "scaled"),
                ("Add", [f"{argument}.scaled", self._scalar(1.0)], "sum"),
                ("Mul", [f"{argument}.sum", x], "cubic"),
                ("Mul", [f"{argument}.cubic", self._scalar((2 / np.pi) ** 0.5)], "argument"),
            ]
            at = self.nodes.index(node)
            self.nodes[at : at + 1] = [
                *(helper.make_node(op, ins, [f"{argument}.{name}"]) for op, ins, name in inner),
                helper.make_node("Tanh", [f"{argument}.argument"], [argument]),
            ]

    def fold_weights(self) -> None:
        """QuantizeLinear of a constant -> its integers."""
        for node in [n for n in self.nodes if n.op_type == "QuantizeLinear"]:
            if node.input[0] not in self.constants:
                continue
            weight, scale = (self.constants[name] for name in node.input[:2])
            axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
            if scale.size > 1:
                scale = scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
            integers = np.clip(np.rint(weight / scale), -INT8.levels, INT8.levels).astype(np.int8)
            self.constants[node.output[0]] = integers
            self.nodes.remove(node)

    def quantize_table(self, table: NDArray[np.float32]) -> None:
        """The float embedding -> DequantizeLinear of integers, one scale per row."""
        name = next(n for n, array in self.constants.items() if array.shape == table.shape)
        scale = np.abs(table).max(1) / INT8.levels
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        self.constants |= {
            f"{name}.int8": np.rint(self.constants.pop(name) / scale[:, None]).astype(np.int8),
            f"{name}.scale": scale,
            f"{name}.zero": np.zeros(len(table), np.int8),
        }
        inputs = [f"{name}.{part}" for part in ("int8", "scale", "zero")]
        self.nodes.insert(0, helper.make_node("DequantizeLinear", inputs, [name], axis=0))

    def quantize_head(self, scale: float) -> None:
        """Quantize the input of the last MatMul to int8 and back."""
        head = [node for node in self.nodes if node.op_type == "MatMul"][-1]
        x = head.input[0]
        step, zero = self._scalar(scale), self._constant("head.zero", np.zeros((), np.int8))
        at = self.nodes.index(head)
        self.nodes[at:at] = [
            helper.make_node("QuantizeLinear", [x, step, zero], [f"{x}.int8"]),
            helper.make_node("DequantizeLinear", [f"{x}.int8", step, zero], [f"{x}.read"]),
        ]
        head.input[0] = f"{x}.read"

    def finish(self) -> Any:
        """The model with these nodes and the constants that they use, checked.

        Raises:
            StageError: it is not a valid graph.
        """
        used = {name for node in self.nodes for name in node.input}
        graph = self.model.graph
        del graph.node[:], graph.initializer[:], graph.value_info[:]
        graph.node.extend(self.nodes)
        graph.initializer.extend(
            numpy_helper.from_array(array, name)
            for name, array in self.constants.items()
            if name in used
        )
        try:
            onnx.checker.check_model(self.model, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise StageError(
                f"paddle2onnx's graph is not valid: {error}", Code.NOT_PROVED
            ) from error
        return self.model

    def _scalar(self, value: float) -> str:
        return self._constant(f"scalar.{value!r}", np.array(value, np.float32))

    def _constant(self, name: str, value: NDArray[Any]) -> str:
        self.constants[name] = value
        return name
