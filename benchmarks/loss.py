"""The loss of a language model's head and its gradients: Lathe's, torch's and that of whole logits.

    python benchmarks/loss.py
    python benchmarks/loss.py --dtype bfloat16
    python benchmarks/loss.py --device cuda --dtype bfloat16 --tokens 32768

All see the same hidden states, table and targets, in turns. Memory is what a pass allocates at its
peak beyond these, gradients included; errors are relative to the gradients from whole logits in
float32.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions
from torch.profiler import ProfilerActivity, profile
from train import now

from lathe.train.loss import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole_logits(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """What the others save memory for."""
    logits = F.linear(hidden, table).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_torch(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """torch's own, in chunks that it chooses."""
    options = LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden.flatten(0, 1), table, targets.flatten(), options=options)


LOSSES: dict[str, Loss] = {
    "whole logits": whole_logits,
    "torch, in chunks": by_torch,
    "Lathe": linear_cross_entropy,
    "Lathe, compiled": lambda h, w, t: linear_cross_entropy(h, w, t, is_compiled=True),
}


def gradients(loss: Loss, hidden: Tensor, table: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(hidden, table, targets), (hidden, table))


def peak_bytes(device: str, run: Callable[[], object]) -> int:
    """Bytes that a call allocates at its fullest moment."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        run()
    held = most = 0
    assert watch.profiler is not None
    for event in sorted(watch.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def compare(
    device: str, dtype: torch.dtype, tokens: int, width: int, vocabulary: int, rounds: int
) -> Iterator[tuple[str, float, float, float]]:
    """Name, best seconds, peak GB and relative error of the gradients of every way."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, width, generator=generator)
    table = torch.randn(vocabulary, width, generator=generator) / width**0.5
    targets = torch.randint(vocabulary, (1, tokens), generator=generator).to(device)
    hidden, table = (x.to(device, dtype).requires_grad_() for x in (hidden, table))
    exact = gradients(whole_logits, hidden.float(), table.float(), targets)
    seconds, errors = dict.fromkeys(LOSSES, math.inf), dict[str, float]()
    for turn in range(rounds + 1):
        for name, loss in LOSSES.items():
            began = now(device)
            found = gradients(loss, hidden, table, targets)
            elapsed = now(device) - began
            if turn:
                seconds[name] = min(seconds[name], elapsed)
            else:  # in which kernels are compiled
                pairs = zip(found, exact, strict=True)
                errors[name] = max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)
            del found
    for name, loss in LOSSES.items():
        size = peak_bytes(device, partial(gradients, loss, hidden, table, targets))
        yield name, seconds[name], size / 1e9, errors[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    sizes = given.tokens, given.width, given.vocabulary, given.rounds
    table = Table(title=f"{given.tokens} tokens, {given.dtype}, torch {torch.__version__}")
    for title in ("", "ms", "peak GB", "error"):
        table.add_column(title, justify="right" if title else "left")
    for name, seconds, memory, error in compare(given.device, getattr(torch, given.dtype), *sizes):
        table.add_row(name, f"{1e3 * seconds:,.1f}", f"{memory:.2f}", f"{error:.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
