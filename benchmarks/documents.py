"""Cost of `Data.reset_attention`: blocks of GPT-2's width, forward and backward, float32.

    python benchmarks/documents.py [--layers 2] [--rounds 3]

Three ways to compute a micro-batch, in turns: attention over whole rows; a kernel call for every
document, as Lathe does; and a mask (rows, T, T), whose results are compared. Times are CPU seconds
on one thread.
"""

import argparse
import time

import numpy as np
import torch
from torch import Tensor

from lathe.model.block import Mask
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT

TOKENS = 4096
CASES = ((256, 300), (1024, 300), (1024, 1000), (4096, 300), (4096, 1000))
"""Row length and mean document length."""


def processor_seconds(
    model: GPT, x: Tensor, way: Mask | None, positions: Tensor | None
) -> tuple[float, Tensor]:
    started = time.process_time()
    found = model.transform(x, way, positions=positions)
    found.square().mean().backward()  # type: ignore[no-untyped-call]
    return time.process_time() - started, found.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    n = settings.layers
    model = GPT(GPTConfig(512, 4096, 768, 64, (12,) * n, (3072,) * n))
    model.initialize(0.02, seed=0)
    print("| row | documents | whole rows | documents apart | a mask |\n|---|---|---|---|---|")
    for length, mean in CASES:
        rng = np.random.default_rng(0)
        starts = rng.random((TOKENS // length, length)) < 1 / mean
        starts[:, 0] = True
        places = np.arange(length)
        positions = places - np.maximum.accumulate(np.where(starts, places, 0), 1)
        sizes = tuple(np.diff(np.flatnonzero(starts), append=starts.size).tolist())
        ids = torch.from_numpy(starts.cumsum(1))
        mask = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
        x = torch.randn(len(starts), length, 768)
        ways: list[Mask | None] = [None, sizes, mask]
        found: list[list[float]] = [[], [], []]
        results: list[Tensor] = [x, x, x]
        for _ in range(settings.rounds):
            for i, way in enumerate(ways):
                at = torch.from_numpy(positions) if i else None
                seconds, results[i] = processor_seconds(model, x, way, at)
                found[i].append(seconds)
        torch.testing.assert_close(results[1], results[2], atol=1e-4, rtol=1e-4)
        best = [min(times) for times in found]
        shown = " | ".join(f"{s:.2f} s, {s / best[0]:.2f}x" for s in best)
        print(f"| {len(starts)} x {length} | {len(sizes)} | {shown} |")


if __name__ == "__main__":
    main()
