"""Record what a training does: its allocations, floating-point operations and collectives.

`Recorder` sees every operation of torch that runs under it, on real tensors or fake ones. torch's
public FlopCounterMode and CommDebugMode see neither allocations nor who waits for whom; this and
the other modules of the package use their private parts, as of torch 2.13.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

LATHE = str(Path(__file__).resolve().parents[1])
TRIAL_FOLDER = f"{LATHE}/plan/"
COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"}
WAITS = {"wait_tensor", "_wrap_tensor_autograd"}
"""Operations in those namespaces that send nothing."""

KINDS = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "recv_": "recv",
    "broadcast_": "broadcast",
}
"""Names of `torch.distributed` for c10d's."""


@dataclass(frozen=True)
class Collective:
    """A call that sends or receives.

    Attributes:
        ranks: the group, by global rank.
        tensors: shape and dtype of each tensor that it was given.
        bytes: the whole payload, e.g. of the gathered tensor.
        peer: the other process's global rank, of a send or receive.
        phase: part of the training step: see `Recorder.phase`.
        site: file and line of `lathe` that it was called from.
        batch: number of the `batch_isend_irecv` that makes it; None for other calls.
    """

    kind: str
    ranks: tuple[int, ...]
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    bytes: int
    peer: int | None
    phase: str
    site: str
    batch: int | None = None

    def __str__(self) -> str:
        shapes = [
            f"{list(shape)} {str(dtype).removeprefix('torch.')}"
            for shape, dtype in self.tensors[:2]
        ]
        return f"{self.kind}({', '.join(shapes)})"


@dataclass(frozen=True)
class Allocation:
    """A change of the memory in use: `size` bytes of the storage `key`; negative when freed."""

    key: int
    size: int


