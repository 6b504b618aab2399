"""The training loop in Paddle, used by finetuning after pruning and by QAT.

What a step computes, from which tokens and at which rate, is `lathe.train.trainer`'s.
"""

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from safetensors.numpy import load_file, save_file

from lathe.data.tokens import TokenDataset
from lathe.errors import Preempted, StageError, UserError
from lathe.paddle.gpt import GPT, next_token_loss
from lathe.paddle.parallel import shard
from lathe.paddle.workers import Workers, seed_everything
from lathe.progress import bar
from lathe.settings import Recipe
from lathe.storage import atomic_folder
from lathe.train.batch import resolve_batch
from lathe.train.batches import EvalBatches, TrainBatches
from lathe.train.preemption import watch_for_preemption
from lathe.train.schedule import is_decayed, learning_rate
from lathe.train.trace import StepRecord, Trace

log = logging.getLogger("lathe")

STATE = "state"
TENSORS = "state.safetensors"
CARD = "state.json"
MODEL, OPTIMIZER = "model.", "optimizer."


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
    """Trains `model` to `Engine.max_steps`, with state and trace under `output`.

    Args:
        model: as this process computes it.
        after_step: called after every update.

    Raises:
        UserError: batch sizes that do not divide, data too small, a loss that is not finite.
        Preempted: SIGTERM came; the state is saved.
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
        self.recipe, self.model, self.output, self.workers = recipe, model, output, workers
        self.engine, self.after_step = recipe.Engine, after_step
        self.batch = resolve_batch(recipe, workers.data_size)
        self.seq_len = recipe.Data.Train.dataset.max_seq_len
        self.batches = TrainBatches(recipe, data, self.batch, workers.data_rank)
        self.validation = EvalBatches(recipe, data, self.batch.micro, self.engine.eval_iters)
        if recipe.Compress.Quantization.freeze_embedding:
            model.wte.weight.stop_gradient = model.wpe.weight.stop_gradient = True
        self.parameters = [p for p in model.parameters() if not p.stop_gradient]
        self.optimizer = self._optimizer()
        precision = self.engine.mix_precision
        self.scaler = paddle.amp.GradScaler(
            enable=precision.dtype == "float16",
            init_loss_scaling=precision.scale_loss,
            use_dynamic_loss_scaling=precision.use_dynamic_loss_scaling,
        )
        self.net: Any = model
        if workers.sharding > 1:
            parts = model, self.optimizer, self.scaler, recipe.Distributed.sharding
            self.net, self.optimizer, self.scaler = shard(*parts)
        elif workers.mp > 1:
            self.optimizer = fleet.distributed_optimizer(self.optimizer)
            self.scaler = fleet.distributed_scaler(self.scaler)
        self.state = output / STATE
        if workers.is_divided:
            self.state /= f"part_{workers.rank}"
        self.at = Progress()

    def run(self) -> Progress:
        """Train on from the saved state, or from the start, and leave the last one saved."""
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
                if preempted and not ended:
                    raise Preempted(
                        f"saved at step {self.at.step} in {self.output}; the same command goes on"
                    )
        return self.at

    def _optimizer(self) -> Any:
        settings = self.recipe.Optimizer
        decayed = {p.name for n, p in self.model.named_parameters() if is_decayed(n)}
        return paddle.optimizer.AdamW(
            learning_rate=settings.lr.max_lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            epsilon=settings.epsilon,
            parameters=self.parameters,
            weight_decay=settings.weight_decay,
            apply_decay_param_fun=decayed.__contains__,
            grad_clip=paddle.nn.ClipGradByGlobalNorm(settings.grad_clip.clip_norm),
        )

    def _train_step(self, preempted: bool) -> tuple[StepRecord, bool]:
        """One update; also tells whether any process was asked to end."""
        started, step = time.perf_counter(), self.at.step
        rate = learning_rate(step + 1, self.recipe.Optimizer.lr)
        self.optimizer.set_lr(rate)
        self.model.train()
        seed_everything(self.recipe.Global.seed, step, self.workers.data_rank)
        arrays = [self.batches(step, i) for i in range(self.batch.accumulate_steps)]
        reading = time.perf_counter() - started
        loss = 0.0
        for tokens in arrays:
            with self._precision():
                part = next_token_loss(self.net, paddle.to_tensor(tokens)) / len(arrays)
            self.scaler.scale(part).backward()
            loss += float(part)
        if self.workers.data_size > 1 and not self.workers.is_divided:
            self._average_gradients()
        norm = self._gradient_norm()
        loss, asked = self.workers.sum([loss / self.workers.size, float(preempted)])
        if not math.isfinite(loss) or (not math.isfinite(norm) and not self.scaler.is_enable()):
            documents = [d for i in range(len(arrays)) for d in self.batches.documents(step, i)]
            raise UserError(
                f"step {step + 1}: loss or gradient is not finite on rank {self.workers.rank}, "
                f"documents {', '.join(documents)}",
                "look at these documents; lower Optimizer.lr.max_lr or lengthen the warm-up",
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.clear_grad()
        if self.after_step is not None:
            self.after_step()
        seconds, count = time.perf_counter() - started, self.batch.total * self.seq_len
        self.at.step, self.at.loss = step + 1, loss
        self.at.tokens += count
        self.at.seconds += seconds
        return StepRecord(
            step=step + 1,
            loss=loss,
            lr=rate,
            grad_norm=norm,
            tokens_per_second=count / seconds,
            step_seconds=seconds,
            reader_seconds=reading,
            mfu=count / seconds * self.model.config.flops_per_token(self.seq_len) / _peak_flops(),
            loss_scale=float(self.scaler._scale) if self.scaler.is_enable() else 1.0,
            skipped_steps=0,
        ), asked > 0

    def _precision(self) -> Any:
        precision = self.engine.mix_precision
        return paddle.amp.auto_cast(
            enable=precision.dtype != "float32",
            dtype=precision.dtype if precision.dtype != "float32" else "float16",
        )

    @paddle.no_grad()
    def _average_gradients(self) -> None:
        """Over the processes that see other parts of the batch, in one message."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        flat = paddle.concat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat = flat / self.workers.data_size
        parts = paddle.split(flat, [gradient.size for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.set_value(part.reshape(gradient.shape))

    @paddle.no_grad()
    def _gradient_norm(self) -> float:
        squares = [p.grad.square().sum() for p in self.parameters if p.grad is not None]
        scale = float(self.scaler._scale) if self.scaler.is_enable() else 1.0
        return math.sqrt(float(paddle.add_n(squares))) / scale

    @paddle.no_grad()
    def _evaluate(self, trace: Trace | None) -> float:
        """Mean loss over `Engine.eval_iters` validation batches, the same ones every time."""
        self.model.eval()
        total, samples = 0.0, 0.0
        for index in range(self.workers.data_rank, len(self.validation), self.workers.data_size):
            tokens = paddle.to_tensor(self.validation[index])
            total += float(next_token_loss(self.net, tokens)) * len(tokens)
            samples += len(tokens)
        total, samples = self.workers.sum([total, samples])
        self.at.eval_loss = total / samples if samples else math.nan
        if trace and samples:
            trace.evaluation(self.at.step, self.at.eval_loss)
        return self.at.eval_loss

    def _open_trace(self) -> Trace | None:
        if not self.workers.is_first:
            return None
        epoch, frequency = self.batches.samples_per_epoch, self.engine.logging_freq
        return Trace(self.output, self.at.step, self.batch, epoch, frequency)

    def _save(self) -> None:
        """Weights, ranges and moments, by rank 0 where all processes have the same."""
        if self.workers.is_first or self.workers.is_divided:
            tensors = {f"{MODEL}{n}": t.numpy() for n, t in self.model.state_dict().items()}
            for name, tensor in self.optimizer.state_dict().items():
                if isinstance(tensor, paddle.Tensor):
                    tensors[OPTIMIZER + self._lasting_name(name)] = tensor.numpy()
            with atomic_folder(self.state, CARD) as work:
                save_file(tensors, work / TENSORS)
                (work / CARD).write_text(json.dumps(asdict(self.at)))
        self.workers.barrier()

    def _resume(self) -> None:
        card = self.state / CARD
        step = json.loads(card.read_text())["step"] if card.is_file() else 0
        if self.workers.sum([step])[0] != step * self.workers.size:
            raise StageError(f"{self.output / STATE}: the parts are of different steps: delete it")
        if not step:
            return
        self.at = Progress(**json.loads(card.read_text()))
        tensors = load_file(self.state / TENSORS)
        self.model.set_state_dict(_below(MODEL, tensors))
        names = {f"{n}/": f"{p.name}_" for n, p in self.model.named_parameters()}
        moments = {}
        for name, array in _below(OPTIMIZER, tensors).items():
            parameter, slash, kind = name.partition("/")
            moments[names[parameter + slash] + kind] = array
        self.optimizer.set_state_dict(moments)
        if self.workers.is_first:
            log.info("resuming at step %d from %s", self.at.step, card.parent)

    def _lasting_name(self, name: str) -> str:
        """Paddle counts layers into a parameter's name; its place in the model is the same in
        every process: `linear_7.w_0_moment1_0` -> `h.0.mlp.c_fc.weight/moment1_0`."""
        places = {f"{p.name}_": n for n, p in self.model.named_parameters()}
        prefix = max((p for p in places if name.startswith(p)), key=len)
        return f"{places[prefix]}/{name.removeprefix(prefix)}"


def _below(prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


@cache
def _peak_flops() -> float:
    """FLOP/s of a large float32 product, measured."""
    size = 1024
    matrix = paddle.randn([size, size])
    seconds = math.inf
    for _ in range(5):
        started = time.perf_counter()
        float(paddle.matmul(matrix, matrix)[0, 0])
        seconds = min(seconds, time.perf_counter() - started)
    return 2 * size**3 / seconds
