"""The chunked loss against F.cross_entropy of whole logits, in one process and sharded."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lathe.train import loss as loss_module
from lathe.train.loss import linear_cross_entropy

V, C = 94, 12
RANKS = 2


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 4 * V)


def inputs(
    B: int, T: int = 3, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (B, T, C), weight (V, C), targets (B, T)."""
    generator = torch.Generator().manual_seed(B)
    hidden = torch.randn(B, T, C, dtype=dtype, generator=generator) * scale
    weight = torch.randn(V, C, dtype=dtype, generator=generator)
    targets = torch.randint(V, (B, T), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(hidden.dtype).flatten(0, 1), targets.flatten())


def gradients(loss: Tensor, *of: Tensor, upstream: float = 1.0) -> list[Tensor]:
    return list(torch.autograd.grad(loss * upstream, of))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 3), (4, 3), (7, 3)])  # chunks of <= 4 tokens
def test_loss_and_gradients_equal_cross_entropy(B: int, T: int, dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(B, T, dtype)
    ours, theirs = (f(hidden, weight, targets) for f in (linear_cross_entropy, plain))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        gradients(ours, hidden, weight, upstream=3.0),
        gradients(theirs, hidden, weight, upstream=3.0),
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_compiled_kernel_computes_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Path(tempfile.gettempdir()) / "lathe-tests-kernels"  # else half a minute each time
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept))
    hidden, weight, targets = inputs(7, dtype=dtype)  # chunks of 4 tokens, and a last one of 1
    eager, compiled = (
        linear_cross_entropy(hidden, weight, targets, None, is_compiled)
        for is_compiled in (False, True)
    )
    torch.testing.assert_close(compiled, eager)
    both = [gradients(loss, hidden, weight, upstream=3.0) for loss in (compiled, eager)]
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(*both, **tolerance)
    with torch.no_grad():
        again = linear_cross_entropy(hidden, weight, targets, None, True)
    torch.testing.assert_close(again, eager)


def test_logits_far_apart_stay_finite() -> None:
    hidden, weight, targets = inputs(4, dtype=torch.float32, scale=1e4)
    ours, theirs = (f(hidden, weight, targets) for f in (linear_cross_entropy, plain))
    assert theirs > 1000
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(ours, hidden, weight), gradients(theirs, hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_errs_no_more_than_plain_autocast(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(40, dtype=torch.float32)
    doubles = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = plain(*doubles, targets)
    truth = [exact, *gradients(exact, *doubles)]

    def errors(f: Any, upstream: float) -> list[float]:
        with torch.autocast("cpu", dtype):
            loss = f(hidden, weight, targets)
        found = [loss * upstream, *gradients(loss, hidden, weight, upstream=upstream)]
        assert {t.dtype for t in found} == {torch.float32}
        return [(a / upstream - b).norm().item() for a, b in zip(found, truth, strict=True)]

    for ours, theirs in zip(errors(linear_cross_entropy, 1.0), errors(plain, 2.0**15), strict=True):
        assert ours < 1.2 * theirs + 1e-4


def test_small_gradients_survive_float16_without_a_loss_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Probabilities of 1 / 5000 over 3,000 tokens give gradients of 7e-8, near fp16's minimum."""
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 2**20)
    hidden, _, targets = inputs(1000, dtype=torch.float32)
    weight = torch.randn(5000, C, generator=torch.Generator().manual_seed(0)).mul_(0.01)
    weight.requires_grad_()
    unseen = torch.ones(5000, dtype=torch.bool).index_fill(0, targets.flatten(), False)
    truth = gradients(plain(hidden, weight, targets), weight)[0][unseen]

    def error(f: Any) -> float:
        with torch.autocast("cpu", torch.float16):
            loss = f(hidden, weight, targets)
        return float((gradients(loss, weight)[0][unseen] - truth).norm() / truth.norm())

    assert error(linear_cross_entropy) < 1e-3 < 1e-1 < error(plain)


def test_without_gradients_none_are_computed() -> None:
    hidden, weight, targets = inputs(4)
    with torch.no_grad(), Largest() as seen:
        loss = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad and seen.elements <= 4 * V
    torch.testing.assert_close(loss, plain(hidden, weight, targets))


@pytest.mark.parametrize("frozen", [0, 1], ids=["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen: int) -> None:
    *tensors, targets = inputs(4)
    tensors[frozen].requires_grad_(False)
    free = tensors[1 - frozen]
    ours, theirs = (f(*tensors, targets) for f in (linear_cross_entropy, plain))
    torch.testing.assert_close(gradients(ours, free), gradients(theirs, free))


def test_logits_of_the_batch_never_stand_in_memory() -> None:
    hidden, weight, targets = inputs(100)
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, targets).backward()
    assert seen.elements <= max(weight.numel(), hidden.numel()) < 300 * V / 4


def test_second_backward_is_refused() -> None:
    hidden, weight, targets = inputs(1)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_two_processes_with_half_the_vocabulary_each(tmp_path: Path) -> None:
    hidden, weight, targets = inputs(7)
    mp.spawn(sharded, (str(tmp_path),), nprocs=RANKS)
    theirs = plain(hidden, weight, targets)
    grad_hidden, grad_weight = gradients(theirs, hidden, weight)
    for rank, rows in enumerate(grad_weight.chunk(RANKS)):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found, [theirs.detach(), grad_hidden, rows])


def sharded(rank: int, folder: str) -> None:
    """Process of one rank: computes the loss and its gradients for the rank's rows."""
    torch.set_num_threads(1)
    loss_module.CHUNK_ELEMENTS = 4 * V // RANKS
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    hidden, weight, targets = inputs(7)
    rows = weight.detach().chunk(RANKS)[rank].requires_grad_()
    loss = linear_cross_entropy(hidden, rows, targets, dist.group.WORLD)
    torch.save([loss.detach(), *gradients(loss, hidden, rows)], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


class Largest(TorchDispatchMode):
    """Tracks the size of the largest tensor that any operation creates, except views."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("rows", [1, 127, 128, 1000, 32768, 40000])
def test_chunks_are_whole_tiles(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 2**26)
    n = loss_module.chunk_rows(rows, 50304)
    assert n * 50304 <= 2**26 and (n == rows or n % 128 == 0)
    assert -(-rows // n) == -(-rows // 1280)  # as few as possible


def test_few_chunks_add_to_the_gradient_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, the logits of several blocks are multiplied together."""
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 4 * V)
    hidden, weight, targets = inputs(16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), Names() as seen:
        linear_cross_entropy(hidden, weight, targets)
    assert seen.counts["mm"] == 3 * 3  # 48 tokens in chunks of 16


class Names(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))
