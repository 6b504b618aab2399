"""GGUF, which llama.cpp, Ollama and LM Studio read.

A quantized linear keeps its integers: 4 bits become Q4_0, or Q4_1 with zero points, and 8 bits
Q8_0, whose blocks of 32 inputs have a scale in float16. Scales of Lathe's groups of 64 and 128, and
of whole rows, are repeated. The format cannot store static activation scales: llama.cpp quantizes
every block of 32 inputs with its own scale at run time. A layer whose inputs are not a multiple of
32 is dequantized to float16. Models whose layers differ in width use llama.cpp's architecture
`deci`, which is Llama with per-layer numbers of heads and channels.

Source of the blocks' layout: `ggml/src/ggml-common.h` of llama.cpp.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    dequantize,
)
from numpy.typing import NDArray
from torch import Tensor

from lathe.data.gguf_metadata import gguf_metadata
from lathe.data.gguf_tokenizer import PREFIX as TOKENIZER
from lathe.export.weight_formats import GGUF_BLOCK, storage, stored_matrices
from lathe.model.architecture import Rope
from lathe.model.block import frequencies
from lathe.model.checkpoint import Checkpoint
from lathe.model.config import GPTConfig
from lathe.model.families import GEMMA3, LLAMA, MISTRAL, QWEN3, SMOLLM3, STARCODER2
from lathe.model.gguf import (
    ALL_ENDS,
    END_KEYS,
    FAMILIES,
    PER_LAYER,
    ROPE_FACTORS,
    SAMPLING,
    SAMPLING_KEYS,
    family_in_gguf,
    halves,
    interleaved_rows,
    is_interleaved,
    names_in_gguf,
)
from lathe.model.gpt import GPT
from lathe.model.integer_weights import IntegerWeight
from lathe_base.errors import Code, UserError

log = logging.getLogger("lathe")

ENGINE = "llama.cpp"
FILE = "model.gguf"
LOCAL_THETA = 10_000.0
"""Rotary base of Gemma 3's sliding-window layers."""
ENDS_BY_TEXT = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>", "<|end_of_text|>"),
}
"""Tokens at which llama.cpp ends a text because of their texts, in versions since January 2025.
Source: `special_eog_ids` in its `src/llama-vocab.cpp`."""
HINT = "remove gguf from Export.formats"
WITH_HEAD_SIZE = (LLAMA, MISTRAL, QWEN3, SMOLLM3, GEMMA3)
"""Families whose heads need not add up to the hidden size in llama.cpp, as after pruning."""


def require(config: GPTConfig, folder: Path) -> None:
    """Raise UserError for a model that llama.cpp does not support."""
    if config.prefix_tokens:
        raise UserError(
            f"{folder}: has a prefix of {config.n_prefix} tokens, which GGUF does not support",
            "quantize its parent with Compress.Quantization.prefix=none",
            Code.UNSUPPORTED,
        )
    if reason := _unsupported(config):
        raise UserError(f"{folder}: {reason}", HINT, Code.UNSUPPORTED)


