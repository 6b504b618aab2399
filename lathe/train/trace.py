"""Training logs: `train.jsonl` and TensorBoard events with every step, `steps.log` with
PaddleFleetX-style lines, a short line or a progress bar for the user, and the status of a TrainJob.

With its feature gate `TrainJobStatus` (2.2 and newer) Kubeflow Trainer gives the containers of a
TrainJob the address of its status server, a certificate authority and a token, and shows what they
send as `status.trainerStatus`: https://www.kubeflow.org/docs/components/trainer/
"""

import json
import logging
import math
import os
import re
import ssl
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from lathe.train.batches import Batch
from lathe_base.progress import Bar
from lathe_base.storage import atomic_file

log = logging.getLogger("lathe")

TRACE = "train.jsonl"
LOG = "steps.log"
EVENTS = "tensorboard"
STEP = re.compile(r'(?:\{"step": |global step )(\d+)')  # opens a line of either file

STATUS_URL, STATUS_AUTHORITY, STATUS_TOKEN = (
    f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN")
)
STATUS_SECONDS = 5.0
"""Minimum time between two messages; Trainer's server needs no more."""

STATUS_TIMEOUT = 5.0
MAX_INT32 = 2**31 - 1
"""The numbers of a status are 32-bit integers."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; loss in nats per token, times in seconds.

    Attributes:
        reader_seconds: part of `step_seconds` spent waiting for the batch.
        mfu: model FLOPs utilization, 0 to 1, of GPUs; see `lathe.train.speed`.
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
        try:
            from torch.utils.tensorboard import SummaryWriter  # a third of a second
        except ModuleNotFoundError:  # in the environment of Paddle
            from tensorboardX import SummaryWriter  # type: ignore[import-not-found,no-redef]
        # TensorBoard hides what an earlier attempt has written from this step on.
        self.events: Any = SummaryWriter(str(folder / EVENTS), purge_step=first)
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

    def evaluation(self, step: int, loss: float, set_losses: Mapping[str, float]) -> None:
        """Record a validation loss, nats per token, and those of the data sets of a blend."""
        perplexity = math.exp(loss)
        values = {"eval_loss": loss, "eval_perplexity": perplexity}
        values |= {f"eval_loss.{name}": value for name, value in set_losses.items()}
        self._write({"step": step, **values})
        if self.reporter:
            self.reporter.metrics(values)
        losses = {f"validation/loss/{name}": value for name, value in set_losses.items()}
        self._plot(step, {"validation/loss": loss, "validation/perplexity": perplexity} | losses)
        log.info(
            "validation at step %d: loss %.4f, perplexity %.2f%s",
            *(step, loss, perplexity),
            "".join(f"; {name} {value:.4f}" for name, value in set_losses.items()),
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


class StatusReporter:
    """Sends the latest status in a background thread; errors there never affect the training. Call
    it from one thread."""

    def __init__(self, url: str, authority: Path, token: Path) -> None:
        self._url, self._authority, self._token = url, authority, token
        self._progress: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}
        self._changed, self._ended = threading.Event(), threading.Event()
        self._fails = False
        threading.Thread(target=self._run, name="trainjob-status", daemon=True).start()

    def progress(self, steps: Bar) -> None:
        """Set the progress; a status that has not been sent yet is replaced."""
        self._progress = {
            "progressPercentage": 100 * steps.done // (steps.total or 1),
            "estimatedRemainingSeconds": min(round(steps.seconds_left()), MAX_INT32),
        }
        self._changed.set()

    def metrics(self, figures: Mapping[str, float]) -> None:
        """Add or replace metrics; non-finite ones are not sent."""
        self._metrics = {**self._metrics, **figures}
        self._changed.set()

    def close(self) -> None:
        """Send the last status immediately, without waiting for it."""
        self._ended.set()
        self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            has_ended = self._ended.is_set()
            try:
                self._send()
                self._fails = False
            # Also errors of a certificate, or of a file that is being replaced: nothing that the
            # status server does may end the training, and an error is logged once.
            except Exception as error:
                if not self._fails:
                    log.warning("cannot update the TrainJob's status: %s", error)
                self._fails = True
            if has_ended:
                return
            self._ended.wait(STATUS_SECONDS)

    def _send(self) -> None:
        """Post the status. Token and certificate authority are read again each time, because
        Trainer rotates them."""
        context = ssl.create_default_context(cafile=str(self._authority))
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
        token = self._token.read_text(encoding="ascii").strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        finite = {name: value for name, value in self._metrics.items() if math.isfinite(value)}
        status = {
            **self._progress,
            "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in finite.items()],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        body = json.dumps({"trainerStatus": status}).encode()
        with opener.open(Request(self._url, body, headers), timeout=STATUS_TIMEOUT) as answer:
            answer.read()


def open_status() -> StatusReporter | None:
    """The reporter for this process's TrainJob; None outside of one, or if Trainer does not ask for
    progress."""
    environment = [
        os.environ.get(name, "") for name in (STATUS_URL, STATUS_AUTHORITY, STATUS_TOKEN)
    ]
    if not all(environment):
        return None
    url, authority, token = environment
    return StatusReporter(url, Path(authority), Path(token))
