"""Training in Paddle, for finetuning after pruning and for QAT: from a claimed folder to a written
checkpoint, and the steps between the two."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray
from paddle import Tensor
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from lathe.data.tokens import TokenDataset
from lathe.model.config import GPTConfig
from lathe.model.folder import training_origin
from lathe.train.batches import open_data
from lathe.train.loop import Gradients, Loop, Progress, StopSaveFlags
from lathe.train.result import (
    TrainResult,
    begin,
    claimed,
    is_finished,
    read_result,
    remove_states,
    run_identity,
)
from lathe.train.schedule import LossScale, clip_factor, is_decayed
from lathe.train.state_folder import StateFolder, read_metadata, restored, unwritable
from lathe_base.artifacts.kinds import STATE
from lathe_base.config.settings import ModelSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_paddle.checkpoint import save_checkpoint
from lathe_paddle.gpt import GPT, next_token_loss
from lathe_paddle.workers import Workers, join_workers, seed_everything, split_axis, whole_weights

log = logging.getLogger("lathe")

MODEL, OPTIMIZER = "model.", "optimizer."
"""Prefixes of tensors in a saved state."""


@dataclass(frozen=True)
class TrainingJob:
    """A model to train, and what its checkpoint records; see `lathe.train.run.TrainingJob`."""

    stage: str
    model: GPT
    tokenizer: Tokenizer
    parent: Path | None = None
    after_step: Callable[[Workers], None] | None = None
    before_save: Callable[[GPT], None] | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


def new_model(config: GPTConfig, settings: ModelSettings) -> GPT:
    """A float GPT to train, with the recipe's dropout and recomputation."""
    bare = replace(config, quantization=None)
    model = GPT(bare, settings.hidden_dropout_prob, settings.attention_probs_dropout_prob)
    model.set_recompute(settings.recompute)
    return model


def run_training(
    recipe: Recipe,
    data: Path,
    output: Path,
    inputs: dict[str, str],
    make: Callable[[Workers], TrainingJob],
    sources: Sequence[Path],
) -> TrainResult:
    """Train what `make` builds and write the checkpoint `output`, unless that is finished already.

    Args:
        make: builds the model, divided as the recipe asks; not called when `output` is finished.
        sources: other folders that `make` reads.

    Raises:
        UserError: as `lathe.train.run.run_training`.
        Preempted: SIGTERM arrived; the same call resumes.
    """
    if recipe.Engine.mix_precision.is_pure:
        log.warning("mix_precision.level is O2: the Paddle engine computes as with O1")
    with join_workers(recipe) as workers:
        identity = run_identity(recipe, inputs, data, workers.data_size)
        with claimed(output, identity, data, *sources) if workers.is_first else nullcontext():
            workers.barrier()
            if workers.gather(is_finished(output, identity))[0]:
                log.info("%s is finished: nothing to do", output)
                return _agreed(workers, output)
            work = make(workers)
            config = work.model.config
            tokens = open_data(data, recipe, config, work.tokenizer)
            if any(part.has_mask for _, part in tokens.parts):
                raise UserError(
                    f"{data}: conversations, of which the Paddle engine cannot count the "
                    "assistant's tokens only",
                    "train with -o Compress.engine=torch, or prepare with Prepare.chat=False",
                    Code.UNSUPPORTED,
                )
            origin = training_origin(work.parent, tokens)

            def observe() -> None:
                if work.after_step is not None:
                    work.after_step(workers)

            if workers.is_first:
                begin(output, identity)
            trainer = Trainer(recipe, work.model, tokens, output, workers, observe)
            workers.barrier()  # loading may take longer on one node than a collective waits
            trainer.run()
            # With tensor parallelism every process takes part, but only the first one writes.
            weights = whole_weights(work.model, workers)
            if workers.is_first:
                if work.before_save is not None:
                    work.before_save(work.model)
                metrics = {**trainer.figures(), **work.figures, "n_params": config.n_params}
                parts = work.model, work.tokenizer, work.stage, recipe, origin, metrics
                save_checkpoint(output, *parts, weights)
                remove_states(output, keep=recipe.Engine.save_load.keep_final)
            return _agreed(workers, output)


