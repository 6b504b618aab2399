"""The stage that removes heads and FFN channels and finetunes what is left."""

import logging
from pathlib import Path

from lathe.compress.widths import choose_uniform, shrink
from lathe.errors import UserError
from lathe.model.checkpoint import checkpoint_digest, load_checkpoint
from lathe.settings import Recipe
from lathe.train.pretrain import new_model
from lathe.train.stage import TrainResult, Work, run_training

log = logging.getLogger("lathe")


def prune(recipe: Recipe, model: Path, data: Path, output: Path) -> TrainResult:
    """Prune by `Compress.Prune`, finetune by `Engine` and `Optimizer`, write a checkpoint.

    The result's `first_eval_loss` is the loss right after pruning, before any finetuning.

    Raises:
        UserError: `model` is already quantized; see also `run_training`.
    """
    settings = recipe.Compress.Prune

    def make() -> Work:
        dense = load_checkpoint(model)
        if dense.model.config.quantization is not None:
            raise UserError(f"{model}: is quantized", "prune first, then quantize")
        trainable = new_model(dense.model.config, recipe.Model)
        trainable.load_state_dict(dense.model.state_dict())
        kept = choose_uniform(trainable, settings.criterion, settings.ratio)
        pruned = shrink(trainable, kept)
        before, after = dense.model.config.n_params(), pruned.config.n_params()
        log.info(
            "pruned: heads %s, FFN widths %s, parameters %s -> %s (%.1f %% fewer)",
            list(pruned.config.n_head),
            list(pruned.config.n_inner),
            f"{before:,}",
            f"{after:,}",
            100 * (1 - after / before),
        )
        return Work("prune", pruned, dense.tokenizer, dense.digest)

    return run_training(recipe, data, output, {"model": checkpoint_digest(model)}, make)
