"""Gradients of replicated weights are averaged while the last backward pass computes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lathe.train.optimizer import HalfWeights
from lathe.train.passes import Replicas


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The messages, which the other process doubles: it has the threefold gradients."""
    messages: list[Tensor] = []

    class Done:
        def wait(self) -> None: ...

    def all_reduce(flat: Tensor, op: object, group: object, async_op: bool) -> Done:
        assert op == dist.ReduceOp.AVG and async_op
        messages.append(flat)
        flat.mul_(2)
        return Done()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr("lathe.train.passes.BUCKET_BYTES", 4 * (16 + 4))  # one linear
    return messages


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def passes(net: nn.Module, count: int = 2) -> list[Tensor]:
    """The losses of micro-batches."""
    generator = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if isinstance(net[0].__dict__.get("weight"), Tensor) else torch.float32  # type: ignore[index]
    return [net(torch.randn(2, 4, generator=generator).to(dtype)).sum() for _ in range(count)]


@pytest.mark.parametrize("half", [False, True], ids=["O1", "O2"])
def test_gradients_are_averaged_once_and_early(half: bool, group: Any, sent: list[Tensor]) -> None:
    plain, net = model(), model()
    weights = list(net.parameters())
    copies, own = (HalfWeights(m, torch.bfloat16) if half else None for m in (net, plain))
    averages = Replicas(weights, copies, group)
    seen: list[int] = []

    def watch(_: nn.Module, __: object, out: Tensor) -> None:
        # Before the gradients of this linear.
        out.register_hook(lambda _: seen.append(len(sent)))  # type: ignore[no-untyped-call]

    net[0].register_forward_hook(watch)
    for loss in passes(plain):
        loss.backward()  # type: ignore[no-untyped-call]
        if own:
            own.collect_gradients()
    first, last = passes(net)
    first.backward()  # type: ignore[no-untyped-call]
    if copies:
        copies.collect_gradients()
    assert not sent
    averages.expect_last()
    last.backward()  # type: ignore[no-untyped-call]
    assert seen[-1] == 2  # those of the later linears, before the first one's gradients are there
    averages.average()
    assert [len(message) for message in sent] == [20, 20, 20]
    for weight, other in zip(weights, plain.parameters(), strict=True):
        assert weight.grad is not None and other.grad is not None
        assert torch.equal(weight.grad, 2 * other.grad) and weight.grad.dtype == torch.float32


def test_a_weight_that_is_not_used_is_averaged_too(group: Any, sent: list[Tensor]) -> None:
    net = model()
    averages = Replicas(list(net.parameters()), None, group)
    averages.expect_last()
    list(net)[2](torch.randn(2, 4)).sum().backward()  # type: ignore[no-untyped-call]
    assert len(sent) == 1
    averages.average()
    assert len(sent) == 3
    unused = next(net.parameters()).grad
    assert unused is not None and not unused.any()


def test_after_a_pipeline_all_are_sent_together(group: Any, sent: list[Tensor]) -> None:
    net = model()
    averages = Replicas(list(net.parameters()), None, group)
    for loss in passes(net):
        loss.backward()  # type: ignore[no-untyped-call]
    assert not sent
    averages.average()
    assert len(sent) == 3
