"""The model families that Lathe supports: Llama and those like it, and a file for each other."""

from collections.abc import Mapping
from typing import Any

from lathe.model.architecture import Architecture
from lathe.model.families.gpt2 import GPT2
from lathe.model.families.gpt_neox import GPT_NEOX, SEQUENTIAL
from lathe.model.families.llama import (
    GEMMA3,
    LLAMA,
    MISTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
    STARCODER2,
)
from lathe.model.families.opt import OPT

__all__ = [
    "ARCHITECTURES",
    "GEMMA3",
    "GPT2",
    "GPT_NEOX",
    "LLAMA",
    "MISTRAL",
    "OLMO2",
    "OPT",
    "PHI3",
    "QWEN2",
    "QWEN3",
    "SMOLLM3",
    "STARCODER2",
    "find_architecture",
    "why_unsupported",
]

_FAMILIES = (
    *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3),
    *(SMOLLM3, GEMMA3, PHI3, OLMO2, STARCODER2, GPT_NEOX, OPT),
)
ARCHITECTURES = {family.model_type: family for family in _FAMILIES}
"""Every family by its `model_type`, which is also its name in a recipe."""


UNSUPPORTED = {
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text", "qwen3_next"),
        "three of four layers are linear attention with a recurrent state (Gated DeltaNet), for "
        "which onnxruntime has no operator and the KV cache no place",
    ),
}
"""Well-known families that Lathe does not support, and why."""
_OPT_350M = (
    "do_layer_norm_before is False, as in OPT-350m, the one size of OPT whose norms follow the "
    "residual sums; Lathe supports norms within the branches only"
)


def why_unsupported(values: Mapping[str, Any]) -> str | None:
    """Why Lathe does not support the model of a `config.json`, if it is a well-known one."""
    named = values.get("model_type")
    if named == OPT.model_type and values.get("do_layer_norm_before") is False:
        return _OPT_350M
    return UNSUPPORTED.get(named) if isinstance(named, str) else None


def find_architecture(values: Mapping[str, Any]) -> Architecture | None:
    """The family of a `config.json`, by its `model_type` (Hugging Face's or Lathe's); None if it is
    unknown."""
    named = values.get("model_type")
    family = next((x for x in _FAMILIES if named in (x.model_type, x.lathe_type)), None)
    if family is GPT_NEOX and values.get("use_parallel_residual") is False:
        return SEQUENTIAL
    return family
