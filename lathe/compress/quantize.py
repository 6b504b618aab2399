"""The quantize stage: quantization-aware training to INT8 or INT4."""

import logging
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from lathe.compress.enabled import require_enabled
from lathe.compress.plan import make_plan, skip_names
from lathe.compress.sensitivity.result import analysis_digest, require_analysis_of
from lathe.config.settings import Recipe
from lathe.errors import UserError
from lathe.model import fake_quant
from lathe.model.checkpoint import load_checkpoint
from lathe.model.folder import checkpoint_digest
from lathe.model.gpt import GPT
from lathe.model.quantization import QuantizationPlan
from lathe.train.batches import calibration_batches, open_data
from lathe.train.distill import teacher_folder
from lathe.train.pretrain import with_dropout
from lathe.train.result import TrainResult
from lathe.train.run import TrainingJob, run_training

log = logging.getLogger("lathe")


def quantize(
    recipe: Recipe, model: Path, data: Path, output: Path, sensitivity: Path | None = None
) -> TrainResult:
    """Insert fake quantization, calibrate it, train with it, write a checkpoint with its plan.

    Args:
        sensitivity: folder of `analyze`, whose skips stay in float, like `skip_tensor_map`'s.

    Raises:
        UserError: `model` is already quantized, the analysis is of another one, a skip names no
            linear of it, or `Compress.Quantization.enable` is False; see also `run_training`.
    """
    require_enabled("Quantization", recipe.Compress.Quantization.enable)
    inputs = {"model": checkpoint_digest(model)}
    if sensitivity is not None:
        require_analysis_of(model, sensitivity)
        inputs["sensitivity"] = analysis_digest(sensitivity)
    settings = recipe.Compress.Quantization
    teacher = teacher_folder(recipe.Compress.Distill, model)

    def make() -> TrainingJob:
        start = load_checkpoint(model)
        config = start.model.config
        if config.quantization is not None:
            raise UserError(f"{model}: is already quantized", "start from its parent checkpoint")
        trainable = with_dropout(start.model, recipe.Model)
        plan = make_plan(config, settings, skip_names(config, settings, sensitivity))
        fake_quant.insert(trainable, plan, settings.activation_preprocess_type == "PACT")
        tokens = open_data(data, recipe, config.vocab_size, config.n_positions)
        fake_quant.calibrate(trainable, map(torch.from_numpy, calibration_batches(recipe, tokens)))
        n_inputs = len(plan.integer_linears)
        log.info(
            "%d linears are INT%d, of %d of them the input is INT8",
            len(plan.linears),
            plan.weight_bits,
            n_inputs,
        )

        def after_step(part: GPT, group: ProcessGroup) -> None:
            fake_quant.fold_observers(part, settings.moving_rate, group)

        def before_save(whole: GPT) -> None:
            write_scales(whole, plan)

        return TrainingJob(
            "quantize",
            trainable,
            start.tokenizer,
            start.digest,
            after_step=after_step,
            before_save=before_save,
        )

    sources = [model, sensitivity] if sensitivity else [model]
    return run_training(recipe, data, output, inputs, make, teacher, sources)


def write_scales(model: GPT, plan: QuantizationPlan) -> None:
    """Put the observers' scales into the model's configuration."""
    scales = {name: observer.scale for name, observer in fake_quant.observers(model)}
    model.config = model.config.with_quantization(plan.with_scales(scales))
