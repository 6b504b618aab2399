"""Qwen2, with biases on queries, keys and values, and Qwen3, with query and key norms."""

from lathe.model.families.llama import ATTENTION, HEAD_NORMS, like_llama
from lathe.model.families.windows import last_layers

_DEFAULTS = {
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN2 = like_llama(
    "qwen2",
    "Qwen2",
    "Qwen2",
    always_biased=ATTENTION[:1],
    layer_types=last_layers,
    defaults=_DEFAULTS,
)
QWEN3 = like_llama(
    "qwen3",
    "Qwen3",
    "Qwen3",
    biases={"attention_bias": ATTENTION},
    head_norms=HEAD_NORMS,
    layer_types=last_layers,
    defaults=_DEFAULTS | {"head_dim": 128},
)
