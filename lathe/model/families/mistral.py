"""Mistral: Llama with sliding-window attention in every layer."""

from lathe.model.families.llama import like_llama
from lathe.model.families.windows import every_layer

MISTRAL = like_llama(
    "mistral",
    "Mistral",
    "Mistral",
    layer_types=every_layer,
    lists_layer_types=False,
    defaults={
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)
