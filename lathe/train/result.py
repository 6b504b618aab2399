"""The output folder of a training run: which run it belongs to, a finished run's figures, and the
answers of a finetuned model."""

import json
import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lathe.data.tokens import TokenDataset
from lathe.model.folder import MARKER, read_marker
from lathe.train.batches import resolve_batch
from lathe.train.schedule import learning_rate
from lathe.train.state_folder import committed_steps
from lathe.train.trace import EVENTS, LOG, TRACE
from lathe_base.artifacts.kinds import CHECKPOINT, STATE, checked, read_json
from lathe_base.config.settings import LearningRate, MixPrecision, Recipe
from lathe_base.config.settings.types import flat
from lathe_base.errors import Code, UserError
from lathe_base.storage import atomic_file, digest, locked, require_apart, require_utf8
from lathe_base.storage.files import is_digest
from lathe_base.storage.ownership import (
    ATTESTATION_FILES,
    Source,
    foreign_files_error,
    listed_files,
    remove_files,
)

CLAIM = "run.json"
TRACES = (TRACE, LOG, f"{EVENTS}/events.out.*")
RECIPE = "recipe"
"""Key of the settings in an identity. Identities are compared by digest; the settings show what
differs."""
Identity = dict[str, Any]
SHOWN_DIFFERENCES = 5
KERNELS = "kernels"
"""Folder of the compiled kernels, among the saved states of a run."""
SAMPLES = "samples.json"
"""Answers of a model before and after finetuning, a file of its checkpoint."""
FLIGHT = "flight"
"""Folder of the last collectives of each process, after one has not ended in time."""

LATER_PRECISION = ("loss_scale_window", "hysteresis", "fp8")
MAX_STEPS, DECAY_STEPS = "Engine.max_steps", "Optimizer.lr.decay_steps"

log = logging.getLogger("lathe")

# Settings that may differ when a killed run is resumed. The parallel layout is among them: what a
# step computes depends on the global batch size alone.
FREE: Any = {
    "Global": {"device", "local_batch_size", "micro_batch_size", "global_batch_size"},
    "Engine": {
        *("logging_freq", "eval_freq", "save_load", "accumulate_steps"),
        *("compile", "deterministic"),
    },
    "Model": {"use_recompute", "recompute_granularity", "sequence_parallel", "virtual_pp_degree"},
    **dict.fromkeys(
        (
            *("Distributed", "Launch", "Generation", "Offline_Eval", "Export", "Serving", "Gate"),
            *("Sensitivity", "Prepare", "Card", "Production", "Finetune"),
        ),
        True,
    ),
}


@dataclass(frozen=True)
class TrainResult:
    """Figures of a finished run; losses in nats per token, NaN without validation data.

    Checkpoints of earlier versions lack the figures that have a default.

    Attributes:
        samples_per_second: sequences per second.
        best_eval_loss: lowest validation loss of the run.
        removed_layers: number of layers that pruning removed; None if the model was not pruned.
        removed_heads, removed_channels: share of the dense model's query heads and FFN channels
            that pruning removed.
        mfu: share of the devices' peak FLOP/s that was used, 0 to 1; None if the peak is unknown.
    """

    folder: Path
    step: int
    loss: float
    first_eval_loss: float
    eval_loss: float
    tokens_per_second: float
    n_params: int
    samples_per_second: float = math.nan
    best_eval_loss: float = math.nan
    mfu: float | None = None
    removed_layers: int | None = None
    removed_heads: float | None = None
    removed_channels: float | None = None

    @property
    def first_eval_perplexity(self) -> float:
        """Perplexity before the first update."""
        return math.exp(self.first_eval_loss)

    @property
    def eval_perplexity(self) -> float:
        """Perplexity after the last update."""
        return math.exp(self.eval_loss)

    @property
    def best_perplexity(self) -> float:
        """Lowest validation perplexity of the run."""
        return math.exp(self.best_eval_loss)


