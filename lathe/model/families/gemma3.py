"""Gemma 3, text-only: five sliding-window layers with a separate rotary base, then one with full
attention; norms before and after attention and FFN, and of queries and keys, whose weights are
stored minus one; scaled embeddings."""

from collections.abc import Mapping
from typing import Any

from lathe.model.architecture import FULL, SLIDING
from lathe.model.families.llama import ATTENTION, HEAD_NORMS, like_llama


def _layer_types(values: Mapping[str, Any], n_layer: int) -> list[str]:
    pattern = values.get("sliding_window_pattern", 6)
    return [SLIDING if (i + 1) % pattern else FULL for i in range(n_layer)]


GEMMA3 = like_llama(
    "gemma3_text",
    "Gemma 3",
    "Gemma3",
    keys={
        "hidden_activation": "",
        "query_pre_attn_scalar": "score_scalar",
    },
    arithmetic={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "hidden_act": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False, None),
    },
    biases={"attention_bias": ATTENTION},
    activation="gelu_tanh",
    norm_offset=1.0,
    block_norms=("input_layernorm", "pre_feedforward_layernorm"),
    output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    head_norms=HEAD_NORMS,
    scales_embedding=True,
    ties=True,
    layer_types=_layer_types,
    local_theta="rope_local_base_freq",
    defaults={
        "intermediate_size": 9216,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
)
