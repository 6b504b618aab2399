"""A GPU that is played on the CPU: its tensors are the CPU's, told apart by where they came from.

An operation on tensors of both fails, as it would on a GPU, and memory can be counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lathe.model import by_block

GPU = torch.device("cpu", 0)
"""Unequal to `torch.device("cpu")`, so that tensors are copied to it, but where they are then."""

aten: Any = torch.ops.aten
StorageWeakRef: Any = reductions.StorageWeakRef  # which is not typed


class OnGPU(Tensor):
    """A tensor that was copied to the GPU, or was computed from one."""

    device = GPU

    def cpu(self) -> Tensor:  # type: ignore[override]
        """A copy, where `Tensor.cpu` would return the tensor itself."""
        return torch.from_numpy(self.as_subclass(Tensor).numpy(force=True).copy())


class PretendGPU(TorchDispatchMode):
    """Counts the tensors on the GPU, and asserts that no operation mixes them with the host's.

    Attributes:
        peak: the most bytes that they have had together.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, tuple[Any, bool, int]] = {}
        self.live = self.peak = 0

    def tag(self, x: Tensor, on_gpu: bool) -> None:
        """Note where a tensor is."""
        storage = x.untyped_storage()
        self.live += on_gpu * storage.nbytes()
        self.storages[storage._cdata] = StorageWeakRef(storage), on_gpu, storage.nbytes()

    def place(self, x: Tensor) -> bool | None:
        """Whether a tensor is on the GPU; None for a constant, which could be on either."""
        known = self.storages.get(x.untyped_storage()._cdata)
        return known[1] if known is not None and not known[0].expired() else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is aten._foreach_copy_.default:  # which does it above a dispatch mode only
            increment_version(args[0])
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if kwargs.get("device") == GPU:
            for x in outputs:
                self.tag(x, True)
            result = result.as_subclass(OnGPU)
        elif func is not aten.copy_.default:
            # Numbers may be on the host, and so may indices.
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
            read = read[:1] if func is aten.index.Tensor else read
            places = {place for x in read if (place := self.place(x)) is not None}
            assert len(places) < 2, f"{func} of tensors on the host and on the GPU"
            for x in outputs:
                if places and self.place(x) is None:
                    self.tag(x, places == {True})
        if self.live > self.peak:  # or not: some are gone by now
            self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
            self.live = sum(n for _, on_gpu, n in self.storages.values() if on_gpu)
            self.peak = max(self.peak, self.live)
        return result


@contextmanager
def pretend_gpu(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> Iterator[PretendGPU]:
    """Play a GPU; the model is on the host. Tokens are copied to `GPU`."""
    gpu = PretendGPU()

    def to_host(x: Tensor) -> Tensor:
        copy = x.as_subclass(Tensor).clone()
        gpu.tag(copy, False)
        return copy

    for tensor in (*model.parameters(), *model.buffers()):
        gpu.tag(tensor, False)
    with gpu, monkeypatch.context() as patched:
        patched.setattr(by_block, "to_host", to_host)
        yield gpu
