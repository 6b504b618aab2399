"""The training loop, independent of the backend that computes its steps."""

import gc
import logging
import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lathe.data.tokens import TokenDataset
from lathe.train.batches import EvalBatches, TrainBatches, resolve_batch
from lathe.train.group import Group
from lathe.train.schedule import LossScale, learning_rate
from lathe.train.trace import StepRecord, Trace
from lathe_base.artifacts.kinds import STATE
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, Preempted, UserError
from lathe_base.progress import Bar, bar

log = logging.getLogger("lathe")

GARBAGE_STEPS = 50
"""Steps between two collections of young garbage, by all processes after the same step; every 20th
is of all garbage."""


@dataclass
class Progress:
    """Progress of a run, part of its saved state, where `best_eval_loss` may be absent. Losses in
    nats per token, NaN if unknown."""

    step: int = 0
    updates: int = 0
    loss: float = math.nan
    first_eval_loss: float = math.nan
    eval_loss: float = math.nan
    tokens: int = 0
    seconds: float = 0.0
    best_eval_loss: float = math.nan

    @property
    def speed(self) -> float:
        """Tokens per second; NaN before the first step."""
        return self.tokens / self.seconds if self.seconds else math.nan

    def evaluated(self, loss: float) -> None:
        """Record a validation loss, also as the best one if it is lower than all before.

        The loss before counts too: a state saved by an earlier version has no best one.
        """
        known = (self.best_eval_loss, self.eval_loss, loss)
        self.best_eval_loss = min((x for x in known if not math.isnan(x)), default=math.nan)
        self.eval_loss = loss


class StopSaveFlags(NamedTuple):
    """Requests to stop or save; combined, what any process has requested."""

    stop: bool
    save: bool


@dataclass(frozen=True)
class Gradients:
    """Results of a step's backward passes.

    Attributes:
        loss, norm: mean loss and gradient norm of the global batch; not finite after an overflow.
        flags: what any process has requested.
        bad: this process's micro-batches that caused a value that is not finite.
    """

    loss: float
    norm: float
    flags: StopSaveFlags
    bad: Sequence[int] = ()

    @property
    def are_finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True)
class Launched:
    """A step whose results have not been read.

    Attributes:
        step: counted from 1.
        started: when its batches were requested, by `time.perf_counter`.
        reader_seconds: waited for the batches.
        read: waits for the results.
    """

    step: int
    lr: float
    started: float
    reader_seconds: float
    read: Callable[[], Gradients]


