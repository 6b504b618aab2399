"""What every stage that trains has in common: claim the folder, train, write the checkpoint."""

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lathe.data.tokens import TokenDataset
from lathe.errors import UserError
from lathe.model.checkpoint import MARKER, save_checkpoint
from lathe.model.gpt import GPT
from lathe.settings import Recipe
from lathe.storage import atomic_file
from lathe.train.batches import open_data
from lathe.train.trainer import STATE, Trainer
from lathe.train.workers import join_workers

log = logging.getLogger("lathe")

CLAIM = "run.json"

# Settings that a run may change between being killed and going on.
FREE: Any = {
    "Engine": {"logging_freq", "save_load"},
    **dict.fromkeys(
        ("Generation", "Offline_Eval", "Export", "Serving", "Gate", "Sensitivity", "Prepare"), True
    ),
}


@dataclass(frozen=True)
class TrainResult:
    """Figures of a finished run; losses in nats a token, NaN where validation data is absent."""

    folder: Path
    step: int
    loss: float
    first_eval_loss: float
    eval_loss: float
    tokens_per_second: float
    n_params: int

    @property
    def first_eval_perplexity(self) -> float:
        return math.exp(self.first_eval_loss)

    @property
    def eval_perplexity(self) -> float:
        return math.exp(self.eval_loss)


@dataclass(frozen=True)
class Work:
    """A model to train, and what its checkpoint says of it.

    Attributes:
        after_step: see `Trainer`.
        before_save: last change to the model, e.g. writing ranges into its plan.
    """

    stage: str
    model: GPT
    tokenizer: Tokenizer
    parent: str | None = None
    after_step: Callable[[], None] | None = None
    before_save: Callable[[], None] | None = None


def run_training(
    recipe: Recipe, data: Path, output: Path, inputs: dict[str, str], make: Callable[[], Work]
) -> TrainResult:
    """Train what `make` builds and write the checkpoint `output`; a finished one is returned.

    Args:
        inputs: digests of what the run depends on beside the recipe and the data.
        make: builds model and hooks; not called when `output` is finished.

    Raises:
        UserError: `output` belongs to a run of other settings or inputs; see also `Trainer`.
    """
    _check_degrees(recipe)
    card = json.dumps(TokenDataset.open(data).card, sort_keys=True)
    identity = _identity(recipe, {**inputs, "data": _digest(card)})
    finished = _claim(output, identity)
    if finished is not None:
        log.info("%s is finished: nothing to do", output)
        return finished
    with join_workers(recipe.Global) as workers:
        work = make()
        config = work.model.config
        tokens = open_data(data, recipe, config.vocab_size, config.n_positions)
        trainer = Trainer(recipe, work.model, tokens, output, workers, work.after_step)
        at = trainer.run()
        if work.before_save is not None:
            work.before_save()
        figures: dict[str, Any] = {
            "step": at.step,
            "loss": at.loss,
            "first_eval_loss": at.first_eval_loss,
            "eval_loss": at.eval_loss,
            "tokens_per_second": at.tokens / at.seconds,
            "n_params": config.n_params(),
        }
        if workers.is_first:
            model = work.model.cpu()
            parent, tokenizer = work.parent, work.tokenizer
            save_checkpoint(output, model, tokenizer, work.stage, recipe, parent, figures)
            shutil.rmtree(output / STATE, ignore_errors=True)
        workers.barrier()
    return TrainResult(output, **figures)


def _check_degrees(recipe: Recipe) -> None:
    degrees = recipe.Distributed
    for name, degree in (
        ("mp_degree", degrees.mp_degree),
        ("pp_degree", degrees.pp_degree),
        ("sharding.sharding_degree", degrees.sharding.sharding_degree),
    ):
        if degree > 1:
            raise UserError(
                f"Distributed.{name} is {degree}: training is data parallel only",
                f"-o Distributed.{name}=1, and dp_degree for the number of processes",
            )


def _identity(recipe: Recipe, inputs: dict[str, str]) -> dict[str, Any]:
    return {"settings": _digest(recipe.model_dump_json(exclude=FREE)), **inputs}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _claim(output: Path, identity: dict[str, Any]) -> TrainResult | None:
    """Make `output` this run's folder; its result if it is finished."""
    claim = output / CLAIM
    if claim.is_file():
        found = json.loads(claim.read_text())
        different = [key for key, value in identity.items() if found.get(key) != value]
        if different:
            raise UserError(
                f"{output}: holds a run with other {' and '.join(different)}",
                "give another --output, or delete the folder",
            )
        marker = output / MARKER
        if marker.is_file():
            return TrainResult(output, **json.loads(marker.read_text())["metrics"])
        return None
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"{output}: not empty, and not a run of Lathe", "give another --output")
    output.mkdir(parents=True, exist_ok=True)
    with atomic_file(claim) as work:
        work.write_text(json.dumps(identity, indent=2) + "\n")
    return None
