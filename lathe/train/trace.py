"""Training logs: `train.jsonl` and TensorBoard events with every step, `steps.log` with
PaddleFleetX-style lines, a short line or a progress bar for the user, and the status of a TrainJob.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lathe.train.batch import Batch
from lathe.train.status import open_status
from lathe_base.progress import Bar
from lathe_base.storage import atomic_file

log = logging.getLogger("lathe")

TRACE = "train.jsonl"
LOG = "steps.log"
EVENTS = "tensorboard"
STEP = re.compile(r'(?:\{"step": |global step )(\d+)')  # opens a line of either file


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; loss in nats per token, times in seconds.

    Attributes:
        reader_seconds: part of `step_seconds` spent waiting for the batch.
        mfu: model FLOPs utilization, 0 to 1, of GPUs; see `lathe.train.flops`.
        loss_scale: 1 if the loss is not scaled.
        skipped_steps: updates skipped since the run began because their gradients overflowed
            float16.
        seen_tokens: tokens read from each part of a blend since the run began.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    step_seconds: float
    reader_seconds: float
    mfu: float | None
    loss_scale: float
    skipped_steps: int
    seen_tokens: Mapping[str, int] = field(default_factory=dict)


class Trace:
    """The log of a run from the step at which it starts or resumes; entries of later steps, from an
    earlier attempt, are removed."""

    def __init__(
        self, folder: Path, step: int, batch: Batch, epoch_samples: int, logging_freq: int
    ) -> None:
        self.batch, self.epoch_samples, self.logging_freq = batch, epoch_samples, logging_freq
        self.pending: list[StepRecord] = []
        first = step + 1 if step else 0  # a run from the start evaluates at step 0 again
        self.file = _reopen(folder / TRACE, first)
        self.log = _reopen(folder / LOG, first)
        self.events = _open_events(folder / EVENTS, first)
        self.reporter = open_status()

    def step(self, record: StepRecord, progress: Bar) -> None:
        """Record a step."""
        self._write(asdict(record))
        self._plot(
            record.step,
            {
                "train/loss": record.loss,
                "train/learning_rate": record.lr,
                "train/grad_norm": record.grad_norm,
                "train/tokens_per_second": record.tokens_per_second,
                **({} if record.mfu is None else {"train/mfu": record.mfu}),
                **{f"train/seen_tokens/{name}": n for name, n in record.seen_tokens.items()},
            },
        )
        self.pending.append(record)
        parts = [f"loss {record.loss:.3f}", f"{self._mean('tokens_per_second'):,.0f} tokens/s"]
        if record.mfu is not None:
            parts.append(f"MFU {self._mean('mfu'):.0%}")
        status = ", ".join(parts)
        progress.advance(1, status)
        if self.reporter:
            values = {"loss": record.loss, "learning_rate": record.lr}
            self.reporter.metrics(values | {"tokens_per_second": record.tokens_per_second})
            self.reporter.progress(progress)
        if record.step % self.logging_freq == 0:
            self.log.write(f"{self._line()}\n")
            self.log.flush()
            progress.tell(status)
            self.pending.clear()

    def evaluation(self, step: int, loss: float, of_sets: Mapping[str, float]) -> None:
        """Record a validation loss, nats per token, and those of the data sets of a blend."""
        perplexity = math.exp(loss)
        values = {"eval_loss": loss, "eval_perplexity": perplexity}
        values |= {f"eval_loss.{name}": value for name, value in of_sets.items()}
        self._write({"step": step, **values})
        if self.reporter:
            self.reporter.metrics(values)
        losses = {f"validation/loss/{name}": value for name, value in of_sets.items()}
        self._plot(step, {"validation/loss": loss, "validation/perplexity": perplexity} | losses)
        log.info(
            "validation at step %d: loss %.4f, perplexity %.2f%s",
            *(step, loss, perplexity),
            "".join(f"; {name} {value:.4f}" for name, value in of_sets.items()),
        )

    def close(self) -> None:
        """Close the files."""
        self.file.close()
        self.log.close()
        self.events.close()
        if self.reporter:
            self.reporter.close()

    def _write(self, values: dict[str, Any]) -> None:
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()

    def _plot(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self.events.add_scalar(name, value, step)
        self.events.flush()

    def _mean(self, rate: str) -> float:
        """Mean over the pending steps, weighted by their duration."""
        seconds = sum(r.step_seconds for r in self.pending)
        return sum(float(getattr(r, rate)) * r.step_seconds for r in self.pending) / seconds

    def _line(self) -> str:
        """The pending steps in the log format of PaddleFleetX (release 2.4), followed by figures
        that it lacks."""
        last, n = self.pending[-1], len(self.pending)
        cost = sum(r.step_seconds for r in self.pending) / n
        reader = sum(r.reader_seconds for r in self.pending) / n
        total = self._mean("tokens_per_second")
        each = total / self.batch.data_parallel
        epoch = (last.step - 1) * self.batch.total // self.epoch_samples
        line = (
            f"global step {last.step}, epoch: {epoch}, batch: {last.step - 1}, "
            f"loss: {last.loss:.9f}, avg_reader_cost: {reader:.5f} sec, "
            f"avg_batch_cost: {cost:.5f} sec, speed: {1 / cost:.2f} step/s, "
            f"ips_total: {total:.0f} tokens/s, ips: {each:.0f} tokens/s, "
            f"learning rate: {last.lr:.5e}"
        )
        if last.mfu is not None:
            line += f", mfu: {self._mean('mfu'):.3f}"
        if last.loss_scale != 1:
            line += f", loss_scale: {last.loss_scale:.10g}, skipped: {last.skipped_steps}"
        if last.seen_tokens:
            seen = ", ".join(f"{name} {n}" for name, n in last.seen_tokens.items())
            line += f", seen_tokens: {seen}"
        return line


def _reopen(path: Path, step: int) -> TextIO:
    """Open to append, without the lines from `step` on; the last line may be incomplete after a
    kill."""
    lines = path.read_text(encoding="utf-8").splitlines(True) if path.exists() else []
    begun = [(STEP.match(line), line) for line in lines if line.endswith("\n")]
    kept = [line for match, line in begun if match and int(match[1]) < step]
    with atomic_file(path) as work:
        work.write_text("".join(kept), encoding="utf-8")
    return path.open("a", encoding="utf-8")


def _open_events(folder: Path, step: int) -> Any:
    """The TensorBoard writer: torch's, or tensorboardX's in an environment without torch."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # a third of a second
    except ModuleNotFoundError:
        from tensorboardX import SummaryWriter  # type: ignore[import-not-found,no-redef]
    return SummaryWriter(str(folder), purge_step=step)
