"""Memory and time of the language model head's loss: whole logits against Lathe's chunks.

    python benchmarks/loss.py [--threads 2] [--rounds 3]

Forward and backward in float32 with GPT-2's vocabulary and 768 hidden units. Every case runs in a
separate process: memory is the increase of its peak by the first pass, time the median of others.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from lathe.train.loss import linear_cross_entropy

VOCABULARY, HIDDEN, ROWS = 50304, 768, 8
LENGTHS = (128, 256, 512, 1024)
CHILD = "--child"


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())


LOSSES = {"plain": plain, "chunked": linear_cross_entropy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="number of threads")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, threads {arguments.threads}, V {VOCABULARY}, C {HIDDEN}")
    print(f"{'tokens':>10}{'plain':>20}{'chunked':>20}{'memory':>9}{'speed':>8}")
    for length in LENGTHS:
        (memory, seconds), (less, faster) = (
            child(name, length, arguments.threads, arguments.rounds) for name in LOSSES
        )
        print(
            f"{f'{ROWS} x {length}':>10}{memory:9.0f} MB{seconds:6.2f} s{less:11.0f} MB"
            f"{faster:6.2f} s{memory / less:8.1f}x{seconds / faster:7.2f}x"
        )


def child(name: str, length: int, threads: int, rounds: int) -> tuple[float, float]:
    """MB and seconds of a pass, measured in a new process."""
    command = [sys.executable, __file__, CHILD, name, *map(str, (length, threads, rounds))]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    memory, seconds = json.loads(out)
    return memory, seconds


def measure(name: str, length: int, threads: int, rounds: int) -> tuple[float, float]:
    torch.set_num_threads(threads)
    hidden = torch.randn(ROWS, length, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN).mul_(0.02).requires_grad_()
    targets = torch.randint(VOCABULARY, (ROWS, length))
    before, times = peak_mb(), []
    for _ in range(rounds + 1):
        hidden.grad = weight.grad = None
        started = time.perf_counter()
        LOSSES[name](hidden, weight, targets).backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - started)
        if len(times) == 1:
            after = peak_mb()
    return after - before, statistics.median(times[1:])


def peak_mb() -> float:
    """Peak memory of this process in MB (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    if CHILD in sys.argv:
        _, _, case, *numbers = sys.argv
        print(json.dumps(measure(case, *map(int, numbers))))
    else:
        main()
