"""Choose between static and dynamic scales of activations by what static ones cost a model.

A pretrained model has tokens, the first of a text above all, whose activations are a thousand times
the others' ("massive activations", Sun et al. 2024, arXiv:2402.17762). One static scale for all
tokens rounds the others to zero; a small model that was trained for minutes has no such tokens, and
reads prompts faster with static scales.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from lathe.compress.plan import make_plan
from lathe.compress.sensitivity.measure import Measure
from lathe.config.settings import QuantizationSettings, Recipe
from lathe.config.settings.types import ActivationScales, Format
from lathe.model import fake_quant
from lathe.model.gpt import GPT

log = logging.getLogger("lathe")

TOKENS = 2048  # on which costs are measured: three passes over them take seconds
SHARE = 0.1
"""Largest cost of static scales, as a share of the increase of log perplexity that the gate
allows: the rest is left to rounding weights, to pruning, and to the gate's own uncertainty."""


def with_activation_scales(
    recipe: Recipe, model: GPT, batches: Sequence[Tensor], formats: Mapping[str, Format]
) -> QuantizationSettings:
    """The recipe's `Compress.Quantization` with `activation_quantize_type: auto` decided."""
    kind = choose_activation_scales(recipe, model, batches, formats)
    return recipe.Compress.Quantization.model_copy(update={"activation_quantize_type": kind})


def choose_activation_scales(
    recipe: Recipe, model: GPT, batches: Sequence[Tensor], formats: Mapping[str, Format]
) -> ActivationScales:
    """`activation_quantize_type`, with `auto` replaced by static or dynamic scales and a line of
    log that says why; warns of static scales that are asked for and cost too much.

    The cost is KL(float || quantized without training) in nats a token, on calibration text.

    Args:
        model: in float, in evaluation mode.
        batches: tokens (B, T) each.
        formats: of single linears, for `make_plan`.
    """
    settings = recipe.Compress.Quantization
    kind = settings.activation_quantize_type
    if kind not in ("auto", "moving_average_abs_max"):
        return kind
    plan = make_plan(model.config, settings, formats)
    int8 = [name for name, form in plan.linears.items() if form.weight.bits == 8]
    if not int8:
        return "moving_average_abs_max"
    limit = SHARE * math.log1p(recipe.Gate.max_perplexity_increase)
    rows = max(1, TOKENS // batches[0].shape[1])
    sample = torch.cat(list(batches))[:rows]
    measure = Measure("kl", [sample.cpu().numpy()], model)

    def cost(scales: ActivationScales) -> float:
        asked = settings.model_copy(update={"activation_quantize_type": scales})
        plan = make_plan(model.config, asked, formats)
        with fake_quant.inserted(model, plan.part(int8)):
            fake_quant.calibrate(model, [sample])
            return fmean(measure(model))

    static = cost("moving_average_abs_max")
    found = f"INT8 with static activation scales costs {static:.2g} nats a token before training"
    allowed = f"{limit:.2g}, {SHARE:.0%} of what Gate.max_perplexity_increase allows"
    if static <= limit:
        log.info("%s (limit %s): static", found, allowed)
        return "moving_average_abs_max"
    if kind == "auto" and (hindrance := _hindrance(recipe)) is None:
        dynamic = cost("dynamic")
        log.info("%s (limit %s), with dynamic ones %.2g: dynamic", found, allowed, dynamic)
        return "dynamic" if dynamic < static else "moving_average_abs_max"
    hint = "set activation_quantize_type=auto" if kind != "auto" else f"{hindrance} excludes others"
    log.warning("%s, more than %s: %s", found, allowed, hint)
    return "moving_average_abs_max"


def _hindrance(recipe: Recipe) -> str | None:
    """The setting that needs static scales, if any."""
    settings: QuantizationSettings = recipe.Compress.Quantization
    if settings.activation_preprocess_type:
        return f"activation_preprocess_type {settings.activation_preprocess_type}"
    if recipe.Distributed.mp_degree > 1:
        return f"Distributed.mp_degree {recipe.Distributed.mp_degree}"
    return None