class Loop(ABC):
    """Trains to `Engine.max_steps`, with saved states and logs under `output`.

    A GPU computes the kernels that the host has launched one after another. To keep it busy, the
    host reads the results of a step only when it has launched the next one; so `update` must skip
    an overflow by itself. What is logged, evaluated or saved is always a step that has been read.

    A backend implements the abstract methods and `mfu_of_speed`, the MFU of one token per second,
    if the peak of its devices is known.

    Attributes:
        at: after the last step whose results have been read.
        lag: steps that may be in flight while the next one is launched. On a CPU none: a step is
            computed when its call returns.

    Raises:
        UserError: incompatible batch sizes, too little data, or a loss that is not finite.
        Preempted: SIGTERM was received and the state is saved.
    """

    mfu_of_speed: float | None = None
    set_losses: Mapping[str, float] = {}
    """The last validation loss on each data set of a blend with conversations."""

    def __init__(self, recipe: Recipe, data: TokenDataset, output: Path, workers: Group) -> None:
        self.recipe, self.engine, self.output, self.group = recipe, recipe.Engine, output, workers
        self.batch = resolve_batch(recipe, workers.data_size)
        self.seq_len = recipe.Data.Train.dataset.max_seq_len
        self.batches = TrainBatches(recipe, data, self.batch, workers.data_rank)
        self.validation = EvalBatches(
            recipe, data, self.batch.total, self.engine.eval_iters, self.batch.micro
        )
        if not len(self.validation):
            log.warning("validation data is shorter than one sequence: no validation loss")
        self.loss_scale = LossScale.of(self.engine.mix_precision)
        self.at = Progress()
        self.lag = 0
        self._in_flight: deque[Launched] = deque()
        self._read = 0.0  # when results were last read
        self._saved = time.monotonic()

    @abstractmethod
    def resume(self) -> None:
        """Restore the newest saved state, if there is one."""

    @abstractmethod
    def save(self) -> None:
        """Save the state at `self.at.step`; may return before it is written."""

    @abstractmethod
    def poll_pending_save(self, wait: bool) -> None:
        """Commit a save that has been written in the background."""

    @abstractmethod
    def backward(
        self, step: int, batches: Sequence[NDArray[np.int64]], flags: StopSaveFlags
    ) -> Callable[[], Gradients]:
        """Compute gradients, times the loss scale, of all processes' micro-batches (micro, T + 1);
        what is returned waits for the results.

        Args:
            step: number of the update, counted from 0.
        """

    @abstractmethod
    def update(self, rate: float) -> None:
        """One optimizer step at this learning rate, clipped to `Optimizer.grad_clip`; none if the
        loss or the gradients are not finite."""

    @abstractmethod
    def after_step(self) -> None:
        """Called after every step, updated or skipped: clear gradients."""

    @abstractmethod
    def validation_loss(self) -> float:
        """Mean loss over `Engine.eval_iters` global batches of validation samples, the same ones
        every time; the same number for any micro-batch size."""

    def run(self) -> Progress:
        """Train from the newest saved state, or from the start, and save the final state."""
        self.resume()
        steps, rates = self.engine.max_steps, self.recipe.Optimizer.lr
        if steps and self.group.is_first:
            self.batches.announce(steps)
        if 0 < steps < rates.warmup_steps:
            log.warning(
                "training ends within the warm-up of %g steps: the learning rate reaches %.2g, not "
                "Optimizer.lr.max_lr %.2g. For the full schedule, set Optimizer.lr.decay_steps=%d",
                rates.warmup_steps,
                learning_rate(steps, rates),
                rates.max_lr,
                steps,
            )
        with ExitStack() as stack:
            # What has to end however the loop ends: the reading thread, the handler of SIGTERM, the
            # collector of garbage, the progress bar, and in the first process the logs.
            stack.enter_context(closing(self.batches))
            stop_requested = stack.enter_context(watch_for_preemption())
            stack.enter_context(garbage_waits())
            progress = stack.enter_context(bar("step", steps, logs=False, first=self.at.step))
            trace = None
            if self.group.is_first:
                epoch, every = self.batches.samples_per_epoch, self.engine.logging_freq
                trace = Trace(self.output, self.at.step, self.batch, epoch, every)
                stack.enter_context(closing(trace))
            if self.at.step == 0:
                self.at.first_eval_loss = self._evaluate(trace)
            # An iteration launches a step and reads it or, on a GPU, the one before it.
            while self.at.step < steps:
                # Saves by time follow the first process's clock: clocks differ.
                waited = time.monotonic() - self._saved
                is_due = self.group.is_first and waited >= 60 * self.engine.save_load.save_minutes
                step = self._launch(StopSaveFlags(stop_requested(), is_due))
                if step % GARBAGE_STEPS == 0:  # nobody else collects, see `garbage_waits`
                    gc.collect(2 if step % (20 * GARBAGE_STEPS) == 0 else 1)
                ended = step == steps
                evaluates = step % self.engine.eval_freq == 0 or ended
                saves = step % self.engine.save_load.save_steps == 0 or ended
                # All steps are read before an evaluation or a save, and when one is requested.
                flags = self._settle(0 if evaluates or saves else self.lag, trace, progress)
                if evaluates:
                    self._evaluate(trace)
                # Before the last save: what is saved at the end becomes a checkpoint.
                if ended:
                    self._require_finite_loss()
                if saves or any(flags):
                    self.save()
                    self._saved = time.monotonic()
                self.poll_pending_save(wait=False)
                if flags.stop and not ended:
                    break
            if not steps:  # a run of no steps still writes a checkpoint, of what it started from
                self._require_finite_loss()
                self.save()
            self.poll_pending_save(wait=True)
        if self.at.step < steps:
            raise Preempted(
                f"saved at step {self.at.step} in {self.output}; run the same command to resume"
            )
        return self.at

    def figures(self) -> dict[str, Any]:
        """The figures of the training so far, for the metadata of its checkpoint."""
        seen, speed = self.batches.seen_tokens(self.at.step), self.at.speed
        mfu = {} if self.mfu_of_speed is None else {"mfu": speed * self.mfu_of_speed}
        return {
            "step": self.at.step,
            "loss": self.at.loss,
            "first_eval_loss": self.at.first_eval_loss,
            "eval_loss": self.at.eval_loss,
            "best_eval_loss": self.at.best_eval_loss,
            "tokens_per_second": speed,
            "samples_per_second": speed / self.seq_len,
            **mfu,
            **{f"seen_tokens.{name}": tokens for name, tokens in seen.items()},
        }

    def _launch(self, flags: StopSaveFlags) -> int:
        """Begin the next step, and return its number from 1."""
        step = self.at.step + len(self._in_flight)
        started = time.perf_counter()
        rate = learning_rate(step + 1, self.recipe.Optimizer.lr)
        batches = [self.batches(step, i) for i in range(self.batch.accumulate_steps)]
        reading = time.perf_counter() - started
        # The flags travel with the loss, in the one sum over all processes that a step needs
        # anyway: all of them save and stop after the same step.
        read = self.backward(step, batches, flags)
        self.update(rate)
        self.after_step()
        self._in_flight.append(Launched(step + 1, rate, started, reading, read))
        return step + 1

    def _settle(self, lag: int, trace: Trace | None, progress: Bar) -> StopSaveFlags:
        """Read and log the results of all but the last `lag` steps, or of all if a process asks to
        stop or to save; returns what any process has requested."""
        stop = save = False
        while len(self._in_flight) > (0 if stop or save else lag):
            launched = self._in_flight.popleft()
            gradients = launched.read()
            if gradients.are_finite:
                self.at.updates += 1
            elif self.loss_scale.exhausted:  # else it is an overflow, and the update was skipped
                self._stop_at_non_finite(launched.step, gradients.bad)
            self.loss_scale.update(gradients.are_finite)
            # A step that was in flight began, on the device, when the one before it ended.
            now, tokens = time.perf_counter(), self.batch.total * self.seq_len
            seconds = now - max(launched.started, self._read)
            self._read = now
            self.at.step, self.at.loss = launched.step, gradients.loss
            self.at.tokens += tokens
            self.at.seconds += seconds
            speed = tokens / seconds
            record = StepRecord(
                step=launched.step,
                loss=gradients.loss,
                lr=launched.lr,
                grad_norm=gradients.norm,
                tokens_per_second=speed,
                step_seconds=seconds,
                reader_seconds=launched.reader_seconds,
                mfu=None if self.mfu_of_speed is None else speed * self.mfu_of_speed,
                loss_scale=self.loss_scale.value,
                skipped_steps=self.loss_scale.skipped_steps,
                seen_tokens=self.batches.seen_tokens(launched.step),
            )
            if trace:
                trace.step(record, progress)
            stop, save = stop or gradients.flags.stop, save or gradients.flags.save
        return StopSaveFlags(stop, save)

    def _stop_at_non_finite(self, step: int, bad: Sequence[int]) -> None:
        """Raise UserError with rank and documents of the micro-batches that caused it."""
        documents = [d for i in bad for d in self.batches.documents(step - 1, i)]
        reports = enumerate(self.group.gather(documents))
        causes = [f"rank {rank}, documents {', '.join(names)}" for rank, names in reports if names]
        raise UserError(
            f"step {step}: loss or gradient is not finite on {'; '.join(causes)}",
            "check these documents; lower Optimizer.lr.max_lr or lengthen the warm-up. The last "
            f"checkpoint is in {self.output / STATE}",
            Code.NOT_FINITE,
        )

    def _require_finite_loss(self) -> None:
        """Raise UserError if the trained model's loss is not finite, before its state is saved and
        becomes a checkpoint."""
        if len(self.validation) and not math.isfinite(self.at.eval_loss):
            raise UserError(
                f"step {self.at.step}: the validation loss is {self.at.eval_loss}",
                "start from a checkpoint whose loss is finite, or train with a lower "
                "Optimizer.lr.max_lr; when quantizing, keep linears with large weights in float "
                "(Compress.Quantization.skip_tensor_map)",
                Code.NOT_FINITE,
            )

    def _evaluate(self, trace: Trace | None) -> float:
        self.at.evaluated(self.validation_loss())
        if trace and len(self.validation):
            trace.evaluation(self.at.step, self.at.eval_loss, self.set_losses)
        return self.at.eval_loss


@contextmanager
def garbage_waits() -> Iterator[None]:
    """Python collects no garbage by itself: it would stop one process or another at any step, and
    all others would wait for that one in the next collective."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def watch_for_preemption() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM was received; the old handler is restored at
    the end. After a SIGTERM later ones are ignored, so that the process can end with its status.

    Always False outside the main thread, where Python delivers no signals.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: requested.set())
    try:
        yield requested.is_set
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if requested.is_set() else before)
