"""Converts llama.cpp's GGUF files to checkpoint folders, without torch.

A GGUF file has one model: metadata (sizes, tokenizer, chat template) and tensors, most of them
quantized in blocks, which the package `gguf` turns back into float32. Names are llama.cpp's,
linears are (out, in) in every family, and the rows of Llama's and SmolLM3's queries and keys are
interleaved: feature i of a head is followed by feature i + head_dim / 2, with which it is rotated.
Norm weights include the offset that Gemma 3's Hugging Face files omit.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFEndian,
    GGUFReader,
    GGUFValueType,
    ReaderField,
    ReaderTensor,
    dequantize,
    get_tensor_name_map,
)
from numpy.typing import NDArray

from lathe.data.chat_template import define_tokens, sample_chat
from lathe.data.gguf_tokenizer import PREFIX as TOKENIZER
from lathe.data.gguf_tokenizer import tokenizer_from_gguf
from lathe.data.tokenizer import EOS, OTHER_ENDS, end_token, vocab_size
from lathe.model.architecture import SCALING_KEYS, Architecture, Rope, RopeScaling
from lathe.model.config import GPTConfig
from lathe.model.families import ARCHITECTURES, GEMMA3, LLAMA, MISTRAL, SMOLLM3
from lathe.model.folder import non_finite, require_fit, write_imported
from lathe_base.artifacts.kinds import CHECKPOINT
from lathe_base.artifacts.sampling import SamplingDefaults, sampling_defaults
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError, explain_os_error
from lathe_base.provenance.step import attested
from lathe_base.storage import claim_output_folder

KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.head_count_kv": "n_kv_head",
    "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
}
"""Key below the architecture's name -> name in `GPTConfig`."""
OTHER_KEYS = {
    *("vocab_size", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.finetuned", "expert_count", "expert_used_count"),
}
ARCHITECTURE = "general.architecture"
PER_LAYER = "deci"
"""llama.cpp's name for Llama with per-layer widths."""
FAMILIES = {
    **{name: x for name, x in ARCHITECTURES.items() if name in MODEL_ARCH_NAMES.values()},
    "gemma3": GEMMA3,
    PER_LAYER: LLAMA,
}
"""llama.cpp's name -> the family, under its usual name first."""
INTERLEAVED = (LLAMA, SMOLLM3)
"""Families with interleaved rows of queries and keys."""
WIDTHS = ("n_head", "n_kv_head", "n_inner")
"""Sizes that may differ between the layers of `PER_LAYER`."""
WINDOW, ROTATED = "attention.sliding_window", "rope.dimension_count"
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the divisors of Llama 3.1's frequencies."""
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ALL_ENDS = "eos_token_ids"
"""The key with all end tokens, which Ollama reads."""
SAMPLING = "general.sampling."
SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Key of a recommended sampling parameter -> its name in `SamplingDefaults`."""
HINT = "copy the file again, or convert the model again with llama.cpp's convert_hf_to_gguf.py"
OTHER = "give a Hugging Face folder of the model"
MAX_NAME_BYTES, MAX_DIMS = 63, 4
"""Limits of llama.cpp: `GGML_MAX_NAME` (with a zero byte) and `GGML_MAX_DIMS`."""
COPY_DISTANCE = 0.2
"""Largest relative distance of a tied head from its embedding, which may be quantized differently:
two independent matrices are more than 1 apart."""

Arrays = dict[str, NDArray[np.float32]]


@attested("import", "source")
def import_gguf(recipe: Recipe, source: Path, output: Path) -> GPTConfig:
    """Write a checkpoint folder from a GGUF file, with float32 weights; quantized tensors are
    dequantized, which does not restore precision lost to quantization.

    Raises:
        UserError: a broken or truncated file, an unsupported architecture, tokenizer or tensor
            type, or tensors that do not match the metadata.
    """
    claim_output_folder(output, CHECKPOINT, source)
    metadata, tensors = _read(source)
    tokenizer = tokenizer_from_gguf(metadata, str(source))
    config = _config(metadata, tensors, source)
    if (size := vocab_size(tokenizer)) > config.vocab_size:
        raise UserError(
            f"{source}: the tokenizer has {size} ids, the embedding {config.vocab_size}",
            HINT,
            Code.WRONG_TOKENIZER,
        )
    if wrong := [i for i in config.end_ids if i >= config.vocab_size]:
        raise UserError(
            f"{source}: a text ends with id {wrong[0]}, which no token has", HINT, Code.MALFORMED
        )
    if end_token(tokenizer) is None:
        raise UserError(
            f"{source}: the tokenizer has no token {EOS}",
            f"{', '.join(OTHER_ENDS)} are accepted too, as control tokens: {OTHER}",
            Code.INCOMPLETE,
        )
    weights = dict(_weights(tensors, config, source))
    write_imported(output, weights, config, tokenizer, recipe, "gguf")
    return config


def _read(path: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Metadata and tensors; the tensors' data stay in the file."""
    if not path.is_file():
        raise UserError(
            f"{path}: no such file", "give a file whose name ends in .gguf", Code.NOT_FOUND
        )
    try:
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        for name, field in reader.fields.items():
            if field.types == [GGUFValueType.FLOAT32]:  # 1e-5 rather than 9.999999747378752e-06
                metadata[name] = float(str(np.float32(metadata[name])))
    except OSError as error:
        raise explain_os_error(error, path) from error
    # What the reader raises on broken files: it indexes and reshapes whatever bytes it finds.
    except (ValueError, LookupError, OverflowError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a valid GGUF file: {error}", HINT, Code.MALFORMED) from error
    if reader.endianess != GGUFEndian.LITTLE:
        raise UserError(
            f"{path}: a big-endian GGUF file", "convert it to little-endian first", Code.UNSUPPORTED
        )
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


class _Reader(GGUFReader):
    """Reads files that llama.cpp's `gguf_init_from_file` accepts. `GGUFReader` reads a tensor from
    whatever offset it states."""

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Raise ValueError unless each tensor begins where the one before it ends, aligned."""
        # GGUFReader maps whatever bytes the fields state: everything is checked before that.
        alignment, expected = int(self.alignment), 0
        for field in fields:
            _, _, n_dims, dims, raw_type, offset = field.parts
            if len(field.name.encode()) > MAX_NAME_BYTES or int(n_dims[0]) > MAX_DIMS:
                raise ValueError(
                    f"tensor {field.name[:MAX_NAME_BYTES]} has a name of "
                    f"{len(field.name.encode())} bytes and {n_dims[0]} dimensions, but at most "
                    f"{MAX_NAME_BYTES} and {MAX_DIMS} are allowed"
                )
            block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(int(raw_type[0]))]
            shape = [int(n) for n in dims]
            if shape and shape[0] % block:
                raise ValueError(
                    f"tensor {field.name} has rows of {shape[0]} elements, which is not a multiple "
                    f"of its block size {block}"
                )
            if int(offset[0]) != expected:
                raise ValueError(
                    f"tensor {field.name} has offset {offset[0]}, but the tensors before it end at "
                    f"{expected}"
                )
            size = math.prod(shape) // block * n_bytes
            if start_offs + expected + size > len(self.data):
                raise ValueError(
                    f"tensor {field.name} ends at byte {start_offs + expected + size}, but the "
                    f"file has {len(self.data)} bytes"
                )
            expected += size + -size % alignment
        super()._build_tensors(start_offs, fields)


def _config(
    metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], source: Path
) -> GPTConfig:
    """The configuration, parsed like a `config.json` of the family with the same values."""
    name = metadata.get(ARCHITECTURE)
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"{source}: general.architecture is {name!r}, but Lathe supports {known} only",
            "give a model of one of these families (Mistral's GGUF files are of llama)",
            Code.UNSUPPORTED,
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise UserError(
            f"{source}: one of {metadata['split.count']} files",
            "join them first: llama-gguf-split --merge FIRST.gguf WHOLE.gguf",
            Code.INCOMPLETE,
        )
    # Keys that Lathe does not know might change the computation: they are rejected.
    gguf_keys = {
        k.removeprefix(f"{name}."): v for k, v in metadata.items() if k.startswith(f"{name}.")
    }
    others = OTHER_KEYS | ({WINDOW} if family.layer_types is not None else set())
    if unknown := [key for key in gguf_keys if key not in KEYS and key not in others]:
        raise UserError(
            f"{source}: {name}.{unknown[0]} is {str(gguf_keys[unknown[0]])[:40]}, which Lathe does "
            "not support",
            f"give a checkpoint of the plain {family.title} architecture",
            Code.UNSUPPORTED,
        )
    values = _config_json(family, gguf_keys, metadata, tensors, source)
    if name == PER_LAYER:
        values |= {"model_type": family.lathe_type, **_widths(gguf_keys, source)}
    config = GPTConfig.from_json(values, str(source))
    for key in (ROTATED, "attention.value_length"):
        if key == ROTATED and family.rotates_part:
            continue
        if gguf_keys.get(key, config.head_dim) != config.head_dim:
            raise UserError(
                f"{source}: {key} is {gguf_keys[key]}, but Lathe supports the size of a head, "
                f"{config.head_dim}, only",
                OTHER,
                Code.UNSUPPORTED,
            )
    template = metadata.get("tokenizer.chat_template")
    config = replace(config, sampling=_sampling(metadata, source))
    if not isinstance(template, str):
        return config
    # The template may name tokens by what they are for; the file has their ids.
    hint = "write a valid one: gguf-new-metadata --chat-template-file TEMPLATE OLD.gguf NEW.gguf"
    sample_chat(template, str(source), hint)
    tokens = metadata[f"{TOKENIZER}tokens"]
    ids = {name: metadata.get(f"{TOKENIZER}{name}_id") for name in ("bos_token", "eos_token")}
    named = {k: tokens[i] for k, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    return config.with_chat_template(define_tokens(template, named))


def _config_json(
    family: Architecture,
    gguf_keys: Mapping[str, Any],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, ReaderTensor],
    source: Path,
) -> dict[str, Any]:
    """The values of a `config.json` of the family: from keys and, where the file has none, from its
    tensors. Sizes of every layer are not among them."""
    sizes = {KEYS[key]: value for key, value in gguf_keys.items() if key in KEYS}
    values: dict[str, Any] = {"model_type": family.model_type}
    values |= {
        key: sizes[field]
        for key, field in family.keys.items()
        if field in sizes and not (field in WIDTHS and metadata[ARCHITECTURE] == PER_LAYER)
    }
    if gguf_keys.get("expert_count"):
        values["num_experts"] = gguf_keys["expert_count"]
    if WINDOW in gguf_keys:
        values["sliding_window"] = gguf_keys[WINDOW]
    # Files do not state by what Gemma 3 divides scores; llama.cpp takes the head size.
    head_size = gguf_keys.get("attention.key_length")
    if head_size and "score_scalar" in family.keys.values():
        values[family.key("score_scalar")] = head_size
    if family.positions == "rotary":
        values |= _rope(gguf_keys, tensors, source)
        rotated = gguf_keys.get(ROTATED)
        if rotated and family.rotates_part:
            head_size = head_size or sizes["n_embd"] // sizes["n_head"]
            values["partial_rotary_factor"] = rotated / head_size
        ends = [metadata[k] for key in END_KEYS if (k := TOKENIZER + key) in metadata]
        values["eos_token_id"] = list(
            dict.fromkeys((*ends, *metadata.get(TOKENIZER + ALL_ENDS, ())))
        )
    # The vocabulary, tied embeddings and biases show in the tensors only. Shapes are reversed in
    # GGUF: the last number is that of the rows.
    if (table := tensors.get("token_embd.weight")) is not None:
        values["vocab_size"] = int(table.shape[-1])
    if True not in family.arithmetic.get("tie_word_embeddings", ()):
        values["tie_word_embeddings"] = "output.weight" not in tensors
    for key, linears in family.biases.items():
        tensor = "blk.0.attn_q.bias" if "attn" in linears[0] else "blk.0.ffn_up.bias"
        values[key] = tensor in tensors
    return values


def _widths(gguf_keys: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Lathe's key of `config.json` for layers of different widths."""
    sizes = {KEYS[key]: value for key, value in gguf_keys.items() if key in KEYS}
    n_layer, widths = sizes.get("n_layer"), dict[str, Any]()
    for name in WIDTHS:
        size = sizes.get(name)
        widths[name] = size if isinstance(size, list) else [size]
        if not isinstance(size, list) and isinstance(n_layer, int):
            widths[name] *= n_layer
        if len(widths[name]) != n_layer:
            raise UserError(
                f"{source}: {name} of {len(widths[name])} of {n_layer} layers", HINT, Code.MALFORMED
            )
        if 0 in widths[name]:
            raise UserError(
                f"{source}: {name} of layer {widths[name].index(0)} is 0, but Lathe supports only "
                "layers with attention and FFN",
                OTHER,
                Code.UNSUPPORTED,
            )
    head_dim = sizes.get("head_dim") or sizes.get("n_embd", 0) // widths["n_head"][0]
    return {"lathe": {"head_dim": head_dim, **widths}}


def _sampling(metadata: Mapping[str, Any], source: Path) -> SamplingDefaults:
    """The recommended sampling parameters; llama.cpp is greedy with a temperature of 0."""
    values = {
        name: metadata[SAMPLING + key]
        for key, name in SAMPLING_KEYS.items()
        if SAMPLING + key in metadata
    }
    if values.get("temperature") == 0:
        del values["temperature"]
        values["do_sample"] = False
    elif values:
        values["do_sample"] = True
    return sampling_defaults(values, f"{source}: {SAMPLING}*")


def _rope(
    gguf_values: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], source: Path
) -> dict[str, Any]:
    """Keys of `config.json` for the rotary embedding."""
    theta = gguf_values.get("rope.freq_base", 10_000.0)
    length = gguf_values.get("rope.scaling.original_context_length", 8192)
    kind = gguf_values.get("rope.scaling.type", "none")
    if (tensor := tensors.get(ROPE_FACTORS)) is not None:
        from lathe.model.block import frequencies  # needs torch

        # llama.cpp stores the divisors of frequencies: those of Llama 3's scaling with the largest
        # of them as its factor have to be the same.
        factors = _array(tensor, source)
        llama3 = RopeScaling(
            "llama3", float(factors.max()), original_max_position_embeddings=length
        )
        plain, scaled = (
            frequencies(Rope(theta, scaling=x), 2 * len(factors)).numpy() for x in (None, llama3)
        )
        if not np.allclose(plain / scaled, factors, rtol=1e-3):
            raise UserError(
                f"{source}: {ROPE_FACTORS} are not the factors of Llama 3.1's rotary embedding",
                OTHER,
                Code.UNSUPPORTED,
            )
        scaling = {key: getattr(llama3, key) for key in SCALING_KEYS["llama3"]}
        return {"rope_theta": theta, "rope_scaling": {"rope_type": "llama3", **scaling}}
    if kind == "none":
        return {"rope_theta": theta}
    if kind != "linear":
        raise UserError(
            f"{source}: rope_type is {kind!r}, but Lathe supports linear only in a GGUF file",
            OTHER,
            Code.UNSUPPORTED,
        )
    factor = gguf_values.get("rope.scaling.factor", 1.0)
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, "factor": factor}}


