"""The training loop, used by pretraining, by finetuning after pruning and by QAT."""

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lathe.data.tokens import TokenDataset
from lathe.errors import UserError
from lathe.model.gpt import GPT
from lathe.progress import bar
from lathe.settings import Recipe
from lathe.train.batch import resolve_batch
from lathe.train.batches import EvalBatches, TrainBatches
from lathe.train.optimizer import learning_rate, make_optimizer, set_learning_rate
from lathe.train.state import load_state, save_state, saved_steps
from lathe.train.trace import StepRecord, Trace
from lathe.train.workers import Workers

log = logging.getLogger("lathe")

STATE = "state"


@dataclass
class Progress:
    """Where a run is; saved and restored whole. Losses in nats a token, NaN where unknown."""

    step: int = 0
    loss: float = math.nan
    first_eval_loss: float = math.nan
    eval_loss: float = math.nan
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """Trains `model` in place to `Engine.max_steps`, with state and trace under `output`.

    Args:
        after_step: called after every update, for range observers and the like.

    Raises:
        UserError: batch sizes that do not divide, data too small, a loss that is not finite.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: GPT,
        data: TokenDataset,
        output: Path,
        workers: Workers,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.recipe, self.engine, self.workers = recipe, recipe.Engine, workers
        self.output, self.after_step = output, after_step
        self.batch = resolve_batch(recipe, workers.size)
        self.seq_len = recipe.Data.Train.dataset.max_seq_len
        self.batches = TrainBatches(recipe, data, self.batch, workers.rank)
        self.validation = EvalBatches(recipe, data, self.batch.micro, self.engine.eval_iters)
        if not len(self.validation):
            log.warning("the validation part cannot fill one sequence: no validation loss")
        self.model = model.to(workers.device)
        self.model.set_recompute(recipe.Model.recompute)
        frozen = recipe.Compress.Quantization.freeze_embedding
        for embedding in (self.model.wte, self.model.wpe):
            embedding.requires_grad_(not frozen)
        self.optimizer = make_optimizer(self.model, recipe.Optimizer)
        self.parallel: nn.Module = self.model
        if workers.size > 1:
            self.parallel = DistributedDataParallel(self.model, forward_sync_buffers=False)
        self.forward = torch.compile(self.parallel) if self.engine.compile else self.parallel
        precision = self.engine.mix_precision
        self.dtype = getattr(torch, precision.dtype)
        self.scaler = torch.amp.GradScaler(
            workers.device.type, precision.scale_loss, enabled=self.dtype == torch.float16
        )
        self.at = Progress()

    def run(self) -> Progress:
        """Train on from the newest saved state, or from the start."""
        self._resume()
        trace = self._open_trace()
        if self.at.step == 0:
            self.at.first_eval_loss = self._evaluate(trace)
        with bar("train", self.engine.max_steps, logs=False) as progress:
            progress.advance(self.at.step)
            while self.at.step < self.engine.max_steps:
                record = self._train_step()
                if trace:
                    trace.step(record, progress)
                step = self.at.step
                if step % self.engine.eval_freq == 0 or step == self.engine.max_steps:
                    self._evaluate(trace)
                if step % self.engine.save_load.save_steps == 0:
                    self._save()
        if trace:
            trace.close()
        return self.at

    def _train_step(self) -> StepRecord:
        started, reading = time.perf_counter(), 0.0
        step, accumulate = self.at.step, self.batch.accumulate_steps
        rate = learning_rate(step + 1, self.recipe.Optimizer.lr)
        set_learning_rate(self.optimizer, rate)
        self.model.train()
        total = torch.zeros((), device=self.workers.device)
        for i in range(accumulate):
            read_from = time.perf_counter()
            tokens = self.batches(step, i).to(self.workers.device)
            reading += time.perf_counter() - read_from
            with self._synchronize_gradients(last=i == accumulate - 1):
                loss = self._loss(self.forward, tokens) / accumulate
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        loss_value = float(self.workers.mean(total))
        if not math.isfinite(loss_value) and not self.scaler.is_enabled():
            raise UserError(
                f"loss is {loss_value} at step {step + 1}",
                "lower Optimizer.lr.max_lr, lengthen the warm-up, or look at the data",
            )
        self.scaler.unscale_(self.optimizer)
        clip = self.recipe.Optimizer.grad_clip.clip_norm
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), clip))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.after_step is not None:
            self.after_step()
        seconds, tokens_seen = time.perf_counter() - started, self.batch.total * self.seq_len
        self.at.step, self.at.loss = step + 1, loss_value
        self.at.tokens += tokens_seen
        self.at.seconds += seconds
        speed = tokens_seen / seconds
        return StepRecord(step + 1, loss_value, rate, norm, speed, seconds, reading)

    def _synchronize_gradients(self, last: bool) -> nullcontext[None]:
        """Workers exchange gradients once a step, after the last accumulation."""
        if last or not isinstance(self.parallel, DistributedDataParallel):
            return nullcontext()
        return self.parallel.no_sync()  # type: ignore[return-value]

    def _loss(self, model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        with torch.autocast(self.workers.device.type, self.dtype, self.dtype != torch.float32):
            return next_token_loss(model, tokens)

    @torch.no_grad()
    def _evaluate(self, trace: Trace | None) -> float:
        """Mean loss over `Engine.eval_iters` validation batches, the same ones every time."""
        self.model.eval()
        sums = torch.zeros(2, device=self.workers.device)  # (loss * samples, samples)
        for i in range(self.workers.rank, len(self.validation), self.workers.size):
            tokens = self.validation[i].to(self.workers.device)
            sums[0] += self._loss(self.model, tokens) * len(tokens)
            sums[1] += len(tokens)
        sums = self.workers.mean(sums)
        self.at.eval_loss = float(sums[0] / sums[1])
        if trace and len(self.validation):
            trace.evaluation(self.at.step, self.at.eval_loss)
        return self.at.eval_loss

    def _open_trace(self) -> Trace | None:
        if not self.workers.is_first:
            return None
        epoch_samples = self.batches.samples_per_epoch
        frequency = self.engine.logging_freq
        return Trace(self.output, self.at.step, self.batch, epoch_samples, frequency)

    def _save(self) -> None:
        """All workers together: the first writes everyone's RNG state beside its own model."""
        generators = self.workers.gather(_rng_state(self.workers.device))
        if self.workers.is_first:
            extra = {"progress": vars(self.at), "scaler": self.scaler.state_dict()}
            folder, keep = self.output / STATE, self.engine.save_load.keep
            state = (self.at.step, self.model, self.optimizer, generators, extra, keep)
            save_state(folder, *state)
        self.workers.barrier()

    def _resume(self) -> None:
        torch.manual_seed(self.recipe.Global.seed + self.workers.rank)
        states = saved_steps(self.output / STATE)
        if not states:
            return
        generators, extra = load_state(states[-1], self.model, self.optimizer)
        self.at = Progress(**extra["progress"])
        self.scaler.load_state_dict(extra["scaler"])
        if len(generators) == self.workers.size:
            _set_rng_state(self.workers.device, generators[self.workers.rank])
        if self.workers.is_first:
            log.info("resuming at step %d from %s", self.at.step, states[-1])


def next_token_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Mean cross-entropy, nats a token, of predicting tokens[:, 1:] of (B, T + 1) tokens."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _rng_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_rng_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
