"""The quantize stage: quantization-aware training to INT8 or INT4, or GPTQ without training."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lathe.compress.activation import find_prefix, smoothing_factors, with_int8_formats
from lathe.compress.feasible import require_enabled
from lathe.compress.gptq import gptq, gptq_bytes
from lathe.compress.plan import make_plan, named_formats
from lathe.compress.sensitivity.result import (
    analysis_digest,
    require_matching_analysis,
)
from lathe.compress.smoothing import fold
from lathe.data.tokens import TokenDataset
from lathe.model import fake_quant
from lathe.model.by_block import on
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.fake_quant import FakeQuantEmbedding, FakeQuantLinear
from lathe.model.folder import open_folder
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe.model.integer_weights import weight_rounding
from lathe.model.quantization import QuantizationPlan
from lathe.train.batches import calibration_batches, open_data
from lathe.train.distill import teacher_folder
from lathe.train.loss import batch_losses
from lathe.train.pretrain import with_dropout
from lathe.train.result import TrainResult
from lathe.train.room import BY_BLOCK, WHOLE, device_with_room, pass_bytes, whole_bytes
from lathe.train.run import TrainingJob, run_training
from lathe.train.workers import Workers
from lathe_base.config.settings import GenerationSettings, Recipe
from lathe_base.config.settings.types import Format
from lathe_base.errors import Code, UserError
from lathe_base.progress import bar
from lathe_base.provenance.step import attested
from lathe_serving.runtime.text import bos_ids

log = logging.getLogger("lathe")

CACHE_BYTES = 2**30
"""Upper bound of the key-value cache: rows that fit are generated together, since on a CPU a step
of many rows takes little longer than one of a few."""


@attested("quantize", "model", "data", "sensitivity", "teacher")
def quantize(
    recipe: Recipe, model: Path, data: Path, output: Path, sensitivity: Path | None = None
) -> TrainResult:
    """Insert fake quantization, calibrate it, train with it, write a checkpoint with its plan.

    Args:
        sensitivity: folder of `analyze`, whose choice of formats and of linears to keep in float is
            applied, in addition to `skip_tensor_map`.

    Raises:
        UserError: `model` is already quantized, the analysis is of another model, a skip is not a
            linear of it, or `Compress.Quantization.enable` is False; see also `run_training`.
    """
    require_enabled("Quantization", recipe.Compress.Quantization.enable)
    parent = open_folder(model)
    inputs = {
        "model": parent.digest,
        "Sensitivity.calibration_batches": str(recipe.Sensitivity.calibration_batches),
        # What static scales may cost depends on it:
        "Gate.max_perplexity_increase": str(recipe.Gate.max_perplexity_increase),
    }
    if sensitivity is not None:
        require_matching_analysis(parent, sensitivity)
        inputs["sensitivity"] = analysis_digest(sensitivity)
    settings = recipe.Compress.Quantization
    teacher = teacher_folder(recipe.Compress.Distill, parent.path)

    def make(workers: Workers) -> TrainingJob:
        start = load_checkpoint(parent)
        if start.model.config.quantization is not None:
            raise UserError(
                f"{model}: is already quantized",
                "start from its parent checkpoint",
                Code.WRONG_KIND,
            )
        tokens = open_data(data, recipe, start.model.config, start.tokenizer)
        parts = [*calibration_batches(recipe, tokens)]
        needed = pass_bytes(start.model, parts[0].size, gradients=True)
        device, _ = device_with_room(recipe, workers.device, "calibration", {BY_BLOCK: needed})
        batches = [torch.from_numpy(part).to(device) for part in parts]
        (loss,) = batch_losses(start.model, batches[:1])
        if not math.isfinite(loss):
            raise UserError(
                f"{model}: its loss on training text is {loss}",
                "start from an earlier checkpoint",
                Code.NOT_FINITE,
            )
        text_for_gptq = []  # which the float model writes, before anything is folded into it
        if settings.uses_gptq(recipe.Engine.max_steps):
            text_for_gptq = workers.agree(lambda: gptq_text(recipe, start, tokens, workers.device))
        named = named_formats(start.model.config, settings, sensitivity)
        # The order matters: a prefix removes the massive activations, smoothing divides what is
        # left, and only then is it known what static scales cost. Rank 0 decides for all.
        prefix = workers.agree(
            lambda: find_prefix(recipe, start.model, batches, named, start.eos_id)
        )
        start.model.set_prefix(prefix)
        fold(
            start.model,
            workers.agree(lambda: smoothing_factors(recipe, start.model, batches, named)),
        )
        start.model.set_prefix(prefix)  # smoothing has divided its values
        formats = workers.agree(lambda: with_int8_formats(recipe, start.model, batches, named))
        trainable, plan = insert_fake_quantization(start.model, recipe, formats)
        fake_quant.calibrate(trainable, batches)
        _warn_of_large_weights(trainable)
        if text_for_gptq:
            needed = gptq_bytes(trainable, text_for_gptq[0].numel())
            device, _ = device_with_room(recipe, workers.device, "GPTQ", {BY_BLOCK: needed})
            read = [part.to(device) for part in text_for_gptq]
            # Other processes might have other rounding errors.
            workers.agree(lambda: gptq(trainable, read))
            workers.share(trainable.parameters())
        n_int8 = sum(linear.weight.bits == 8 for linear in plan.linears.values())
        log.info(
            "%d linears are INT8, %d INT4; the input of %d is INT8",
            n_int8,
            len(plan.linears) - n_int8,
            len(plan.integer_linears),
        )

        return TrainingJob(
            "quantize",
            trainable,
            start.tokenizer,
            parent.path,
            before_save=lambda whole: write_scales(whole, plan),
        )

    sources = [parent.path, *([sensitivity] if sensitivity else [])]
    return run_training(recipe, data, output, inputs, make, teacher, sources)


def gptq_text(
    recipe: Recipe, start: Checkpoint, data: TokenDataset, device: torch.device
) -> list[Tensor]:
    """Micro-batches (B, T) of training text and of text that the float model writes, on `device` if
    that has room for the whole model, which every token needs."""
    settings = recipe.Compress.Quantization
    parts = calibration_batches(recipe, data, settings.gptq_batches)
    read = [torch.from_numpy(part) for part in parts]
    if not settings.generated_batches:
        return read
    rows, length = read[0].shape
    rows *= settings.generated_batches
    needed = whole_bytes(start.model, rows) + CACHE_BYTES
    device, _ = device_with_room(recipe, device, "text for GPTQ", {WHOLE: needed})
    with on(device, start.model):
        bos = bos_ids(start.tokenizer)
        first = bos[0] if bos else start.eos_id
        written = generated_text(start.model, rows, length, first, recipe.Global.seed)
    return [*read, *torch.split(written, len(read[0]))]


def insert_fake_quantization(
    model: GPT, recipe: Recipe, formats: Mapping[str, Format]
) -> tuple[GPT, QuantizationPlan]:
    """A trainable, uncalibrated model with fake quantization that shares the tensors, and its plan.

    Args:
        formats: see `make_plan`.
    """
    settings, config = recipe.Compress.Quantization, model.config
    plan = replace(
        make_plan(config, settings, formats),
        position_embedding=settings.quantize_embedding
        and config.architecture.positions == "learned",
        kv_cache_bits=settings.kv_cache_bits,
    )
    trainable = with_dropout(model, recipe.Model)
    fake_quant.insert(trainable, plan, settings.activation_preprocess_type == "PACT")
    return trainable, plan


def _warn_of_large_weights(model: GPT) -> None:
    """Name the linears and tables with a group whose scale exceeds float16."""
    for name, module in model.named_modules():
        if not isinstance(module, FakeQuantLinear | FakeQuantEmbedding):
            continue
        if weight_rounding(module.quantized.fmt).exceeds_scales(module.weight):
            log.warning(
                "%s: the scale of a group exceeds float16, whose largest value replaces it; "
                "Compress.Quantization.skip_tensor_map can keep this linear in float",
                name,
            )


def write_scales(model: GPT, plan: QuantizationPlan) -> None:
    """Put the observers' scales into the model's configuration."""
    scales = {name: observer.scale for name, observer in fake_quant.observers(model)}
    model.config = model.config.with_quantization(plan.with_scales(scales))


def generated_text(model: GPT, rows: int, length: int, first: int, seed: int) -> Tensor:
    """Text that a model writes itself, for GPTQ to read beside training text: tokens (rows, length)
    on the CPU, drawn from the distribution of a float model.

    Training data is often narrower than what the model will read, and weights rounded for novels
    are worse for other text. What a pretrained model writes from an empty prompt is as varied as
    what it was pretrained on.

    Source: Liu et al. 2023, "LLM-QAT: Data-Free Quantization Aware Training for Large Language
    Models" (arXiv:2305.17888); for GPTQ, Williams et al. 2024, "Self-calibration for Language Model
    Quantization and Pruning" (arXiv:2410.17170).

    Args:
        first: the token with which every row begins: what the tokenizer prepends to a text, or
            else the end-of-document token.
    """
    sampling = GenerationSettings(temperature=1.0, top_k=0, top_p=1.0, max_dec_len=length - 1)
    config = model.config
    row_bytes = 8 * length * config.head_dim * sum(config.n_kv_head)  # float32 keys and values
    at_once = max(1, CACHE_BYTES // row_bytes)
    sizes = [min(at_once, rows - done) for done in range(0, rows, at_once)]
    texts = []
    with bar("generate text for GPTQ", len(sizes) * (length - 1)) as progress:
        for number, size in enumerate(sizes):
            texts += generate(
                model, [[first]] * size, sampling, seed=seed + number, progress=progress
            )
    return torch.tensor([[first, *row] for row in texts])
