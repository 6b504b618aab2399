"""The output folder of a run that trains: whose it is, and the figures of a finished one."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.data.tokens import TokenDataset
from lathe.errors import UserError
from lathe.model.folder import MARKER
from lathe.settings import Recipe
from lathe.storage import atomic_file, digest
from lathe.train.batch import resolve_batch

CLAIM = "run.json"

# Settings that a run may change between being killed and going on. The layout of processes is
# among them: what a step computes depends on the global batch size alone.
FREE: Any = {
    "Global": {"device", "local_batch_size", "micro_batch_size", "global_batch_size"},
    "Engine": {"logging_freq", "save_load", "accumulate_steps", "compile"},
    "Model": {"use_recompute", "recompute_granularity", "sequence_parallel", "virtual_pp_degree"},
    **dict.fromkeys(
        (
            *("Distributed", "Launch", "Generation", "Offline_Eval", "Export", "Serving", "Gate"),
            *("Sensitivity", "Prepare"),
        ),
        True,
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


def run_identity(
    recipe: Recipe, inputs: dict[str, str], data: Path, data_parallel: int
) -> dict[str, Any]:
    """What the result of a run depends on.

    Args:
        inputs: digests of what it depends on beside the recipe and the data.
        data_parallel: parts into which a global batch is divided.
    """
    return {
        "settings": digest(recipe.model_dump_json(exclude=FREE)),
        "global_batch_size": resolve_batch(recipe, data_parallel).total,
        **inputs,
        "data": TokenDataset.open(data).digest,
    }


def claim(output: Path, identity: dict[str, Any]) -> None:
    """Make `output` the folder of the run with this identity.

    Raises:
        UserError: it is another's.
    """
    card = output / CLAIM
    if card.is_file():
        found = json.loads(card.read_text())
        different = [key for key, value in identity.items() if found.get(key) != value]
        if different:
            raise UserError(
                f"{output}: holds a run with other {' and '.join(different)}",
                "give another --output, or delete the folder",
            )
        return
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"{output}: not empty, and not a run of Lathe", "give another --output")
    output.mkdir(parents=True, exist_ok=True)
    with atomic_file(card) as work:
        work.write_text(json.dumps(identity, indent=2) + "\n")


def read_result(output: Path) -> TrainResult:
    """Of a finished run."""
    return TrainResult(output, **json.loads((output / MARKER).read_text())["metrics"])
