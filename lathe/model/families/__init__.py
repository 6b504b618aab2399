"""The model families that Lathe computes, one description a file."""

from typing import Any

from lathe.model.architecture import Architecture
from lathe.model.families.gemma3 import GEMMA3
from lathe.model.families.gpt2 import GPT2
from lathe.model.families.gpt_neox import GPT_NEOX
from lathe.model.families.llama import LLAMA
from lathe.model.families.mistral import MISTRAL
from lathe.model.families.olmo2 import OLMO2
from lathe.model.families.opt import OPT
from lathe.model.families.phi3 import PHI3
from lathe.model.families.qwen import QWEN2, QWEN3
from lathe.model.families.smollm3 import SMOLLM3
from lathe.model.families.starcoder2 import STARCODER2

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
    "architecture_of",
]

_FAMILIES = (
    *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3),
    *(SMOLLM3, GEMMA3, PHI3, OLMO2, STARCODER2, GPT_NEOX, OPT),
)
ARCHITECTURES = {family.model_type: family for family in _FAMILIES}
"""Every family by its `model_type`, which is also its name in a recipe."""


def architecture_of(model_type: Any) -> Architecture | None:
    """The family with this `model_type`, Hugging Face's or Lathe's; None if there is none."""
    types = (x for x in _FAMILIES if model_type in (x.model_type, x.own_type))
    return next(types, None)
