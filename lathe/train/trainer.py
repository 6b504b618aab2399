"""The training loop, used by pretraining, by finetuning after pruning and by QAT."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lathe.data.tokens import TokenDataset
from lathe.errors import Preempted, UserError
from lathe.progress import bar
from lathe.settings import Recipe
from lathe.train import state
from lathe.train.batch import resolve_batch
from lathe.train.batches import EvalBatches, TrainBatches
from lathe.train.distill import Teacher
from lathe.train.flops import peak_flops
from lathe.train.gradients import (
    LossScale,
    TiedEmbedding,
    scale_gradients,
    settle_partial,
    squared_norm,
)
from lathe.train.optimizer import make_optimizer, set_learning_rate, set_step
from lathe.train.parallel import Stage
from lathe.train.passes import Passes, PipelinePasses
from lathe.train.preemption import watch_for_preemption
from lathe.train.saved import STATE, saved_steps
from lathe.train.schedule import learning_rate
from lathe.train.trace import StepRecord, Trace
from lathe.train.workers import DIMS, Workers

log = logging.getLogger("lathe")


@dataclass
class Progress:
    """Where a run is; saved and restored whole. Losses in nats a token, NaN where unknown."""

    step: int = 0
    updates: int = 0
    loss: float = math.nan
    first_eval_loss: float = math.nan
    eval_loss: float = math.nan
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """Trains this process's `stages` to `Engine.max_steps`, with state and trace under `output`.

    Args:
        after_step: called with every stage after every update, for range observers and the like.
        teacher: makes the training loss a distillation loss; validation stays cross-entropy.

    Raises:
        UserError: batch sizes that do not divide, data too small, a loss that is not finite.
        Preempted: SIGTERM came; the state is saved.
    """

    def __init__(
        self,
        recipe: Recipe,
        stages: Sequence[Stage],
        data: TokenDataset,
        output: Path,
        workers: Workers,
        after_step: Callable[[Stage], None] | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.recipe, self.engine, self.workers = recipe, recipe.Engine, workers
        self.output, self.stages, self.after_step = output, stages, after_step
        self.batch = resolve_batch(recipe, workers.data_size)
        self.seq_len = recipe.Data.Train.dataset.max_seq_len
        self.batches = TrainBatches(recipe, data, self.batch, workers.data_rank)
        self.validation = EvalBatches(recipe, data, self.batch.micro, self.engine.eval_iters)
        if not len(self.validation):
            log.warning("the validation part cannot fill one sequence: no validation loss")
        frozen = recipe.Compress.Quantization.freeze_embedding
        for name, parameter in self._named_parameters():
            parameter.requires_grad_(not (frozen and name in ("wte.weight", "wpe.weight")))
        self.parameters = [p for _, p in self._named_parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self._named_parameters(), recipe.Optimizer)
        self.tied = TiedEmbedding(stages, workers)
        self.passes: Passes | PipelinePasses
        if workers.mesh["pp"].size() > 1:
            self.passes = PipelinePasses(stages, recipe, self.batch, workers)
        else:
            self.passes = Passes(stages[0], recipe.Distributed.sharding.sharding_stage, teacher)
        precision = self.engine.mix_precision
        self.loss_scale = LossScale(
            precision.scale_loss if precision.dtype == "float16" else 1.0,
            precision.use_dynamic_loss_scaling,
        )
        config = stages[0].gpt.config
        peak = peak_flops(workers.device, stages[0].dtype) * workers.size
        self.mfu_of_speed = config.flops_per_token(self.seq_len) / peak
        self.states = state.States(output / STATE, self.engine.save_load.keep, workers)
        self.at = Progress()

    def run(self) -> Progress:
        """Train on from the newest saved state, or from the start, and leave the last one saved."""
        self._resume()
        steps = self.engine.max_steps
        with ExitStack() as open_ones:
            open_ones.enter_context(closing(self.batches))
            asked_to_end = open_ones.enter_context(watch_for_preemption())
            progress = open_ones.enter_context(bar("train", steps, logs=False))
            trace = self._open_trace()
            if trace:
                open_ones.enter_context(closing(trace))
            if self.at.step == 0:
                self.at.first_eval_loss = self._evaluate(trace)
            progress.advance(self.at.step)
            while self.at.step < steps:
                record, preempted = self._train_step(asked_to_end())
                if trace:
                    trace.step(record, progress)
                ended = record.step == steps
                if record.step % self.engine.eval_freq == 0 or ended:
                    self._evaluate(trace)
                if record.step % self.engine.save_load.save_steps == 0 or ended or preempted:
                    self._save()
                self.states.poll()
                if preempted and not ended:
                    break
            self.states.wait()
        if self.at.step < steps:
            raise Preempted(
                f"saved at step {self.at.step} in {self.output}; the same command goes on"
            )
        return self.at

    def _train_step(self, preempted: bool) -> tuple[StepRecord, bool]:
        """One update; also tells whether any process was asked to end."""
        started, step = time.perf_counter(), self.at.step
        rate = learning_rate(step + 1, self.recipe.Optimizer.lr)
        set_learning_rate(self.optimizer, rate)
        for stage in self.stages:
            stage.train()
        batches = [
            self._to_device(self.batches(step, i)) for i in range(self.batch.accumulate_steps)
        ]
        reading = time.perf_counter() - started
        losses = self.passes.train(batches, self.loss_scale.value)  # (accumulate_steps,)
        settle_partial(self.parameters)
        self.tied.settle()
        counted = self.parameters
        if self.tied.is_second_copy:
            counted = [p for p in counted if p is not self.tied.table]
        norm_share = squared_norm(counted, self.workers.replicas.size(), self.workers.device)
        copies = self.workers.data_size * self.workers.mesh["mp"].size()
        shares = torch.stack(
            [losses.sum() / copies, norm_share, torch.tensor(float(preempted)).to(losses.device)]
        )
        loss, squares, asked = self.workers.sum(shares).tolist()
        norm = math.sqrt(squares) / self.loss_scale.value if squares >= 0 else math.nan
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            clip = self.recipe.Optimizer.grad_clip.clip_norm
            factor = min(1.0, clip / (norm + 1e-6)) / self.loss_scale.value
            if factor != 1.0:
                scale_gradients(self.parameters, factor)
            self.optimizer.step()
            self.at.updates += 1
        elif self.loss_scale.exhausted:
            self._stop_at_non_finite(losses, norm_share)
        self.loss_scale.update(finite)
        self.optimizer.zero_grad(set_to_none=True)
        if self.after_step is not None:
            for stage in self.stages:
                self.after_step(stage)
        seconds, tokens = time.perf_counter() - started, self.batch.total * self.seq_len
        self.at.step, self.at.loss = step + 1, loss
        self.at.tokens += tokens
        self.at.seconds += seconds
        speed = tokens / seconds
        record = StepRecord(
            step=step + 1,
            loss=loss,
            lr=rate,
            grad_norm=norm,
            tokens_per_second=speed,
            step_seconds=seconds,
            reader_seconds=reading,
            mfu=speed * self.mfu_of_speed,
            loss_scale=self.loss_scale.value,
            skipped_steps=self.loss_scale.skipped_steps,
        )
        return record, asked > 0

    def _stop_at_non_finite(self, losses: Tensor, norm_share: Tensor) -> None:
        """Raise with the rank and the documents of the micro-batches that are to blame."""
        bad = [i for i, loss in enumerate(losses.tolist()) if not math.isfinite(loss)]
        if not bad and not math.isfinite(float(norm_share)):
            bad = list(range(len(losses)))
        documents = [d for i in bad for d in self.batches.documents(self.at.step, i)]
        everywhere: list[list[str]] = [[] for _ in range(self.workers.size)]
        dist.all_gather_object(everywhere, documents, group=self.workers.files)
        places = [f"rank {r}, documents {', '.join(d)}" for r, d in enumerate(everywhere) if d]
        raise UserError(
            f"step {self.at.step + 1}: loss or gradient is not finite on {'; '.join(places)}",
            "look at these documents; lower Optimizer.lr.max_lr or lengthen the warm-up. The last "
            f"saved state is in {self.output / STATE}",
        )

    @torch.no_grad()
    def _evaluate(self, trace: Trace | None) -> float:
        """Mean loss over `Engine.eval_iters` validation batches, the same ones every time.

        Every process makes the same number of passes, since a pass may need all of them: what is
        beyond the last batch is the first one again, and does not count.
        """
        for stage in self.stages:
            stage.eval()
        sums = torch.zeros(2, device=self.workers.device)  # (loss * samples, samples)
        for first in range(0, len(self.validation), self.workers.data_size):
            index = first + self.workers.data_rank
            counts = index < len(self.validation) and self.stages[-1].is_last
            tokens = self._to_device(self.validation[index if index < len(self.validation) else 0])
            loss = self.passes.evaluate(tokens)
            if counts:
                sums += torch.stack([loss * len(tokens), torch.full_like(loss, len(tokens))])
        total, samples = self.workers.sum(sums).tolist()
        self.at.eval_loss = total / samples if samples else math.nan
        if trace and samples:
            trace.evaluation(self.at.step, self.at.eval_loss)
        return self.at.eval_loss

    def _named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [pair for stage in self.stages for pair in stage.gpt.named_parameters()]

    def _to_device(self, tokens: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(tokens)
        if self.workers.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.workers.device, non_blocking=True)

    def _open_trace(self) -> Trace | None:
        if not self.workers.is_first:
            return None
        epoch_samples = self.batches.samples_per_epoch
        frequency = self.engine.logging_freq
        return Trace(self.output, self.at.step, self.batch, epoch_samples, frequency)

    def _tensors(self) -> dict[str, Tensor]:
        return state.model_tensors(self.stages) | state.optimizer_tensors(
            self.stages, self.optimizer
        )

    def _save(self) -> None:
        extra = {
            "layout": list(self.workers.mesh.shape),
            "progress": asdict(self.at),
            "loss_scale": asdict(self.loss_scale),
        }
        tensors = self._tensors() | state.rng_tensors(self.workers)
        self.states.save(self.at.step, tensors, extra)

    def _resume(self) -> None:
        saved = saved_steps(self.output / STATE)
        card = state.read_card(saved[-1]) if saved else None
        if card:
            self.at = Progress(**card["progress"])
            self.loss_scale = LossScale(**card["loss_scale"])
            state.load_tensors(saved[-1], self._tensors())
            set_step(self.optimizer, self.at.updates)
            if self.workers.is_first:
                log.info("resuming at step %d from %s", self.at.step, saved[-1])
        if card and card["layout"] == list(self.workers.mesh.shape):
            generators = state.rng_tensors(self.workers)
            state.load_tensors(saved[-1], generators)
            state.set_rng(generators, self.workers)
        else:
            torch.manual_seed(self._seed())

    def _seed(self) -> int:
        """Dropout differs between parts of a batch and stages, and is one along `mp`, where all
        have the same hidden states, unless the sequence is divided."""
        pp, dp, sharding, mp = (self.workers.at(dim) for dim in DIMS)
        place = (pp, dp, sharding, mp if self.stages[0].sequence_parallel else 0)
        return hash((self.recipe.Global.seed, self.at.step, *place)) % 2**63
