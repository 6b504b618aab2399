"""Small models of Hugging Face's classes with random weights, saved as Hugging Face folders."""

from itertools import product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from lathe.model import fake_quant
from lathe.model.architecture import HEAD
from lathe.model.gpt import GPT
from lathe.model.quantization import LinearFormat, QuantizationPlan, WeightFormat
from lathe_base.config.settings.types import Bits
from tests.support.tables import quick_only

VOCABULARY, POSITIONS, WINDOW = 300, 96, 11
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "llama with biases, tied, llama3": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3,
    },
    "llama without groups, linear": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "rope_parameters": LINEAR,
    },
    "mistral": {
        "model_type": "mistral",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": None,
    },
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8},
    "qwen2, yarn": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "rope_parameters": YARN,
    },
    "llama, dynamic": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    },
    "mistral with a window": {
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "sliding_window": WINDOW,
    },
    "qwen2 with a window": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "smollm3": {
        "model_type": "smollm3",
        "num_key_value_heads": 2,
        "no_rope_layer_interval": 2,
        "pad_token_id": None,
    },
    "smollm3 with a window": {
        "model_type": "smollm3",
        "num_key_value_heads": 2,
        "no_rope_layers": [0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "pad_token_id": None,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "pad_token_id": None,
    },
    "phi3": {
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "sliding_window": WINDOW,
        "pad_token_id": None,
    },
    "phi4 mini": {
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "hidden_size": 64,
        "pad_token_id": None,
    },
    "phi4 mini, longrope": {
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "original_max_position_embeddings": POSITIONS,
        "max_position_embeddings": 8 * POSITIONS,
        "hidden_size": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 9.0],
        },
        "pad_token_id": None,
    },
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 2, "pad_token_id": None},
    "starcoder2": {
        "model_type": "starcoder2",
        "num_key_value_heads": 2,
        "sliding_window": WINDOW,
    },
    "gpt-neox": {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.25},
    },
    "gpt-neox, sequential": {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "use_parallel_residual": False,
    },
    "opt": {"model_type": "opt", "ffn_dim": 80, "pad_token_id": 1},
}
"""Config values of each family, on top of those in `make`."""


def make(case: str, **changes: Any) -> PreTrainedModel:
    """Make a model of `FAMILIES` with random weights, including biases and norms."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": None,
        "eos_token_id": None,
        **FAMILIES[case],
        **changes,
    }
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    norm = 0.0 if model.config.model_type == "gemma3_text" else 1.0  # Gemma adds 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(norm if "norm" in name else 0.0, 0.1)
    model.eval()
    return model


def save(model: PreTrainedModel, folder: Path, tokenizer: Tokenizer, **how: Any) -> Path:
    """Save a model and its tokenizer as a Hugging Face folder."""
    model.save_pretrained(folder, **how)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


PATHS = (
    "llama with biases, tied, llama3",
    *("qwen3", "mistral with a window", "smollm3 with a window", "gemma3", "phi4 mini, longrope"),
    *("olmo2", "starcoder2", "gpt-neox", "opt"),
)
"""Families that together take every path of the code, for tests that take long in all of them."""

TOKENS = torch.randint(VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(3))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}),
    "llama with biases, tied, llama3": (
        "llama with biases, tied, llama3",
        {"head_dim": 32, "rope_parameters": LLAMA3},
    ),
    "mistral, linear": ("mistral", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {"hidden_size": 64}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen2, yarn": ("qwen2, yarn", {}),
    "qwen2 with a window": ("qwen2 with a window", {}),
    "smollm3": ("smollm3 with a window", {}),
    "gemma3": ("gemma3", {"head_dim": 16}),
    "phi3": ("phi3", {}),
    "phi4 mini": ("phi4 mini", {}),
    "olmo2": ("olmo2", {"head_dim": 32}),
    "starcoder2": ("starcoder2", {}),
    "gpt-neox": ("gpt-neox", {}),
    "gpt-neox, sequential": ("gpt-neox, sequential", {}),
    "opt": ("opt", {}),
}


LIKE_OTHERS = ("llama", "qwen2", "phi3", "gpt-neox, sequential")
"""Names of CASES that take no path of the code that another does not take."""


def in_turn(*flavours: str) -> list[Any]:
    """Combine CASES with all flavours; each case that takes a path of its own has one fast test, of
    the next flavour in turn."""
    own = [case for case in CASES if case not in LIKE_OTHERS]
    quick = {(case, flavours[i % len(flavours)]) for i, case in enumerate(own)}
    return quick_only(product(CASES, flavours), quick)


def quantized(model: GPT, group_size: int = 0, bits: Bits = 4, int8_cache: bool = False) -> GPT:
    """Quantize all linears of a model, and the KV cache, in place, calibrated on TOKENS, and return
    it."""
    forms = {name: LinearFormat() for name in (*model.config.linear_names(), HEAD)}
    if group_size:
        grouped = LinearFormat(WeightFormat.grouped(group_size, bits), "dynamic_int8")
        forms = dict.fromkeys(forms, grouped)
    plan = QuantizationPlan(forms, kv_cache_bits=8 if int8_cache else None)
    fake_quant.insert(model, plan)
    scales = fake_quant.calibrate(model, [TOKENS])
    model.config = model.config.with_quantization(plan.with_scales(scales))
    return model.eval()
