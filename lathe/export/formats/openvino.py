"""OpenVINO's intermediate representation (IR), which OpenVINO GenAI and OpenVINO Model Server load.

It is the export's ONNX graph in OpenVINO's operators, with the inputs that both expect:
`input_ids`, `attention_mask` and `position_ids` (B, T), `beam_idx` (B,). Keys and values are states
of the model; OpenVINO GenAI turns its attention into paged attention when it loads it. Weights keep
their integers. OpenVINO's kernel rounds the inputs of linears with group scales; a runtime option
in the file sets the group size. Tokenizer and detokenizer are separate models with operators of the
package `openvino_tokenizers`.

Shapes: B batch, T new tokens, S all tokens, H heads, G key-value heads, D head size.

Source of the layout: `optimum-intel`, `exporters/openvino`.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import openvino
import torch
from openvino import Model, Node, Output, PartialShape, Type
from openvino import opset15 as ops
from openvino.op.util import Variable, VariableInfo
from openvino_tokenizers import convert_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lathe.export.formats.compressed_tensors import write_configuration
from lathe.export.weight_formats import stored_matrices
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import Checkpoint, fused_rows, join_rows
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.model.integer_weights import IntegerWeight
from lathe_base.errors import Code, StageError, UserError
from lathe_serving.runtime.exported_model import MODEL
from lathe_serving.runtime.openvino_graph import Heads, Translator, Value, is_lookup, rotated

ENGINE = "openvino-genai"
FOLDER = "openvino"
FILE = "openvino_model.xml"
HINT = "remove openvino from Export.formats"


def require(config: GPTConfig, folder: Path) -> None:
    """Raise UserError for a model that OpenVINO GenAI does not support."""
    if config.prefix_tokens:
        raise UserError(
            f"{folder}: has a prefix of {config.n_prefix} tokens, which OpenVINO GenAI does "
            "not support",
            "quantize its parent with Compress.Quantization.prefix=none",
            Code.UNSUPPORTED,
        )
    windows = [kind.window for kind in config.kinds if kind.window]
    if windows and min(windows) < config.n_positions:
        raise UserError(
            f"{folder}: attention has a window of {min(windows)} tokens, which OpenVINO GenAI's "
            "paged attention does not read from the file",
            HINT,
            Code.UNSUPPORTED,
        )


def written(model: GPT, folder: Path) -> GPT:
    """The model itself: layers may differ in width."""
    return model


def write(checkpoint: Checkpoint, folder: Path, dtype: str) -> list[str]:
    """Write the folder `openvino` from the export's `model.onnx`; returns the names of its files.

    Args:
        dtype: ignored: tensors that are not quantized are float32.

    Raises:
        UserError: OpenVINO does not support the model or tokenizer.
    """
    config = checkpoint.model.config
    require(config, checkpoint.folder)
    target = folder / FOLDER
    target.mkdir()
    translator = _StatefulTranslator(onnx.load(folder / MODEL).graph, config)
    model = translator.model()
    group = ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]
    model.set_rt_info(str(translator.group), group)
    openvino.save_model(model, target / FILE, compress_to_fp16=False)
    for kind, part in zip(("tokenizer", "detokenizer"), _tokenizer(checkpoint), strict=True):
        openvino.save_model(part, target / f"openvino_{kind}.xml", compress_to_fp16=False)
    write_configuration(checkpoint, checkpoint.model.config, target, dtype="float32")
    return sorted(f"{FOLDER}/{file.name}" for file in target.iterdir())


def _tokenizer(checkpoint: Checkpoint) -> tuple[Model, Model]:
    """Models of the tokenizer and the detokenizer."""
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.single_word:  # which openvino_tokenizers ignores
            raise UserError(
                f"{checkpoint.folder}: its tokenizer's added token {token.content!r} has "
                "single_word, which OpenVINO does not support",
                f'set "single_word": false for it in tokenizer.json before training, or {HINT}',
                Code.UNSUPPORTED,
            )
    model = json.loads(tokenizer.to_str())["model"]
    if model["type"] == "Unigram" and model["byte_fallback"]:  # which openvino_tokenizers ignores
        raise UserError(
            f"{checkpoint.folder}: its Unigram tokenizer has byte_fallback, which OpenVINO does "
            "not support",
            HINT,
            Code.UNSUPPORTED,
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()),  # which it changes
        eos_token=tokenizer.id_to_token(checkpoint.end_ids[-1]),
        chat_template=config.chat_template or None,
    )
    try:
        made: tuple[Model, Model] = convert_tokenizer(wrapped, with_detokenizer=True)
    except Exception as error:
        raise UserError(
            f"{checkpoint.folder}: openvino_tokenizers cannot convert its tokenizer: "
            f"{str(error).splitlines()[0]}",
            HINT,
            Code.UNSUPPORTED,
        ) from error
    return made


def read(folder: Path, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the IR, dequantized to float32 by OpenVINO."""
    core = openvino.Core()
    nodes = {x.get_friendly_name(): x for x in core.read_model(folder / FOLDER / FILE).get_ops()}
    with torch.device("meta"):
        model = GPT(config.with_quantization(None))
    tensors = {}
    for name, wanted in model.state_dict().items():
        if name not in nodes:
            raise StageError(f"{FILE}: has no {name}", Code.FAILED)
        if nodes[name].get_type_name() == "Constant":  # in float
            array = nodes[name].data
        else:
            # A model of this node alone: OpenVINO dequantizes the weight as it would to compute.
            part = Model([ops.result(nodes[name].output(0))], [])
            exact = {"INFERENCE_PRECISION_HINT": "f32"}
            (array,) = core.compile_model(part, "CPU", exact)([]).values()
        if f"{name}_scale" in nodes:  # of a table of integers, rows of which are looked up
            array = array * nodes[f"{name}_scale"].data[:, None]
        # Without the padding of the last group.
        rows = torch.from_numpy(np.array(array, np.float32))[tuple(slice(n) for n in wanted.shape)]
        if fused := fused_rows(config, name):
            rows = join_rows(torch.split(rows, fused[1]), fused[0])
        tensors[name] = rows
    model.load_state_dict(tensors, assign=True)
    for name, tensor in stored_matrices(model):
        assert not isinstance(tensor, IntegerWeight)
        yield name, tensor


