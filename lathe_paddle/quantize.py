"""Quantization-aware training with PaddleSlim."""

import logging
from pathlib import Path

from lathe.backends.paddle_support import require_supported
from lathe.compress.feasible import require_enabled
from lathe.compress.plan import make_plan, named_formats
from lathe.compress.sensitivity.result import analysis_digest, require_matching_analysis
from lathe.model.folder import open_folder
from lathe.train.batches import calibration_batches, open_data
from lathe.train.result import TrainResult
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_paddle import fake_quant
from lathe_paddle.checkpoint import float_weights, load_checkpoint, set_weights
from lathe_paddle.gpt import GPT
from lathe_paddle.trainer import TrainingJob, new_model, run_training
from lathe_paddle.workers import Workers, divide

log = logging.getLogger("lathe")


def quantize(
    recipe: Recipe, model: Path, data: Path, output: Path, sensitivity: Path | None = None
) -> TrainResult:
    """Insert PaddleSlim's fake quantization, calibrate it, train with it, and write a checkpoint
    with its plan. See `lathe.compress.quantize.quantize`."""
    require_enabled("Quantization", recipe.Compress.Quantization.enable)
    require_supported("quantize", recipe)
    parent = open_folder(model)
    inputs = {"model": parent.digest}
    if sensitivity is not None:
        require_matching_analysis(parent, sensitivity)
        inputs["sensitivity"] = analysis_digest(sensitivity)
    settings = recipe.Compress.Quantization

    def make(workers: Workers) -> TrainingJob:
        start = load_checkpoint(parent)
        config = start.model.config
        if config.quantization is not None:
            raise UserError(
                f"{model}: is already quantized",
                "start from its parent checkpoint",
                Code.WRONG_KIND,
            )
        trainable = new_model(config, recipe.Model)
        set_weights(trainable, float_weights(start.model), model)
        divide(trainable, workers)
        plan = make_plan(config, settings, named_formats(config, settings, sensitivity))
        pact = settings.activation_preprocess_type == "PACT"
        fake_quant.insert(trainable, plan, pact, settings.moving_rate)
        tokens = open_data(data, recipe, config, start.tokenizer)
        fake_quant.calibrate(trainable, calibration_batches(recipe, tokens))
        workers.barrier()  # one may have calibrated for longer than a collective waits
        if workers.size > 1:
            fake_quant.share_ranges(trainable)
        log.info("PaddleSlim quantized %d linears to INT8", len(plan.linears))

        def after_step(workers: Workers) -> None:
            if workers.size > 1:  # they have seen different texts
                fake_quant.share_ranges(trainable)

        def before_save(whole: GPT) -> None:
            trained = plan.with_scales(fake_quant.scales(whole))
            whole.config = whole.config.with_quantization(trained)

        return TrainingJob(
            "quantize", trainable, start.tokenizer, parent.path, after_step, before_save
        )

    sources = [parent.path, *([sensitivity] if sensitivity else [])]
    return run_training(recipe, data, output, inputs, make, sources)
