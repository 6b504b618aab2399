"""The steps of a training in torch: pretraining, finetuning after pruning, QAT.

A step is `Trainer.backward` (batches to the device, passes, sums over processes, norm) and
`Trainer.update` (clip, AdamW, loss scale). Neither waits for the device; see `Loop`.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lathe.data.tokens import TokenDataset
from lathe.model.block import attention_kernels
from lathe.model.lora import is_adapter
from lathe.train import state
from lathe.train.distill import Teacher
from lathe.train.layout import DIMS
from lathe.train.loop import Gradients, Loop, Progress, StopSaveFlags
from lathe.train.optimizer import (
    DeviceLossScale,
    HalfWeights,
    TiedEmbedding,
    clip_gradients,
    make_optimizer,
    settle_partial,
    squared_norm,
    update,
)
from lathe.train.parallel import Counted, Documents, Stage
from lathe.train.passes import Passes, PipelinePasses, Replicas
from lathe.train.schedule import LossScale
from lathe.train.speed import peak_flops
from lathe.train.state_folder import read_metadata, restored
from lathe.train.workers import Workers
from lathe_base.artifacts.kinds import STATE
from lathe_base.config.settings import Recipe

log = logging.getLogger("lathe")


class Trainer(Loop):
    """Trains this process's `stages`; see `Loop`.

    Args:
        teacher: if given, the training loss is a distillation loss; validation stays cross-entropy.
    """

    def __init__(
        self,
        recipe: Recipe,
        stages: Sequence[Stage],
        data: TokenDataset,
        output: Path,
        workers: Workers,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__(recipe, data, output, workers)
        self.workers, self.stages = workers, stages
        config = stages[0].gpt.config
        # What is trained: the adapters if there are some, else all but what the recipe freezes.
        named = [pair for stage in stages for pair in stage.gpt.named_parameters()]
        embeddings = [f"{name}.weight" for name in config.architecture.embeddings]
        frozen = embeddings if recipe.Compress.Quantization.freeze_embedding else []
        self.has_adapters = any(is_adapter(name) for name, _ in named)
        for name, parameter in named:
            is_trained = is_adapter(name) if self.has_adapters else name not in frozen
            parameter.requires_grad_(is_trained)
        self.parameters = [p for _, p in named if p.requires_grad]
        self.optimizer = make_optimizer(named, recipe.Optimizer, config.architecture)
        self.tied = TiedEmbedding(stages, workers)
        self.device_scale = DeviceLossScale(self.loss_scale, workers.device)
        if workers.device.type == "cuda":
            self.lag = 1  # launch a step before the one before it has been read
            self.copies = torch.cuda.Stream(workers.device)  # type: ignore[no-untyped-call]
        # FSDP casts weights and reduces gradients itself; without it, that is done here.
        self.half_weights: HalfWeights | None = None
        self.replicas: Replicas | None = None
        if not isinstance(stages[0], FSDPModule):
            if recipe.Engine.mix_precision.is_pure:
                whole = torch.nn.ModuleList(stage.gpt for stage in stages)
                self.half_weights = HalfWeights(whole, stages[0].dtype)
            if workers.data_size > 1:
                group = workers.mesh["dp"].get_group()
                self.replicas = Replicas(self.parameters, self.half_weights, group)
        self.passes: Passes | PipelinePasses
        if workers.mesh["pp"].size() > 1:
            self.passes = PipelinePasses(stages, recipe, self.batch, workers, self.half_weights)
        else:
            sharding = recipe.Distributed.sharding.sharding_stage
            self.passes = Passes(stages[0], sharding, teacher, self.half_weights, self.replicas)
        peak = peak_flops(workers.device, stages[0].dtype)
        if peak is not None:
            self.mfu_of_speed = config.flops_per_token(self.seq_len) / (peak * workers.size)
        if workers.device.type == "cuda" and workers.is_first:
            kernels = attention_kernels(stages[0].gpt, stages[0].dtype, self.seq_len)
            log.info("attention kernel: %s", ", ".join(kernels))
        self.states = state.States(output / STATE, self.engine.save_load.keep, workers)

    def backward(
        self, step: int, batches: Sequence[NDArray[np.int64]], flags: StopSaveFlags
    ) -> Callable[[], Gradients]:
        # Tokens; and where it applies, where documents end for attention, and which tokens count.
        for stage in self.stages:
            stage.train()
        tokens = [self._to_device(batch) for batch in batches]
        documents = []
        if self.recipe.Data.reset_attention:
            position_ids = (self.batches.positions(step, i) for i in range(len(tokens)))
            documents = [self._documents(positions) for positions in position_ids]
        targets = []
        if self.batches.has_masks:
            step_tokens = self.batches.counted_tokens(step)
            masks = (self.batches.masks(step, i) for i in range(len(tokens)))
            targets = [self._counted(mask, step_tokens) for mask in masks]
        # Gradients of this process, averaged over data-parallel replicas; then those that are sums
        # over other dimensions of the mesh.
        scale = self.device_scale.value
        losses = self.passes.train(tokens, documents, targets, scale)  # (accumulate_steps,)
        if self.replicas is not None:
            self.replicas.average()
        settle_partial(self.parameters)
        self.tied.settle()
        # Loss, norm and flags of all processes in one message. A tied table that is on two stages
        # counts once.
        counted = self.parameters
        if self.tied.is_second_copy:
            counted = [p for p in counted if p is not self.tied.table]
        # Ranks along `mp` have computed the same loss, and all stages but the last have 0.
        copies = self.workers.data_size * self.workers.mesh["mp"].size()
        norm_share = squared_norm(counted, copies, self.workers.device)
        requested = self._to_device(np.array(flags, np.float32))
        shares = torch.cat([torch.stack([losses.sum() / copies, norm_share]), requested])
        sums = self.workers.sum(shares)
        # In float64, as the host computes the norm that it logs.
        self.norm = sums[1].double().sqrt() / scale
        self.overflow = 1 - torch.isfinite(sums[0] + self.norm).float()
        read = self.workers.read(torch.cat([sums, norm_share[None], losses]))

        def results() -> Gradients:
            loss, squares, stops, saves, own_squares, *own_losses = read()
            # The host's scale is still that of this step: `Loop` adapts it after this call.
            norm = math.sqrt(squares) / self.loss_scale.value if squares >= 0 else math.nan
            bad = [i for i, value in enumerate(own_losses) if not math.isfinite(value)]
            if not bad and not math.isfinite(own_squares):
                bad = list(range(len(own_losses)))
            return Gradients(loss, norm, StopSaveFlags(stops > 0, saves > 0), bad)

        return results

    def update(self, rate: float) -> None:
        limit = self.recipe.Optimizer.grad_clip.clip_norm
        clip_gradients(self.parameters, self.norm, limit, self.device_scale.value)
        update(self.optimizer, rate, self.overflow)
        self.device_scale.update(self.overflow)
        if self.half_weights is not None:
            self.half_weights.update()

    def after_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Every process makes the same number of passes, because a pass may need all of them: past
        the last batch, the first one is repeated and does not count.
        """
        for stage in self.stages:
            stage.eval()
        sets = self.validation.sets
        # (loss * weight, weight) of all micro-batches, then of those of each set.
        sums = torch.zeros(2 + 2 * len(sets), device=self.workers.device)
        for first in range(0, len(self.validation), self.workers.data_size):
            index = first + self.workers.data_rank
            counts = index < len(self.validation) and self.stages[-1].is_last
            index = index if index < len(self.validation) else 0
            tokens, documents = self._to_device(self.validation[index]), []
            weight, targets = len(tokens), None
            if self.validation.has_masks:
                targets = self._counted(self.validation.masks(index), 1)
                weight = len(targets.indices)
            if self.recipe.Data.reset_attention:
                documents = [self._documents(self.validation.positions(index))]
            loss = self.passes.evaluate(tokens, documents, targets)
            if counts:
                set_index = self.validation.set_index(index)
                added = torch.stack([loss * weight, torch.full_like(loss, weight)])
                sums[:2] += added
                if set_index is not None:
                    sums[2 + 2 * set_index : 4 + 2 * set_index] += added
        values = self.workers.read(self.workers.sum(sums))()
        mean, *means = (
            total / weight if weight else math.nan
            for total, weight in zip(values[::2], values[1::2], strict=True)
        )
        self.set_losses = dict(zip(sets, means, strict=True))
        return mean

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        """Copy to the device; to a GPU beside what it computes, as the host is a step ahead."""
        tensor = torch.from_numpy(array)
        if self.workers.device.type != "cuda":
            return tensor.to(self.workers.device)
        with torch.cuda.stream(self.copies):
            tensor = tensor.pin_memory().to(self.workers.device, non_blocking=True)
        computing = torch.cuda.current_stream()
        computing.wait_stream(self.copies)
        tensor.record_stream(computing)  # else the allocator reuses it for the next copy too early
        return tensor

    def _counted(self, mask: NDArray[np.bool_], step_tokens: int) -> Counted:
        """The tokens of a mask (micro, T), of so many in the global batch."""
        index = np.flatnonzero(mask)
        share = len(index) * self.workers.data_size / step_tokens
        return Counted(self._to_device(index), share)

    def _documents(self, positions: NDArray[np.int64]) -> Documents:
        sizes = np.diff(np.flatnonzero(positions == 0), append=positions.size)
        return Documents(tuple(sizes.tolist()), self._to_device(positions))

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by their names in the whole model: of one with adapters only these,
        and before the first update without the moments, which are zero."""
        tensors: dict[str, Tensor] = {}
        for stage in self.stages:
            for name, tensor in stage.gpt.state_dict().items():
                if is_adapter(name) or not self.has_adapters:
                    tensors[f"model.{name}"] = tensor
        if not self.at.updates:
            return tensors
        for stage in self.stages:
            for name, parameter in stage.gpt.named_parameters():
                if parameter in self.optimizer.state:
                    for key in ("exp_avg", "exp_avg_sq"):
                        tensors[f"optimizer.{name}.{key}"] = self.optimizer.state[parameter][key]
        return tensors

    def poll_pending_save(self, wait: bool) -> None:
        self.states.wait() if wait else self.states.poll()

    def save(self) -> None:
        """Begin to save the state in the background."""
        extra = {
            "layout": list(self.workers.mesh.shape),
            "progress": asdict(self.at),
            "loss_scale": asdict(self.loss_scale),
        }
        tensors = self._tensors() | state.rng_tensors(self.workers)
        self.states.save(self.at.step, tensors, extra)

    def resume(self) -> None:
        """Restore the newest intact state, if there is one."""
        saved = self.states.newest()
        metadata = read_metadata(saved) if saved else {}
        if saved:
            self.at = restored(saved, metadata["progress"], Progress)
            self.loss_scale = restored(saved, metadata["loss_scale"], LossScale)
            state.load_tensors(saved, self._tensors())
            self.device_scale = DeviceLossScale(self.loss_scale, self.workers.device)
            # AdamW corrects the bias of its moments by the number of updates.
            for values in self.optimizer.state.values():
                values["step"].fill_(self.at.updates)
            if self.half_weights is not None:
                self.half_weights.update()
            if self.workers.is_first:
                log.info("resuming at step %d from %s", self.at.step, saved)
        # In another layout no process continues the dropout of one of the saved ones.
        if saved and metadata["layout"] == list(self.workers.mesh.shape):
            generators = state.rng_tensors(self.workers)
            state.load_tensors(saved, generators)
            torch.set_rng_state(generators[f"rng.{self.workers.rank}.cpu"])
            if self.workers.device.type == "cuda":
                on_device = generators[f"rng.{self.workers.rank}.cuda"]
                torch.cuda.set_rng_state(on_device, self.workers.device)
        else:
            # Dropout differs for every part of a batch and every stage, but not along `mp`, where
            # hidden states are the same unless the sequence is divided.
            pp, dp, sharding, mp = (self.workers.at(dim) for dim in DIMS)
            coordinates = (pp, dp, sharding, mp if self.stages[0].sequence_parallel else 0)
            # Python's hash of integers is the same in every process.
            torch.manual_seed(hash((self.recipe.Global.seed, self.at.step, *coordinates)) % 2**63)
