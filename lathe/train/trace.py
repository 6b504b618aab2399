"""What a run tells while it trains: `train.jsonl`, the seeds' log line, and the progress bar."""

import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lathe.progress import Bar
from lathe.storage import atomic_file
from lathe.train.batch import Batch

log = logging.getLogger("lathe")

TRACE = "train.jsonl"


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; loss in nats a token, times in seconds."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    step_seconds: float
    reader_seconds: float


class Trace:
    """The record of a run, from the step that it starts or resumes at."""

    def __init__(
        self, folder: Path, step: int, batch: Batch, epoch_samples: int, logging_freq: int
    ) -> None:
        self.path = folder / TRACE
        self.batch, self.epoch_samples, self.logging_freq = batch, epoch_samples, logging_freq
        self.pending: list[StepRecord] = []
        kept = [line for line in self._lines() if json.loads(line)["step"] <= step]
        with atomic_file(self.path) as work:
            work.write_text("".join(kept))
        self.file = self.path.open("a")

    def _lines(self) -> list[str]:
        """Whole lines only: a kill may have cut the last one."""
        if not self.path.exists():
            return []
        return [line for line in self.path.read_text().splitlines(True) if line.endswith("}\n")]

    def step(self, record: StepRecord, progress: Bar) -> None:
        self._write(asdict(record))
        self.pending.append(record)
        status = f"loss {record.loss:.3f}, {record.tokens_per_second:,.0f} tokens/s"
        progress.advance(1, status)
        if record.step % self.logging_freq == 0:
            log.info(self._line())
            self.pending.clear()

    def evaluation(self, step: int, loss: float) -> None:
        perplexity = math.exp(loss)
        self._write({"step": step, "eval_loss": loss, "eval_perplexity": perplexity})
        log.info("validation at step %d: loss %.4f, perplexity %.2f", step, loss, perplexity)

    def close(self) -> None:
        self.file.close()

    def _write(self, values: dict[str, Any]) -> None:
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()

    def _line(self) -> str:
        last, n = self.pending[-1], len(self.pending)
        cost = sum(r.step_seconds for r in self.pending) / n
        reader = sum(r.reader_seconds for r in self.pending) / n
        total = sum(r.tokens_per_second * r.step_seconds for r in self.pending) / n / cost
        each = total / self.batch.data_parallel
        epoch = (last.step - 1) * self.batch.total // self.epoch_samples
        return (
            f"global step {last.step}, epoch: {epoch}, batch: {last.step - 1}, "
            f"loss: {last.loss:.9f}, avg_reader_cost: {reader:.5f} sec, "
            f"avg_batch_cost: {cost:.5f} sec, speed: {1 / cost:.2f} step/s, "
            f"ips_total: {total:.0f} tokens/s, ips: {each:.0f} tokens/s, "
            f"learning rate: {last.lr:.5e}"
        )