def run_identity(
    recipe: Recipe, inputs: dict[str, str], data: Path, data_parallel: int
) -> Identity:
    """The identity of a run: everything that its result depends on.

    Args:
        inputs: digests, or values, of what else it depends on.
        data_parallel: parts into which a global batch is divided.
    """
    free = FREE
    # As in runs of versions without the settings:
    later = ("sliding_window", "vocab_size_divisible_unit")
    if unset := {key for key in later if getattr(recipe.Model, key) is None}:
        free = {**free, "Model": FREE["Model"] | unset}
    if not recipe.Data.reset_attention:
        free = {**free, "Data": {"reset_attention"}}
    precision, usual = recipe.Engine.mix_precision, MixPrecision()
    if unset := {k for k in LATER_PRECISION if getattr(precision, k) == getattr(usual, k)}:
        engine = dict.fromkeys(FREE["Engine"], True)
        free = {**free, "Engine": {**engine, "mix_precision": unset}}
    return {
        "settings": digest(recipe.model_dump_json(exclude=free)),
        "global_batch_size": resolve_batch(recipe, data_parallel).total,
        **inputs,
        "data": TokenDataset.open(data).digest,
        RECIPE: recipe.model_dump(mode="json", exclude=free),
    }


def claim(output: Path, identity: Identity) -> None:
    """Check, before any work, that the folder `output` belongs to this run or may be used by it.

    The folder of a run that ended before it saved anything may be reused.

    Raises:
        UserError: it belongs to another run, or contains something else.
    """
    names = sorted(path.name for path in output.iterdir())
    if not names:
        return
    earlier = _read_claim(output)
    if earlier is None:
        raise foreign_files_error(output, names)
    different = [key for key in identity if key != RECIPE and earlier.get(key) != identity[key]]
    if not different or not _has_results(output):
        return
    # A run that differs only in having more steps and a longer schedule is an extension.
    before, after = (flat(run.get(RECIPE) or {}) for run in (earlier, identity))
    old, new = before.get(MAX_STEPS, 0), after.get(MAX_STEPS, 0)
    fixed = [
        {key: value for key, value in run.items() if key not in (MAX_STEPS, DECAY_STEPS)}
        for run in (before, after)
    ]
    if different == ["settings"] and fixed[0] == fixed[1] and 0 < old < new:
        if (output / MARKER).is_file() and not committed_steps(output / STATE):
            raise UserError(
                f"{output}: finished after {old} steps, and its training state was deleted: it "
                "cannot be extended",
                "to extend a run later, train it with Engine.save_load.keep_final=true; or start "
                "from its weights with another --output and, for pretrain, --init",
                Code.INCOMPLETE,
            )
        log.warning("%s: %s", output, _extension(earlier[RECIPE], identity[RECIPE]))
        return
    # The settings that differ, as `Engine.max_steps=150, now 60`; the first few of many.
    changed = [
        f"{key}={before[key]}, now {after[key]}"
        for key in sorted(before.keys() & after.keys())
        if before[key] != after[key]
    ]
    if (rest := len(changed) - SHOWN_DIFFERENCES) > 0:
        changed = [*changed[:SHOWN_DIFFERENCES], f"and {rest} more"]
    more = f": {', '.join(changed)}" if "settings" in different and changed else ""
    raise UserError(
        f"{output}: contains a run with different {' and '.join(different)}{more}",
        "give another --output, delete the folder, or resume it with its original settings",
        Code.STATE_MISMATCH,
    )