def _unsupported(config: GPTConfig) -> str | None:
    """Why GGUF does not support a model, or what llama.cpp would compute differently; None if
    nothing."""
    family, known = config.architecture, {*FAMILIES.values(), MISTRAL}
    if family not in known:
        titles = sorted(x.title for x in known)
        return f"is a {family.title} model, but GGUF supports only {', '.join(titles)}"
    window = min((kind.window for kind in config.kinds if kind.window), default=None)
    if window and family is not GEMMA3 and window < config.n_positions:
        return f"llama.cpp does not support its attention window of {window} tokens"
    scaling = config.rope.scaling if config.rope else None
    if scaling is not None and scaling.rope_type not in ("linear", "llama3"):
        return f"rope_type is {scaling.rope_type}, but GGUF supports only linear and llama3"
    if not config.has_equal_layers and family not in (LLAMA, MISTRAL):
        both = f"{LLAMA.title} and {MISTRAL.title}"
        return f"its layers differ in width, which llama.cpp supports only in {both}"
    heads = config.widths("heads")[0]
    if heads != config.n_embd and family not in WITH_HEAD_SIZE:
        return (
            f"its query heads have {heads} features together and its hidden states "
            f"{config.n_embd}, which llama.cpp does not support in {family.title} models"
        )
    # The file does not state these: llama.cpp assumes them for the whole family.
    partial, kinds = config.rope.partial_rotary_factor if config.rope else 1, config.kinds
    if partial < 1 and not family.rotates_part:
        return f"partial_rotary_factor is {partial:g}, which llama.cpp does not support here"
    if family is GEMMA3:
        if any(bool(kind.window) != bool((i + 1) % 6) for i, kind in enumerate(kinds)):
            return "full attention is not in exactly every sixth layer"
        if config.score_scale != config.head_dim**-0.5:
            return "query_pre_attn_scalar is not the head size"
        if any(kind.window and kind.rope != Rope(LOCAL_THETA) for kind in kinds):
            return f"rope_local_base_freq is not {LOCAL_THETA:g}"
    if family is SMOLLM3 and any(bool(x.rope) != bool((i + 1) % 4) for i, x in enumerate(kinds)):
        return "positions are not omitted in exactly every fourth layer"
    if family is STARCODER2 and len(config.biased) < len(family.linears):
        return "its linears have no biases"
    return None


def written(model: GPT, folder: Path) -> GPT:
    """The model itself: layers may differ in width."""
    return model


def write(checkpoint: Checkpoint, folder: Path, dtype: str) -> list[str]:
    """Write `model.gguf`; returns the names of the files.

    Args:
        dtype: float32 or float16, for matrices that are not quantized; vectors are always float32.

    Raises:
        UserError: llama.cpp does not support the model or tokenizer.
    """
    model = checkpoint.model
    config, source = model.config, str(checkpoint.folder)
    require(config, checkpoint.folder)
    family = family_in_gguf(config)
    name = next(name for name, known in FAMILIES.items() if known is family)
    writer = GGUFWriter(folder / FILE, name if config.has_equal_layers else PER_LAYER)
    _add_sizes(writer, config)
    for key, value in gguf_metadata(checkpoint.tokenizer, config.vocab_size, source).items():
        # The types that llama.cpp expects; a boolean is an integer in Python, and asked first.
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    _add_ends(writer, checkpoint)
    sampling = config.sampling.for_requests()  # greedy is a temperature of 0, as in llama.cpp
    for key, parameter in SAMPLING_KEYS.items():
        if parameter in sampling:
            add = writer.add_int32 if parameter == "top_k" else writer.add_float32
            add(SAMPLING + key, sampling[parameter])
    if config.chat_template:
        writer.add_chat_template(config.chat_template)
    writer.add_quantization_version(2)  # GGML_QNT_VERSION
    wide, kinds = [], Counter[GGMLQuantizationType]()
    for name, kind, data in _tensors(checkpoint, dtype):
        if kind is None:
            wide.append(name)
            kind = GGMLQuantizationType.F16
        if data.ndim > 1:
            kinds[kind] += 1
        writer.add_tensor(name, data, raw_dtype=kind)
    if wide:
        words = "%d matrices, such as %s, are float16 in %s: their inputs are not a multiple of %d"
        log.warning(words, len(wide), wide[0], FILE, GGUF_BLOCK)
    # A file has one type in its metadata: that of most matrices.
    (commonest, _), *_ = kinds.most_common(1)
    is_float = commonest == GGMLQuantizationType.F32
    writer.add_file_type(LlamaFileType["ALL_F32" if is_float else f"MOSTLY_{commonest.name}"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [FILE]


def _add_ends(writer: GGUFWriter, checkpoint: Checkpoint) -> None:
    """Write the tokens that end a text: three under llama.cpp's keys, preferably those that it does
    not recognize by their texts, and all of them for Ollama."""
    first, *others = dict.fromkeys((*checkpoint.model.config.end_ids, checkpoint.eos_id))
    texts = {token: checkpoint.tokenizer.id_to_token(token) for token in others}
    others.sort(key=lambda token: texts[token] in ENDS_BY_TEXT)  # those last
    for key, token in zip(END_KEYS, (first, *others), strict=False):
        writer.add_uint32(f"{TOKENIZER}{key}", token)
    if others:
        writer.add_array(f"{TOKENIZER}{ALL_ENDS}", [first, *others])
    beyond = others[len(END_KEYS) - 1 :]
    if lost := [str(texts[token]) for token in beyond if texts[token] not in ENDS_BY_TEXT]:
        log.warning(
            "%s: %s end a text too, but llama.cpp reads only %d such tokens: give them to it as "
            "stop strings",
            *(FILE, ", ".join(lost), len(END_KEYS)),
        )


def _add_sizes(writer: GGUFWriter, config: GPTConfig) -> None:
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_vocab_size(config.vocab_size)
    for add, sizes in (
        (writer.add_feed_forward_length, config.n_inner),
        (writer.add_head_count, config.n_head),
        *([(writer.add_head_count_kv, config.n_kv_head)] if config.rope else []),
    ):
        # The architecture `deci` has a number for each layer.
        add(sizes[0] if config.has_equal_layers else list(sizes))
    if config.architecture.norm == "layer_norm":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    if config.rope is None:
        return
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rope.n_rotated(config.head_dim))
    writer.add_rope_freq_base(config.rope.theta)
    window = next((kind.window for kind in config.kinds if kind.window), None)
    if window and config.architecture is GEMMA3:
        writer.add_sliding_window(window)
    scaling = config.rope.scaling
    if scaling is not None and scaling.rope_type == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    elif scaling is not None:
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)


