"""Forward and backward passes of one optimizer step, without or with pipeline parallelism."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    _PipelineSchedule,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from lathe.train.batch import Batch
from lathe.train.distill import Teacher
from lathe.train.half_weights import HalfWeights
from lathe.train.parallel import Counted, Documents, Stage
from lathe.train.replicas import Replicas
from lathe.train.workers import Workers
from lathe_base.config.settings import Recipe


class Passes:
    """Runs micro-batches one after another through a whole model."""

    def __init__(
        self,
        stage: Stage,
        sharding_stage: int,
        teacher: Teacher | None,
        half_weights: HalfWeights | None,
        replicas: Replicas | None,
    ) -> None:
        self.stage, self.sharding_stage, self.teacher = stage, sharding_stage, teacher
        self.half_weights, self.replicas = half_weights, replicas

    def train(
        self,
        batches: Sequence[Tensor],
        documents: Sequence[Documents],
        counted: Sequence[Counted],
        loss_scale: Tensor,
    ) -> Tensor:
        """Accumulate the gradients of micro-batches (micro, T + 1), times `loss_scale`.

        Args:
            documents: those of each micro-batch, or empty if attention does not end at their
                boundaries.
            counted: the tokens of each micro-batch whose loss counts, or empty if all do.

        Returns:
            (len(batches),) contribution of each micro-batch to the mean loss, nats per token.
        """
        losses = []
        self.stage.documents = iter(documents) if documents else None
        for i, tokens in enumerate(batches):
            is_last = i == len(batches) - 1
            # ZeRO's stage 1 keeps whole gradients until the last micro-batch, stages 2 and 3 only
            # shards; only stage 3 gathers weights again for every micro-batch.
            if isinstance(self.stage, FSDPModule):
                self.stage.set_is_last_backward(is_last)
                self.stage.set_requires_gradient_sync(is_last or self.sharding_stage > 1)
                self.stage.set_requires_all_reduce(is_last)
                self.stage.set_reshard_after_backward(is_last or self.sharding_stage == 3)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            row_documents = documents[i] if documents else None
            guide = self.stage.ask(self.teacher, inputs, row_documents) if self.teacher else None
            if counted:
                loss = self.stage.loss(self.stage(inputs), targets, guide, counted[i])
                loss = loss * counted[i].share
            else:
                loss = self.stage.loss(self.stage(inputs), targets, guide) / len(batches)
            if self.replicas is not None and is_last:
                self.replicas.expect_last()  # which also collects what is left to collect
            (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
            if self.half_weights is not None and not (self.replicas and is_last):
                self.half_weights.collect_gradients()
            losses.append(loss.detach())
        return torch.stack(losses)

    @torch.no_grad()
    def evaluate(
        self, tokens: Tensor, documents: Sequence[Documents], counted: Counted | None
    ) -> Tensor:
        """Mean loss of a micro-batch (micro, T + 1), or of its counted tokens."""
        self.stage.documents = iter(documents) if documents else None
        return self.stage.loss(self.stage(tokens[:, :-1]), tokens[:, 1:], counted=counted)


class _Link(PipelineStage):
    """A pipeline's stage that adds up the gradients of its 16-bit copies in float32 after every
    micro-batch."""

    half_weights: HalfWeights | None = None

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(*args, **kwargs)
        if self.half_weights is not None:
            self.half_weights.collect_gradients(
                weight for weight in self.submod.parameters() if weight.requires_grad
            )


class PipelinePasses:
    """Runs micro-batches through pipeline stages: 1F1B (Narayanan et al. 2019), interleaved if a
    process has several (Narayanan et al. 2021). Only the last stage knows the loss; the others
    return 0."""

    def __init__(
        self,
        stages: Sequence[Stage],
        recipe: Recipe,
        batch: Batch,
        workers: Workers,
        half_weights: HalfWeights | None,
    ) -> None:
        self.stages, self.batch, self.device = stages, batch, workers.device
        steps = batch.accumulate_steps
        group = workers.mesh["pp"].get_group()
        shards = workers.mesh["mp"].size() if stages[0].sequence_parallel else 1
        T = recipe.Data.Train.dataset.max_seq_len
        pure = recipe.Engine.mix_precision.is_pure
        ids = torch.empty(batch.micro, T, dtype=torch.int64, device="meta")
        hidden = torch.empty(
            *(batch.micro, T // shards, stages[0].gpt.config.n_embd),
            dtype=stages[0].dtype if pure else torch.float32,
            device="meta",
            requires_grad=True,
        )
        links: list[_PipelineStageBase] = []
        for stage in stages:
            link = _Link(
                stage,
                stage.index,
                stage.count,
                workers.device,
                input_args=(ids if stage.is_first else hidden,),
                output_args=(hidden,),
                group=group,
            )
            link.half_weights = half_weights
            links.append(link)
        self.train_schedule: _PipelineSchedule
        self.eval_schedule: _PipelineSchedule
        if len(links) > 1:
            self.train_schedule = ScheduleInterleaved1F1B(
                links, steps, self._loss, scale_grads=False
            )
            self.eval_schedule = ScheduleLoopedBFS(links, 1, self._loss, scale_grads=False)
        else:
            self.train_schedule = Schedule1F1B(links[0], steps, self._loss, scale_grads=False)
            self.eval_schedule = ScheduleGPipe(links[0], 1, self._loss, scale_grads=False)
        self.factor: float | Tensor = 1.0
        self.counted: Iterator[Counted] | None = None

    def train(
        self,
        batches: Sequence[Tensor],
        documents: Sequence[Documents],
        counted: Sequence[Counted],
        loss_scale: Tensor,
    ) -> Tensor:
        """Accumulate gradients; returns each micro-batch's contribution to the loss."""
        self.factor = loss_scale / (1 if counted else len(batches))
        self.counted = iter(counted) if counted else None
        for stage in self.stages:
            stage.documents = iter(documents) if documents else None
        tokens = torch.cat(list(batches))
        return self._run(self.train_schedule.step, tokens, tokens[:, 1:]) / loss_scale

    @torch.no_grad()
    def evaluate(
        self, tokens: Tensor, documents: Sequence[Documents], counted: Counted | None
    ) -> Tensor:
        """Mean loss of a micro-batch, or of its counted tokens; 0 except on the last stage. Stages
        exchange whole micro-batches, so missing rows are padded and not counted."""
        self.factor = 1.0
        self.counted = iter([counted._replace(share=1.0)]) if counted else None
        missing = self.batch.micro - len(tokens)
        whole = torch.cat([tokens, tokens[:1].expand(missing, -1)])
        for stage in self.stages:
            stage.documents = iter([_filled(x, missing) for x in documents]) if documents else None
        return self._run(self.eval_schedule.eval, whole, tokens[:, 1:]).sum()

    def _run(self, step: Callable[..., object], tokens: Tensor, targets: Tensor) -> Tensor:
        inputs = [tokens[:, :-1].contiguous()] if self.stages[0].is_first else []
        losses: list[Tensor] = []
        last = {"target": targets, "losses": losses} if self.stages[-1].is_last else {}
        step(*inputs, return_outputs=False, **last)
        if not losses:
            return torch.zeros(self.batch.accumulate_steps, device=self.device)
        return torch.stack([loss.detach() for loss in losses])

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        # The last stage reads the micro-batches in their order, in every schedule.
        counted = next(self.counted) if self.counted else None
        loss = self.stages[-1].loss(hidden[: len(targets)], targets, counted=counted)
        return loss * (self.factor * (counted.share if counted else 1.0))


def _filled(documents: Documents, rows: int) -> Documents:
    """The documents, and for padding one document per row."""
    T = documents.positions.shape[1]
    more = torch.arange(T, device=documents.positions.device).expand(rows, -1)
    return Documents(documents.sizes + rows * (T,), torch.cat([documents.positions, more]))