def _weights(
    tensors: Mapping[str, ReaderTensor], config: GPTConfig, source: Path
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name without prefix, and array as Hugging Face's files have it, of every tensor."""
    family = config.architecture
    names = names_in_gguf(config)
    # The file must have exactly the tensors of the model.
    if missing := [name for name in names if name not in tensors]:
        raise UserError(f"{source}: has no tensor {missing[0]}", HINT, Code.INCOMPLETE)
    others = tensors.keys() - names.keys() - {ROPE_FACTORS}
    if config.tie_word_embeddings and "output.weight" in others:
        head, table = (_array(tensors[x], source) for x in ("output.weight", "token_embd.weight"))
        if head.shape == table.shape and np.linalg.norm(
            head - table
        ) <= COPY_DISTANCE * np.linalg.norm(table):
            others -= {"output.weight"}
    if others:
        title = family.title
        raise UserError(
            f"{source}: {min(others)} is not a tensor of a {title} model supported by Lathe",
            f"give a checkpoint of the plain {title} architecture",
            Code.UNSUPPORTED,
        )
    shapes = dict(config.tensor_shapes())
    for theirs, name in names.items():
        array = _array(tensors[theirs], source)
        if family.is_conv1d(name):  # GPT-2's: (in, out) in Hugging Face's files
            array = np.ascontiguousarray(array.T)
        require_fit(source, {name: array.shape}, {name: shapes[name]})
        if is_interleaved(config, name):
            array = halves(array, config.head_dim)
        if family.norm_offset and family.is_norm(name):
            array = array - np.float32(family.norm_offset)
        yield name, array


def family_in_gguf(config: GPTConfig) -> Architecture:
    """The family's name in GGUF files: Mistral is stored as Llama."""
    return LLAMA if config.architecture is MISTRAL else config.architecture


def is_interleaved(config: GPTConfig, name: str) -> bool:
    """Whether a tensor has rows of queries or keys in llama.cpp's order; see `halves`."""
    return family_in_gguf(config) in INTERLEAVED and (".q_proj." in name or ".k_proj." in name)


def names_in_gguf(config: GPTConfig) -> dict[str, str]:
    """llama.cpp's name of every tensor -> its name without the prefix in Hugging Face's files."""
    family = config.architecture
    family_name = next(name for name, known in FAMILIES.items() if known is family_in_gguf(config))
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == family_name)
    table = get_tensor_name_map(arch, config.n_layer)
    names = {}
    for name, _ in config.tensor_shapes():
        module, _, kind = family.stored_name(name).rpartition(".")
        names[f"{table.get_name(module)}.{kind}"] = name
    return names


def _array(tensor: ReaderTensor, source: Path) -> NDArray[np.float32]:
    try:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    except NotImplementedError:
        raise UserError(
            f"{source}: {tensor.name} is {tensor.tensor_type.name}, which cannot be dequantized",
            "give a file in F16, BF16, F32, Q8_0, Q6_K or the like",
            Code.UNSUPPORTED,
        ) from None
    if not np.isfinite(array).all():
        raise non_finite(source, tensor.name)
    return array


def halves(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Reorder rows of heads (H * D, ...) from llama.cpp's order, which interleaves rotated pairs,
    to Hugging Face's, in which a feature's partner is in the other half."""
    return np.ascontiguousarray(rows[np.argsort(interleaved_rows(len(rows), head_dim))])


def interleaved_rows(n: int, head_dim: int) -> NDArray[np.int64]:
    """Index of Hugging Face's rows for each of llama.cpp's n rows of heads."""
    halves = np.arange(n).reshape(-1, 2, head_dim // 2)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(n)