def _tensors(
    checkpoint: Checkpoint, dtype: str
) -> Iterator[tuple[str, GGMLQuantizationType | None, NDArray[Any]]]:
    """Name, type and data of every tensor; the type is None if the width is not a multiple of a
    block."""
    config, family = checkpoint.model.config, checkpoint.model.config.architecture
    names = {lathe_name: theirs for theirs, lathe_name in names_in_gguf(config).items()}
    for name, tensor in stored_matrices(checkpoint.model):
        stored = tensor
        if isinstance(tensor, Tensor) and family.norm_offset and family.is_norm(name):
            stored = tensor + family.norm_offset
        if is_interleaved(config, name):
            if isinstance(tensor, IntegerWeight):
                rows = interleaved_rows(len(tensor.values), config.head_dim)
                stored = tensor.rows(torch.from_numpy(rows))
            else:
                stored = tensor[torch.from_numpy(interleaved_rows(len(tensor), config.head_dim))]
        if isinstance(stored, IntegerWeight):
            yield names[name], *storage(stored.fmt).to_gguf(stored)
        elif stored.dim() > 1 and dtype == "float16":
            yield names[name], GGMLQuantizationType.F16, stored.half().numpy()
        else:
            yield names[name], GGMLQuantizationType.F32, stored.float().numpy()
    rope = config.rope
    if rope is not None and rope.scaling is not None and rope.scaling.rope_type == "llama3":
        ropes = replace(rope, scaling=None), rope
        plain, scaled = (frequencies(x, config.head_dim) for x in ropes)
        yield ROPE_FACTORS, GGMLQuantizationType.F32, (plain / scaled).float().numpy()


def read(folder: Path, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `model.gguf`, dequantized to float32 by the package `gguf`."""
    names, family = names_in_gguf(config), config.architecture
    for tensor in GGUFReader(folder / FILE).tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name = names[tensor.name]
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if is_interleaved(config, name):
            array = halves(array, config.head_dim)
        if family.norm_offset and family.is_norm(name):
            array = array - np.float32(family.norm_offset)
        yield name, torch.from_numpy(array)
