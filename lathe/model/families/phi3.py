"""Phi-3 and Phi-4-mini: Llama with fused matrices in its files, partial rotary embeddings, and
sliding-window attention in every layer."""

from dataclasses import replace

from lathe.model.families.llama import DOWN, GATE_UP, OUT, QKV, like_llama
from lathe.model.families.windows import every_layer

PHI3 = like_llama(
    "phi3",
    "Phi-3",
    "Phi3",
    epsilon=1e-5,
    linears=(replace(QKV, files=()), OUT, replace(GATE_UP, files=()), DOWN),
    layer_types=every_layer,
    lists_layer_types=False,
    rotates_part=True,
    defaults={"intermediate_size": 8192, "original_max_position_embeddings": 4096},
)