class _Pause:
    """Reusable context in which a recorder records nothing."""

    def __init__(self, recorder: "Recorder") -> None:
        self.recorder = recorder

    def __enter__(self) -> None:
        self.recorder._paused = True

    def __exit__(self, *_: object) -> None:
        self.recorder._paused = False


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run in a `with` block.

    Attributes:
        phase: name of what is running; set by whoever runs it.
        flops: floating-point operations by phase, as `torch.utils.flop_counter` counts them.
        operations: number of operations that start a kernel, by phase.
        allocations: in order. Storages are numbered from 0.
        kinds: category of every storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "build"
        self.collectives: list[Collective] = []
        self.flops: dict[str, int] = {}
        self.operations: dict[str, int] = {}
        self.allocations: list[Allocation] = []
        self.kinds: list[str] = []
        self._paused = False
        self._batches = 0
        self._batch: int | None = None
        self._alive: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # comes again with the local tensors
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._paused:
            return out
        if starts_a_kernel(func, out):
            self.operations[self.phase] = self.operations.get(self.phase, 0) + 1
        if func.namespace in COLLECTIVES and func._opname not in WAITS:
            self.collectives.append(self._collective(func, args, out))
        elif count := flop_registry.get(func._overloadpacket):
            flops = count(*args, **kwargs, out_val=out)
            self.flops[self.phase] = self.flops.get(self.phase, 0) + flops
        if isinstance(out, Tensor):
            self._track(out)
        elif isinstance(out, tuple | list):
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._track(leaf)
        return out

    def _track(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            self._add(storage, _allocation_category())

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, address = len(self.kinds), storage._cdata

        def freed(_: object) -> None:
            _, size, _ = self._alive.pop(address)
            self.allocations.append(Allocation(key, -size))

        self.kinds.append(kind)
        # Only a weak reference: the recorder must not keep what it watches alive.
        self._alive[address] = key, storage.nbytes(), weakref.ref(storage, freed)
        self.allocations.append(Allocation(key, storage.nbytes()))

    def categorize(self, tensors: Sequence[Tensor], kind: str) -> None:
        """Set the category of tensors; of DTensors, that of their local tensors."""
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            if storage._cdata not in self._alive:
                self._add(storage, kind)
            self.kinds[self._alive[storage._cdata][0]] = kind

    def key(self, tensor: Tensor) -> int:
        """Number of a tensor's storage."""
        return self._alive[tensor.untyped_storage()._cdata][0]

    def __enter__(self) -> Self:
        """Also see `UntypedStorage.resize_`, by which FSDP frees and allocates and which is not an
        operation; and pass over what DTensor runs on whole fake tensors to learn their shapes."""
        self._lock = ShardingPropagator._fake_mode_lock
        ShardingPropagator._fake_mode_lock = _Pause(self)  # type: ignore[assignment]
        self._resize = original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if known := self._alive.get(storage._cdata):
                key, before, reference = known
                self._alive[storage._cdata] = key, size, reference
                self.allocations.append(Allocation(key, size - before))
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        self._send_batch = send_batch = dist.batch_isend_irecv

        # Messages of one batch are waited for together, which their calls do not say themselves.
        def batched(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
            self._batches += 1
            self._batch = self._batches
            try:
                return send_batch(p2p_op_list)
            finally:
                self._batch = None

        dist.batch_isend_irecv = batched
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *reason: object) -> None:
        dist.batch_isend_irecv = self._send_batch
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        ShardingPropagator._fake_mode_lock = self._lock
        super().__exit__(*reason)  # type: ignore[no-untyped-call]

    def peak(self, begin: int) -> dict[str, int]:
        """Bytes by category at the peak after the first `begin` allocations."""
        allocated: Counter[str] = Counter()
        # Replayed from the first allocation: what was allocated before `begin` is still there.
        at_peak, total, peak = dict(allocated), 0, -1
        for i, change in enumerate(self.allocations):
            allocated[self.kinds[change.key]] += change.size
            total += change.size
            if i >= begin and total > peak:
                at_peak, peak = dict(allocated), total
        return at_peak

    def _collective(self, func: OpOverload, args: tuple[Any, ...], out: Any) -> Collective:
        group = CollectiveOp.get_process_group(func, args)
        ranks = tuple(dist.get_process_group_ranks(group))
        # Named as in `torch.distributed`, by whose names a user looks for them.
        name = KINDS.get(func._opname, func._opname)
        peer = ranks[args[2]] if name in ("send", "recv") else None
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if name == "barrier":  # whose tensor is made up
            inputs = []
        # The payload is the larger of what is sent and received, such as the gathered tensor.
        parts = (*args, out if isinstance(out, Tensor) else ()) if inputs else ()
        size = max(
            (sum(x.nbytes for x in tree_leaves(p) if isinstance(x, Tensor)) for p in parts),
            default=0,
        )
        tensors = tuple((tuple(x.shape), x.dtype) for x in inputs)

        # The innermost line of the trainer, not of this package, which is between it and torch.
        lathe_frames = (
            f"lathe{file.removeprefix(LATHE)}:{frame.f_lineno}"
            for frame in _frames()
            if (file := frame.f_code.co_filename).startswith(LATHE)
            and not file.startswith(TRIAL_FOLDER)
        )
        site = next(lathe_frames, "outside of lathe")
        return Collective(name, ranks, tensors, size, peer, self.phase, site, self._batch)


def starts_a_kernel(func: OpOverload, out: Any) -> bool:
    """Whether an operation with this result computes something: not a view, an allocation or a read
    by the host."""
    returns = func._schema.returns
    is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in returns)
    is_empty = func._opname.startswith(("empty", "new_empty", "_local_scalar", "detach"))
    in_aten = func.namespace == "aten"
    return in_aten and not is_view and not is_empty and bool(tree_leaves(out))


def local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor; another tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _frames() -> Iterator[FrameType]:
    # Not `inspect.stack`, which reads source files for every frame.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _allocation_category() -> str:
    """Category of an allocation, from the code that requests it."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file.startswith(TRIAL_FOLDER):
            continue
        if file.startswith(LATHE):
            if file.endswith(("train/loss.py", "train/distill.py")):
                return "logits"
            break
        if "/distributed/fsdp/" in file or "/pipelining/stage.py" in file:
            return "buffers"
    # torch has no public way to ask whether the autograd engine is running.
    in_backward = torch._C._current_graph_task_id() != -1
    return "temporary" if in_backward else "activations"