def _agreed(workers: Workers, output: Path) -> TrainResult:
    """The result that the first process reads: only its disk may have it."""
    result: TrainResult = workers.gather(read_result(output) if workers.is_first else None)[0]
    return result


# --- steps ---


class Trainer(Loop):
    """Trains `model`, this process's part of the whole model; see `Loop`.

    Args:
        observe: called after every update.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: GPT,
        data: TokenDataset,
        output: Path,
        workers: Workers,
        observe: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(recipe, data, output, workers)
        self.model, self.workers, self.observe = model, workers, observe
        if recipe.Compress.Quantization.freeze_embedding:
            model.wte.weight.stop_gradient = model.wpe.weight.stop_gradient = True
        trained = [(n, p) for n, p in model.named_parameters() if not p.stop_gradient]
        self.names = {p.name: n for n, p in trained}
        self.sums = GradientSums([p for _, p in trained], workers)
        settings, family = recipe.Optimizer, model.config.architecture
        self.optimizer = paddle.optimizer.AdamW(
            learning_rate=settings.lr.max_lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            epsilon=settings.epsilon,
            parameters=self.sums.owned,
            weight_decay=settings.weight_decay,
            apply_decay_param_fun=lambda name: is_decayed(self.names[name], family, settings),
        )
        if paddle.device.get_device() != "cpu":
            peak = _peak_flops() * workers.size
            self.mfu_of_speed = model.config.flops_per_token(self.seq_len) / peak
        self.states = StateFolder(output / STATE, self.engine.save_load.keep, workers)

    def backward(
        self, step: int, batches: Sequence[NDArray[np.int64]], flags: StopSaveFlags
    ) -> Callable[[], Gradients]:
        self.model.train()
        # Processes of a tensor-parallel group have the same data rank, and drop the same units.
        seed_everything(self.recipe.Global.seed, step, self.workers.data_rank)
        losses = []
        for tokens in batches:
            with self._precision():
                loss = next_token_loss(self.model, paddle.to_tensor(tokens))
            (loss * (self.loss_scale.value / len(batches))).backward()
            losses.append(float(loss))
        # One exchange for everything that all processes have to agree on: the loss, the norm of the
        # gradients, and whether one of them was asked to stop or to save.
        self.sums.sum()
        share = self._squared_norm()
        mean_loss = sum(losses) / len(losses) / self.workers.size
        loss, squares, *counts = self.workers.sum([mean_loss, share, *map(float, flags)])
        # The gradients are sums over the data-parallel processes, and scaled; the norm is not.
        factor = self.loss_scale.value * self.workers.data_size
        norm = math.sqrt(squares) / factor if squares >= 0 else math.nan
        bad = [i for i, value in enumerate(losses) if not math.isfinite(value)]
        if not bad and not math.isfinite(share):
            bad = list(range(len(losses)))
        agreed = StopSaveFlags(*(count > 0 for count in counts))
        self.gradients = gradients = Gradients(loss, norm, agreed, bad)
        return lambda: gradients

    @paddle.no_grad()
    def update(self, rate: float) -> None:
        if not self.gradients.are_finite:
            return
        factor = clip_factor(self.gradients.norm, self.recipe.Optimizer.grad_clip)
        factor /= self.loss_scale.value * self.workers.data_size
        for parameter in self.sums.owned:
            if factor != 1.0 and parameter.grad is not None:
                parameter.grad.scale_(factor)
        self.optimizer.set_lr(rate)
        self.optimizer.step()
        self.sums.publish()

    def after_step(self) -> None:
        self.optimizer.clear_grad(set_to_zero=False)
        if self.observe is not None:
            self.observe()

    @paddle.no_grad()
    def validation_loss(self) -> float:
        self.model.eval()
        total, samples = 0.0, 0.0
        # Every process has its own batches; the processes of a tensor-parallel group have the same.
        for index in range(self.workers.data_rank, len(self.validation), self.workers.data_size):
            tokens = paddle.to_tensor(self.validation[index])
            total += float(next_token_loss(self.model, tokens)) * len(tokens)
            samples += len(tokens)
        total, samples = self.workers.sum([total, samples])
        return total / samples if samples else math.nan

    def save(self) -> None:
        partial = self.states.partial(self.at.step)
        extra = {
            "mp": self.workers.mp,
            "progress": asdict(self.at),
            "loss_scale": asdict(self.loss_scale),
        }
        try:
            write_state(partial, self.model, self.optimizer, self.workers)
            self.workers.barrier()
            self.states.seal(partial)
            self.states.commit(partial, extra)
        except OSError as error:
            raise unwritable(partial, error) from error
        self.workers.barrier()

    def poll_pending_save(self, wait: bool) -> None:
        """Nothing to do: a save is complete when `save` returns."""

    def resume(self) -> None:
        saved = self.states.newest()
        if saved is None:
            return
        metadata = read_metadata(saved)
        if metadata["mp"] != self.workers.mp:
            raise UserError(
                f"{saved}: saved with Distributed.mp_degree {metadata['mp']}, but it is "
                f"{self.workers.mp} now",
                "set it back; dp_degree and sharding may change",
                Code.STATE_MISMATCH,
            )
        self.at = restored(saved, metadata["progress"], Progress)
        self.loss_scale = restored(saved, metadata["loss_scale"], LossScale)
        read_state(saved, self.model, self.optimizer, self.sums.owned, self.workers)
        if self.workers.is_first:
            log.info("resuming at step %d from %s", self.at.step, saved)

    def _precision(self) -> Any:
        dtype = self.engine.mix_precision.dtype
        if dtype == "float32":
            return paddle.amp.auto_cast(enable=False)
        return paddle.amp.auto_cast(dtype=dtype)

    @paddle.no_grad()
    def _squared_norm(self) -> float:
        """This process's share of the squared norm of the summed gradients; the shares of all
        processes add up to it. A gradient held by n processes counts one nth in each."""
        workers, total = self.workers, 0.0
        copies = workers.size // workers.sharding
        for parameter in self.sums.owned:
            if parameter.grad is not None:
                axis = split_axis(self.names[parameter.name], self.model.config.architecture)
                is_divided = axis is not None
                holders = copies // workers.mp if is_divided else copies
                total += float(parameter.grad.square().sum()) / holders
        return total


@cache
def _peak_flops() -> float:
    """Measured FLOP/s of a large float32 matrix product."""
    size = 1024
    matrix = paddle.randn([size, size])
    seconds = math.inf
    for _ in range(5):
        started = time.perf_counter()
        float(paddle.matmul(matrix, matrix)[0, 0])
        seconds = min(seconds, time.perf_counter() - started)
    return 2 * size**3 / seconds


# --- gradients ---


class GradientSums:
    """Sums the gradients of `parameters` over the processes that see different parts of a batch.

    With sharding this is ZeRO stage 2 (Rajbhandari et al. 2020), made of `reduce` and `broadcast`:
    Paddle's own `group_sharded_parallel` refuses CPUs, and does not expose the gradients before it
    scales them. Only the owner of a parameter keeps the sum; the others drop their gradient as soon
    as the backward pass has made it. A step may have several backward passes.

    Attributes:
        owned: the parameters that this process updates.
    """

    def __init__(self, parameters: Sequence[Tensor], workers: Workers) -> None:
        self.parameters, self.workers = parameters, workers
        self.owner = assign([int(p.size) for p in parameters], workers.sharding)
        self.owned = [p for p, o in self._owners() if o == workers.sharding_rank]
        if workers.sharding > 1:
            self.group = workers.shards
            for parameter, owner in self._owners():
                parameter._register_backward_hook(self._reduce(parameter, owner))

    @paddle.no_grad()
    def sum(self) -> None:
        """Complete the sums; call it after the last backward pass of a step."""
        if self.workers.data_size <= self.workers.sharding:
            return
        # In one message for all gradients.
        gradients = [p.grad for p in self.owned if p.grad is not None]
        flat = paddle.concat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.workers.replicas)
        parts = paddle.split(flat, [gradient.size for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.set_value(part.reshape(gradient.shape))

    @paddle.no_grad()
    def publish(self) -> None:
        """Broadcast the weights that each process has updated to the others."""
        if self.workers.sharding > 1:
            for parameter, owner in self._owners():
                dist.broadcast(parameter, self.group.ranks[owner], self.group)

    def _owners(self) -> Any:
        return zip(self.parameters, self.owner, strict=True)

    def _reduce(self, parameter: Tensor, owner: int) -> Any:
        @paddle.no_grad()
        def reduce(*_: Any) -> None:
            # The owner's gradient already has the sum of earlier passes, the others' only this one.
            dist.reduce(parameter.grad, self.group.ranks[owner], group=self.group)
            if owner != self.workers.sharding_rank:
                parameter.clear_gradient(False)

        return reduce


def assign(sizes: Sequence[int], parts: int) -> list[int]:
    """The part that owns each parameter, such that all parts have about the same size."""
    # The largest first, each to the part with the least so far; the same in every process.
    load, owner = [0] * parts, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner[index] = load.index(min(load))
        load[owner[index]] += sizes[index]
    return owner


# --- saved states ---


def write_state(folder: Path, model: GPT, optimizer: Any, workers: Workers) -> None:
    """Write this process's part of the run's state, unless another process writes the same.

    There is one file for each pair of ranks along `sharding` and `mp`. The weights are divided
    along `mp` (and are in the files of the first rank along `sharding`), the moments along both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if workers.is_replica:
        return
    tensors = {}
    if workers.sharding_rank == 0:
        tensors = {f"{MODEL}{n}": t.numpy() for n, t in model.state_dict().items()}
    names = {f"{p.name}_": n for n, p in model.named_parameters()}
    for key, tensor in optimizer.state_dict().items():
        if isinstance(tensor, paddle.Tensor):
            # Paddle's names count layers; the path in the model is the same in every process:
            # `linear_7.w_0_moment1_0` -> `h.0.mlp.c_fc.weight/moment1_0`.
            prefix = max((p for p in names if key.startswith(p)), key=len)
            tensors[f"{OPTIMIZER}{names[prefix]}/{key.removeprefix(prefix)}"] = tensor.numpy()
    save_file(tensors, folder / f"sharding_{workers.sharding_rank:03d}_{_part(workers)}")


def read_state(
    folder: Path, model: GPT, optimizer: Any, owned: Iterable[Any], workers: Workers
) -> None:
    """Read a saved state into `model` and `optimizer`; the degree of sharding may have changed.

    Args:
        owned: the parameters that this process updates.
    """
    weights, moments = {}, {}
    names = {n: p.name for n, p in model.named_parameters()}
    wanted = {p.name for p in owned}
    for path in sorted(folder.glob(f"sharding_*_{_part(workers)}")):
        with safe_open(path, "np") as file:
            for key in file.keys():  # noqa: SIM118
                if key.startswith(MODEL):
                    weights[key.removeprefix(MODEL)] = file.get_tensor(key)
                    continue
                name, _, kind = key.removeprefix(OPTIMIZER).partition("/")
                if names[name] in wanted:
                    moments[f"{names[name]}_{kind}"] = file.get_tensor(key)
    model.set_state_dict(weights)
    optimizer.set_state_dict(moments)


def _part(workers: Workers) -> str:
    """Suffix of the files that have this process's part along `mp`."""
    return f"mp_{workers.mp_rank:03d}.safetensors"
