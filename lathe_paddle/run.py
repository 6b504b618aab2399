"""Shared by the stages that train: claim the folder, train, write the checkpoint."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer

from lathe.model.config import GPTConfig
from lathe.model.folder import training_origin
from lathe.train.batches import open_data
from lathe.train.result import (
    TrainResult,
    begin,
    claimed,
    is_finished,
    read_result,
    remove_states,
    run_identity,
)
from lathe_base.config.settings import ModelSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_paddle.checkpoint import save_checkpoint
from lathe_paddle.gpt import GPT
from lathe_paddle.parallel import whole_weights
from lathe_paddle.trainer import Trainer
from lathe_paddle.workers import Workers, join_workers

log = logging.getLogger("lathe")


@dataclass(frozen=True)
class TrainingJob:
    """A model to train, and what its checkpoint records; see `lathe.train.run.TrainingJob`."""

    stage: str
    model: GPT
    tokenizer: Tokenizer
    parent: Path | None = None
    after_step: Callable[[Workers], None] | None = None
    before_save: Callable[[GPT], None] | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


def new_model(config: GPTConfig, settings: ModelSettings) -> GPT:
    """A float GPT to train, with the recipe's dropout and recomputation."""
    bare = replace(config, quantization=None)
    model = GPT(bare, settings.hidden_dropout_prob, settings.attention_probs_dropout_prob)
    model.set_recompute(settings.recompute)
    return model


def run_training(
    recipe: Recipe,
    data: Path,
    output: Path,
    inputs: dict[str, str],
    make: Callable[[Workers], TrainingJob],
    sources: Sequence[Path],
) -> TrainResult:
    """Train what `make` builds and write the checkpoint `output`, unless that is finished already.

    Args:
        make: builds the model, divided as the recipe asks; not called when `output` is finished.
        sources: other folders that `make` reads.

    Raises:
        UserError: as `lathe.train.run.run_training`.
        Preempted: SIGTERM arrived; the same call resumes.
    """
    if recipe.Engine.mix_precision.is_pure:
        log.warning("mix_precision.level is O2: the Paddle engine computes as with O1")
    with join_workers(recipe) as workers:
        identity = run_identity(recipe, inputs, data, workers.data_size)
        with claimed(output, identity, data, *sources) if workers.is_first else nullcontext():
            workers.barrier()
            if workers.gather(is_finished(output, identity))[0]:
                log.info("%s is finished: nothing to do", output)
                return _agreed(workers, output)
            work = make(workers)
            config = work.model.config
            tokens = open_data(data, recipe, config, work.tokenizer)
            if any(part.has_mask for _, part in tokens.parts):
                raise UserError(
                    f"{data}: conversations, of which the Paddle engine cannot count the "
                    "assistant's tokens only",
                    "train with -o Compress.engine=torch, or prepare with Prepare.chat=False",
                    Code.UNSUPPORTED,
                )
            origin = training_origin(work.parent, tokens)

            def observe() -> None:
                if work.after_step is not None:
                    work.after_step(workers)

            if workers.is_first:
                begin(output, identity)
            trainer = Trainer(recipe, work.model, tokens, output, workers, observe)
            trainer.run()
            weights = whole_weights(work.model, workers)
            if workers.is_first:
                if work.before_save is not None:
                    work.before_save(work.model)
                metrics = {**trainer.figures(), **work.figures, "n_params": config.n_params}
                parts = work.model, work.tokenizer, work.stage, recipe, origin, metrics
                save_checkpoint(output, *parts, weights)
                remove_states(output, keep=recipe.Engine.save_load.keep_final)
            return _agreed(workers, output)


def _agreed(workers: Workers, output: Path) -> TrainResult:
    """The result that the first process reads: only its disk may have it."""
    result: TrainResult = workers.gather(read_result(output) if workers.is_first else None)[0]
    return result
