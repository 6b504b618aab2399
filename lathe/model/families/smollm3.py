"""SmolLM3: Llama with no positions in every fourth layer, and optional sliding windows."""

from collections.abc import Mapping
from typing import Any

from lathe.model.architecture import FULL, SLIDING
from lathe.model.families.llama import ATTENTION, MLP, like_llama


def _is_rotated(values: Mapping[str, Any], n_layer: int) -> list[int]:
    interval = values.get("no_rope_layer_interval", 4)
    return values.get("no_rope_layers") or [(i + 1) % interval for i in range(n_layer)]


def _layer_types(values: Mapping[str, Any], n_layer: int) -> list[str]:
    return [FULL if rotated else SLIDING for rotated in _is_rotated(values, n_layer)]


SMOLLM3 = like_llama(
    "smollm3",
    "SmolLM3",
    "SmolLM3",
    biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
    ties=True,
    layer_types=_layer_types,
    is_rotated=_is_rotated,
    defaults={
        "intermediate_size": 11_008,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "use_sliding_window": False,
    },
)
