"""What the stages that train have in common: claim the folder, train, write the checkpoint."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lathe.errors import UserError
from lathe.model.folder import MARKER
from lathe.paddle.checkpoint import save_checkpoint
from lathe.paddle.gpt import GPT
from lathe.paddle.parallel import whole_weights
from lathe.paddle.trainer import STATE, Trainer
from lathe.paddle.workers import Workers, join_workers
from lathe.settings import Recipe
from lathe.train.batches import open_data
from lathe.train.result import TrainResult, claim, read_result, run_identity

log = logging.getLogger("lathe")


@dataclass(frozen=True)
class Work:
    """A model to train, and what its checkpoint says of it; see `lathe.train.stage.Work`."""

    stage: str
    model: GPT
    tokenizer: Tokenizer
    parent: str | None = None
    after_step: Callable[[Workers], None] | None = None
    before_save: Callable[[GPT], None] | None = None


def run_training(
    recipe: Recipe,
    data: Path,
    output: Path,
    inputs: dict[str, str],
    make: Callable[[Workers], Work],
) -> TrainResult:
    """Train what `make` builds and write the checkpoint `output`; a finished one is returned.

    Args:
        make: builds the model, divided as the recipe asks; not called when `output` is finished.

    Raises:
        UserError: as `lathe.train.stage.run_training`; `Compress.Distill` and sequence
            parallelism, which this engine does not have.
        Preempted: SIGTERM came; the same call goes on.
    """
    _require_supported(recipe)
    with join_workers(recipe) as workers:
        if workers.is_first:
            claim(output, run_identity(recipe, inputs, data, workers.data_size))
        workers.barrier()
        if (output / MARKER).is_file():
            log.info("%s is finished: nothing to do", output)
            return read_result(output)
        work = make(workers)
        config = work.model.config
        tokens = open_data(data, recipe, config.vocab_size, config.n_positions)

        def after_step() -> None:
            if work.after_step is not None:
                work.after_step(workers)

        trainer = Trainer(recipe, work.model, tokens, output, workers, after_step)
        at = trainer.run()
        weights = whole_weights(work.model, trainer.net, workers)
        if workers.is_first:
            if work.before_save is not None:
                work.before_save(work.model)
            figures: dict[str, Any] = {
                "step": at.step,
                "loss": at.loss,
                "first_eval_loss": at.first_eval_loss,
                "eval_loss": at.eval_loss,
                "tokens_per_second": at.tokens / at.seconds,
                "n_params": config.n_params(),
            }
            parts = work.model, work.tokenizer, work.stage, recipe, work.parent, figures
            save_checkpoint(output, *parts, weights)
            shutil.rmtree(output / STATE)
        workers.barrier()
    return read_result(output)


def _require_supported(recipe: Recipe) -> None:
    if recipe.Compress.Distill.teacher:
        raise UserError(
            "Compress.Distill: the Paddle engine does not distil",
            "-o Compress.Distill.teacher=null, or Compress.engine=torch",
        )
    if recipe.Model.sequence_parallel:
        raise UserError(
            "Model.sequence_parallel: the Paddle engine does not have it",
            "-o Model.sequence_parallel=False, or Compress.engine=torch",
        )
    if recipe.Model.recompute:
        log.warning("Model.use_recompute: the Paddle engine keeps activations instead")
    if recipe.Engine.mix_precision.is_pure:
        log.warning("mix_precision.level O2: the Paddle engine computes as for O1")
