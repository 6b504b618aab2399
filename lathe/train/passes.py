"""Forward and backward passes of one optimizer step, without or with pipeline parallelism, and the
averaging of gradients over data-parallel replicas while the last backward pass runs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    _PipelineSchedule,
)
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

from lathe.train.batches import Batch
from lathe.train.distill import Teacher
from lathe.train.optimizer import HalfWeights, local, placed_as
from lathe.train.parallel import Counted, Documents, Stage
from lathe.train.workers import Workers
from lathe_base.config.settings import Recipe

BUCKET_BYTES = 2**26
"""Bytes of a message: enough for the full bandwidth of a network, few enough that the last one,
which nothing hides, is short."""


class Replicas:
    """Averages gradients over the processes of a group, all of which have the same weights.

    Each message of about `BUCKET_BYTES` is sent as soon as the last backward pass of a step has
    made its gradients, while that pass computes others, as by torch's DistributedDataParallel (Li
    et al. 2020, arXiv:2006.15704).

    That class reduces the gradients of whatever its module's forward pass uses, in their own data
    type. Here, the loss uses the head outside of it, and with `HalfWeights` a weight's gradient is
    the float32 sum of those of its 16-bit copy.

    Args:
        weights: those that are trained, in the order of the forward pass.
        half_weights: their copies, which the passes compute with.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        half_weights: HalfWeights | None,
        group: dist.ProcessGroup,
    ) -> None:
        self.half_weights, self.group = half_weights, group
        # Fill buckets in the order in which the backward pass makes the gradients.
        self._buckets: list[list[nn.Parameter]] = []
        size = BUCKET_BYTES
        for weight in reversed(weights):
            if size >= BUCKET_BYTES:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(weight)
            size += local(weight).numel() * 4  # gradients are float32
        self._missing = [0] * len(self._buckets)
        self._sent: list[dist.Work] | None = None  # None: gradients are not complete yet
        for index, bucket in enumerate(self._buckets):

            def count_down(_: Tensor, index: int = index) -> None:
                if self._sent is None:  # not the last micro-batch
                    return
                self._missing[index] -= 1
                # In the same order in all processes, whichever gradients come first: collectives
                # of one group have to match.
                while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
                    self._send()

            for weight in bucket:
                leaf = half_weights.copies[weight] if half_weights else weight
                leaf.register_post_accumulate_grad_hook(count_down)  # type: ignore[no-untyped-call]

    def expect_last(self) -> None:
        """The next backward pass is the last one of the step."""
        self._missing, self._sent = [len(bucket) for bucket in self._buckets], []

    @torch.no_grad()
    def average(self) -> None:
        """Wait until all gradients are averaged; sends those that no pass of a step has made a
        last time, of a weight that it did not use."""
        self._sent = self._sent or []
        while len(self._sent) < len(self._buckets):
            self._send()
        for work in self._sent:
            work.wait()
        self._sent = None

    @torch.no_grad()
    def _send(self) -> None:
        """Begin to average the next bucket, in place of its gradients."""
        assert self._sent is not None
        bucket = self._buckets[len(self._sent)]
        if self.half_weights is not None:
            self.half_weights.collect_gradients(bucket)
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in bucket]
        # Gradients become views of the message, so that the sums need not be copied back.
        flat = torch.cat([local(gradient).flatten() for gradient in gradients])
        parts = torch.split(flat, [local(gradient).numel() for gradient in gradients])
        for weight, gradient, part in zip(bucket, gradients, parts, strict=True):
            weight.grad = placed_as(gradient, part.view_as(local(gradient)))
        work = dist.all_reduce(flat, dist.ReduceOp.AVG, self.group, async_op=True)
        assert work is not None
        self._sent.append(work)


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
                self.replicas.expect_last()  # it collects the copies' gradients as it sends them
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
    """A pipeline's stage that has buffers for the micro-batches in flight only, and adds up the
    gradients of its 16-bit copies in float32 after every micro-batch.

    torch 2.13 allocates a buffer for the hidden states of every micro-batch of a step, and one for
    their gradients, and keeps them for the whole training.
    """

    half_weights: HalfWeights | None = None

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        self.args_recv_info |= _without_buffers(self.args_recv_info[0], num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self.grad_recv_info |= _without_buffers(self.grad_recv_info[0], num_microbatches)

    def _get_recv_ops(self, recv_infos: tuple[_RecvInfo, ...]) -> list[dist.P2POp]:
        for info in recv_infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                shape, dtype = info.tensor_meta.shape, info.tensor_meta.dtype
                info.buffer = torch.empty(shape, dtype=dtype, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        infos = (self.args_recv_info[bwd_chunk_id], self.grad_recv_info.get(bwd_chunk_id, ()))
        for info in itertools.chain(*infos):
            info.buffer = None
        if self.half_weights is not None:
            self.half_weights.collect_gradients(
                weight for weight in self.submod.parameters() if weight.requires_grad
            )


def _without_buffers(
    infos: tuple[_RecvInfo, ...], num_microbatches: int
) -> dict[int, tuple[_RecvInfo, ...]]:
    """What a stage receives of every micro-batch, by that of one."""

    def copied(info: _RecvInfo) -> _RecvInfo:
        return _RecvInfo(
            info.input_name, info.source, None, info.tensor_meta, is_root_arg=info.is_root_arg
        )

    return {index: tuple(map(copied, infos)) for index in range(num_microbatches)}


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
        # Stages allocate what they receive by these shapes. With sequence parallelism they exchange
        # only this process's tokens.
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
        # `scale_grads` would divide gradients by the number of micro-batches; `_loss` has scaled
        # the loss by then.
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
        if documents:  # of padding, every row is a document
            sizes, positions = documents[0]
            T = positions.shape[1]
            padding = torch.arange(T, device=positions.device).expand(missing, -1)
            whole_positions = torch.cat([positions, padding])
            documents = [Documents(sizes + missing * (T,), whole_positions)]
        for stage in self.stages:
            stage.documents = iter(documents) if documents else None
        return self._run(self.eval_schedule.eval, whole, tokens[:, 1:]).sum()

    def _run(self, step: Callable[..., object], tokens: Tensor, targets: Tensor) -> Tensor:
        # A schedule takes arguments only where they are used: ids by the first stage, targets by
        # the last one, which alone fills `losses`.
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