def _extension(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Describe the effect of more steps on the learning rate and the samples."""
    old, new = flat(before)[MAX_STEPS], flat(after)[MAX_STEPS]
    was, lr = (LearningRate.model_validate(run["Optimizer"]["lr"]) for run in (before, after))
    at_old, at_new = (learning_rate(step, lr) for step in (old, new))
    instead = "" if lr == was else f" rather than {learning_rate(old, was):.3g}"
    return (
        f"extended from {old:,} to {new:,} steps. With Optimizer.lr.decay_steps={lr.decay_steps}"
        f"{'' if lr == was else f', before {was.decay_steps}'}, the learning rate is {at_old:.3g}"
        f"{instead} at step {old:,}, and {at_new:.3g} at step {new:,}. If the steps take more "
        "epochs now, samples are reshuffled, and some are repeated"
    )


def is_finished(output: Path, identity: Identity) -> bool:
    """Whether a claimed folder contains this run's result, rather than one after fewer steps."""
    claim = _read_claim(output) or {}
    return (output / MARKER).is_file() and claim.get("settings") == identity["settings"]


@contextmanager
def claimed(output: Path, identity: Identity, *inputs: Source) -> Iterator[None]:
    """`claim` a folder, created if necessary, and lock it during the block.

    If the block fails before its first step, the files that it wrote are removed.

    Raises:
        UserError: see `claim`; it is an input, is inside one or contains one; its path is not UTF-8
            or not a folder; another process has locked it.
    """
    require_apart(output, *inputs)
    require_utf8(output)
    with locked(output):
        claim(output, identity)
        try:
            yield
        except BaseException:
            # What has trained a step stays: it can be resumed, or at least read.
            if not _has_results(output) and not (output / TRACE).exists():
                remove_run(output)
            raise


def begin(output: Path, identity: Identity) -> None:
    """Record that a claimed folder belongs to this run."""
    (output / MARKER).unlink(missing_ok=True)  # of a run that is extended
    with atomic_file(output / CLAIM) as work:
        work.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")


def remove_run(output: Path) -> None:
    """Delete the files that a run has written, and no others; nothing if it is not a run's
    folder."""
    if not _read_claim(output):
        return
    remove_states(output)
    listed = listed_files(output / MARKER, CHECKPOINT)
    traces = [str(p.relative_to(output)) for name in TRACES for p in output.glob(name)]
    remove_files(output, [*ATTESTATION_FILES, MARKER, *listed, *traces, CLAIM])


def remove_states(output: Path, keep: int = 0) -> None:
    """Delete the saved states of a run except the newest `keep`."""
    states = sorted((output / STATE).glob("step_*"))
    for path in states[: len(states) - keep]:
        shutil.rmtree(path)
    for folder in (KERNELS, FLIGHT):
        shutil.rmtree(output / STATE / folder, ignore_errors=True)
    with suppress(OSError):
        (output / STATE).rmdir()


def _read_claim(output: Path) -> dict[str, Any] | None:
    """The identity of the run that a folder belongs to, or None."""
    with suppress(UserError):
        claim: dict[str, Any] = read_json(output / CLAIM, "")
        if is_digest(claim.get("settings")) and is_digest(claim.get("data")):
            return claim
    return None


def _has_results(output: Path) -> bool:
    """Whether a run has saved anything that another run would destroy."""
    begun = {CLAIM, STATE, TRACE, LOG, EVENTS}
    others = {path.name for path in output.iterdir()} - begun
    return bool(others or committed_steps(output / STATE))


def read_result(output: Path) -> TrainResult:
    """Read the result of a finished run and verify its checkpoint.

    Raises:
        UserError: the checkpoint has been altered.
    """
    metrics = {"folder": output, **read_marker(output)["metrics"]}
    return checked(metrics, TrainResult, str(output / MARKER), "train the model again")


@dataclass(frozen=True)
class SampleAnswer:
    """The last answer of a validation conversation: `expected` is the data's."""

    prompt: str
    expected: str
    before: str
    after: str


def write_answers(folder: Path, answers: Sequence[SampleAnswer]) -> None:
    """Write the answers into a checkpoint's folder."""
    text = json.dumps([asdict(answer) for answer in answers], ensure_ascii=False, indent=2)
    (folder / SAMPLES).write_text(text + "\n", encoding="utf-8")


def read_answers(folder: Path) -> list[SampleAnswer]:
    """The answers in a checkpoint's folder; empty for one that was not finetuned on conversations.

    Raises:
        UserError: the file is broken.
    """
    path, hint = folder / SAMPLES, "finetune the model again"
    if not path.is_file():
        return []
    return checked(read_json(path, hint, list), list[SampleAnswer], str(path), hint)
