"""The steps that all training stages share: claim the folder, train, write the checkpoint."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.folder import checkpoint_digest, training_origin
from lathe.model.gpt import GPT
from lathe.model.lora import is_adapter
from lathe.train.batches import open_data, resolve_batch
from lathe.train.distill import Teacher
from lathe.train.memory import require_batches
from lathe.train.nccl import flight_recorder
from lathe.train.parallel import Weights, build_stages, compile_blocks
from lathe.train.result import (
    FLIGHT,
    KERNELS,
    TrainResult,
    begin,
    claimed,
    is_finished,
    read_result,
    remove_states,
    run_identity,
)
from lathe.train.state import load_tensors
from lathe.train.trainer import Trainer
from lathe.train.workers import Workers, join_workers, tensor_float32
from lathe_base.artifacts.kinds import STATE
from lathe_base.artifacts.metadata import Origin
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError

log = logging.getLogger("lathe")

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class TrainingJob:
    """A model to train, its hooks, and the metadata of its checkpoint.

    Attributes:
        parent: folder of the parent checkpoint.
        model: the full model, on the CPU; on the meta device if `weights` provides the values.
        weights: see `lathe.train.parallel.Weights`; None: the model's own.
        figures: further metrics of the checkpoint.
        before_save: final change to the whole trained model, e.g. writing scales into its plan.
        write_more: writes further files of the checkpoint; see `write_folder`. Called with the
            folder and the model after `before_save`.
        rebuild: builds the whole model again, for one whose states hold only what is trained.
    """

    stage: str
    model: GPT
    tokenizer: Tokenizer
    parent: Path | None = None
    weights: Weights | None = None
    before_save: Callable[[GPT], None] | None = None
    write_more: Callable[[Path, GPT], Sequence[str]] | None = None
    rebuild: Callable[[], GPT] | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


def run_training(
    recipe: Recipe,
    data: Path,
    output: Path,
    inputs: dict[str, str],
    make: Callable[[Workers], TrainingJob],
    teacher: Path | None = None,
    sources: Sequence[Path] = (),
) -> TrainResult:
    """Train what `make` builds and write the checkpoint `output`; return it at once if it is
    finished.

    Args:
        inputs: digests, or values, of what the run depends on in addition to the data and to the
            settings of the recipe that always matter.
        make: builds model and hooks, in every process; not called when `output` is finished.
        teacher: the checkpoint to distill from (`Compress.Distill`).
        sources: other folders that `make` reads.

    Raises:
        UserError: `output` belongs to a run with other settings or inputs; see also `Trainer`.
        Preempted: SIGTERM was received; the same call resumes.
    """
    if teacher is not None:
        inputs = {**inputs, "teacher": checkpoint_digest(teacher)}
    flight = output / STATE / FLIGHT
    with flight_recorder(flight), join_workers(recipe) as workers:
        identity = run_identity(recipe, inputs, data, workers.data_size)
        require_batches(recipe, resolve_batch(recipe, workers.data_size).total)
        # The first process locks the folder for the whole run; the others wait until it has done
        # so, and learn from it whether there is anything to do.
        claim_lock = claimed(output, identity, data, *sources, teacher)
        with claim_lock if workers.is_first else nullcontext():
            workers.barrier()
            if workers.agree(lambda: is_finished(output, identity)):
                log.info("%s is finished: nothing to do", output)
                return workers.agree(lambda: read_result(output))
            # Build the model, and divide it: each process keeps its own part of the weights.
            work = make(workers)
            config = work.model.config
            tokens = open_data(data, recipe, config, work.tokenizer)
            origin = training_origin(work.parent, tokens)
            # Not kept in a variable: the whole weights are freed when the stages have their parts.
            stages = build_stages(
                work.model, work.weights or _state_weights(work.model), recipe, workers
            )
            guide = None
            if teacher is not None:
                folder = teacher
                guide = make_teacher(recipe, lambda: load_checkpoint(folder).model, config, workers)
            # All that may be wrong with the input has been reported: from here on files are
            # written.
            if workers.is_first:
                begin(output, identity)
            if workers.device.type == "cuda":
                flight.mkdir(parents=True, exist_ok=True)
            with tensor_float32(workers.device), kept_kernels(output):
                trainer = Trainer(recipe, stages, tokens, output, workers, guide)
                trainer.run()

            # From the last saved state, in which all processes have put their parts.
            def write() -> TrainResult:
                state = trainer.states.folder.last()
                _write_checkpoint(recipe, output, work, origin, trainer.figures(), state)
                return read_result(output)

            return workers.agree(write)


@contextmanager
def kept_kernels(output: Path) -> Iterator[None]:
    """Keep what `Engine.compile` compiles with the run's states, unless the environment names a
    place: a run that resumes in another pod or container need not wait for it again."""
    if CACHE in os.environ:
        yield
        return
    os.environ[CACHE] = str(output.resolve() / STATE / KERNELS)
    try:
        yield
    finally:
        del os.environ[CACHE]


def _state_weights(model: GPT) -> Weights:
    """The model's own weights. What is returned keeps them, even when `model` moves elsewhere."""
    tensors = model.state_dict()
    return lambda name, shape: tensors[name]


def make_teacher(
    recipe: Recipe, load: Callable[[], GPT], student: GPTConfig, workers: Workers
) -> Teacher:
    """The full teacher of `Compress.Distill`, on this process's device.

    Args:
        load: called after the layout is known to support distillation.

    Raises:
        UserError: tensor or pipeline parallelism, or a teacher that is incompatible with the
            student.
    """
    if workers.mesh["mp"].size() > 1 or workers.mesh["pp"].size() > 1:
        raise UserError(
            "distillation does not support Distributed.mp_degree or pp_degree above 1",
            "use dp_degree or sharding, or leave Compress.Distill.teacher empty",
            Code.LAYOUT,
        )
    precision = recipe.Engine.mix_precision
    dtype = getattr(torch, precision.dtype) if precision.is_pure else torch.float32
    teacher = Teacher(load().to(workers.device, dtype), recipe.Compress.Distill)
    teacher.check(student)
    if recipe.Engine.compile:
        compile_blocks(teacher.model.blocks)
    return teacher


def _write_checkpoint(
    recipe: Recipe,
    output: Path,
    work: TrainingJob,
    origin: Origin,
    metrics: dict[str, Any],
    state: Path,
) -> None:
    """Write the full model, gathered from the last saved state, which is then deleted."""
    model = work.rebuild() if work.rebuild else work.model.to_empty(device="cpu")
    tensors = model.state_dict()
    saved = [name for name in tensors if is_adapter(name)] if work.rebuild else [*tensors]
    load_tensors(state, {f"model.{name}": tensors[name] for name in saved})
    if work.before_save is not None:
        work.before_save(model)
    metrics = {**metrics, **work.figures, "n_params": model.config.n_params}

    def write_more(folder: Path) -> Sequence[str]:
        return work.write_more(folder, model) if work.write_more else ()

    save_checkpoint(output, model, work.tokenizer, work.stage, recipe, origin, metrics, write_more)
    remove_states(output, keep=recipe.Engine.save_load.keep_final)