class _StatefulTranslator(Translator):
    """Translates the graph with keys and values as states. Parameters have the model's names, by
    which `read` finds them."""

    def __init__(self, graph: onnx.GraphProto, config: GPTConfig) -> None:
        super().__init__(graph)
        self.family = config.architecture
        for name, x in self.values.items():
            if isinstance(x, np.ndarray) and x.dtype == np.float16:
                self.values[name] = x.astype(np.float32)
        for name in ("input_ids", "attention_mask", "position_ids"):
            self.values[name] = self.input(name, Type.i64, -1, -1)
        self.beams = self.input("beam_idx", Type.i32, -1)
        self.mask = self._mask()
        self.shared: dict[str, Output] = {}
        # All positions have logits. Angles of rotary positions are computed, since a table of
        # many positions would be larger than many a model.
        self.values["logits_index"] = np.zeros((1, 1), np.int64)

    def translated(self, node: onnx.NodeProto) -> Value:
        match node.op_type:
            case "GatherND":
                return self.values[node.input[0]]
            case "Range":
                return self.values["position_ids"]
            case "Cos":
                return ops.cos(*self.given(node)).output(0)
            case "Sin":
                return ops.sin(*self.given(node)).output(0)
            case "GatherBlockQuantized":
                ids = self.output(node.input[1])
                return ops.gather(self.grouped_weight(node), ids, np.int64(0)).output(0)
        return super().translated(node)

    def weight(self, node: onnx.NodeProto) -> Output:
        return self._named(super().weight(node), node)

    def grouped_weight(self, node: onnx.NodeProto) -> Output:
        scale = node.input[2]
        if scale not in self.shared:  # with the other use of a tied embedding
            self.shared[scale] = self._named(super().grouped_weight(node), node)
        return self.shared[scale]

    def _named(self, weight: Output, node: onnx.NodeProto) -> Output:
        name = node.output[0].removesuffix(".matmul")
        linear = name if self.family.find_linear(name) else HEAD
        weight_name = self.family.table if is_lookup(node) else f"{linear}.weight"
        weight.get_node().set_friendly_name(weight_name)
        return weight

    def attend(self, qkv: Output, heads: Heads, rotary: list[str]) -> Output:
        parts = ops.variadic_split(qkv, np.int64(2), np.array(heads.widths)).outputs()
        apart = np.array([0, 0, -1, heads.head_dim])
        query, key, value = (ops.reshape(part, apart, True).output(0) for part in parts)
        if rotary:
            angles = [ops.unsqueeze(self.output(x), np.array([2])).output(0) for x in rotary]
            query, key = (rotated(x, heads.head_dim, *angles) for x in (query, key))
        by_head = np.array([0, 2, 1, 3])  # (B, T, H, D) -> (B, H, T, D), and back
        query, key, value = (ops.transpose(x, by_head).output(0) for x in (query, key, value))
        attended = ops.scaled_dot_product_attention(
            query,
            self._for_each_query(self._with_past(f"key.{heads.layer}", key, heads), heads),
            self._for_each_query(self._with_past(f"value.{heads.layer}", value, heads), heads),
            self.mask,
            np.float32(heads.scale),
        )
        together = np.array([0, 0, heads.widths[0]])
        return ops.reshape(ops.transpose(attended, by_head), together, True).output(0)

    def _with_past(self, name: str, x: Output, heads: Heads) -> Output:
        """Keys or values (B, G, S, D): the state, reordered by the beams, with the new ones, x,
        appended."""
        info = VariableInfo()
        info.data_shape = PartialShape([-1, heads.n_kv_head, -1, heads.head_dim])
        info.data_type, info.variable_id = Type.f32, name
        variable = Variable(info)
        rows = ops.unsqueeze(_size(self.output("input_ids"), 0), np.int64(0))
        empty = ops.concat([rows, np.array([heads.n_kv_head, 0, heads.head_dim])], 0)
        past = ops.read_value(ops.broadcast(np.float32(0), empty), variable)
        present = ops.concat([ops.gather(past, self.beams, np.int64(0)), x], 2)
        self.sinks.append(ops.assign(present, variable))
        return present.output(0)

    def _for_each_query(self, x: Output, heads: Heads) -> Output:
        """(B, G, S, D) -> (B, H, S, D), with the operators that OpenVINO recognizes as
        grouped-query attention."""
        if heads.n_kv_head == heads.n_head:
            return x
        times = np.array([1, 1, heads.n_head // heads.n_kv_head, 1, 1])
        apart = ops.unsqueeze(x, np.int64(2))
        wide = ops.broadcast(apart, times, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, np.array([0, heads.n_head, -1, heads.head_dim]), True).output(0)

    def _mask(self) -> Output:
        """(B, 1, T, S), true where a token may attend to another. Padding attends to itself,
        because a row without any would become NaN."""
        known = self.output("attention_mask")
        total = _size(known, 1)
        first = ops.subtract(total, _size(self.output("input_ids"), 1))
        columns = ops.range(np.int64(0), total, np.int64(1), "i64")
        rows = ops.unsqueeze(ops.range(first, total, np.int64(1), "i64"), np.int64(1))
        is_token = ops.unsqueeze(ops.not_equal(known, np.int64(0)), np.array([1, 2]))
        seen = ops.logical_or(is_token, ops.equal(columns, rows))
        return ops.logical_and(ops.less_equal(columns, rows), seen).output(0)


def _size(x: Output, axis: int) -> Node:
    return ops.gather(ops.shape_of(x), np.int64(axis), np.int64(0))
