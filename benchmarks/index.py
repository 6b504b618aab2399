"""Time and memory to index a token data set for training, and to blend several.

    python benchmarks/index.py [--seq-len 1024]

Only document lengths are generated (geometric, 1,000 tokens on average), since an index needs no
tokens. Each case runs in a separate process, to measure its peak memory.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from lathe.data.samples import BLOCK, SampleIndex, blending_indices

DOCUMENT_TOKENS = 1000
INDEXES = [{"tokens": t, "epochs": e} for t in (10**9, 10**10) for e in (1, 2.5)]
BLENDS = [{"weights": list(range(1, parts + 1))} for parts in (2, 4, 16)]
BLENDED_SAMPLES = 10**7
ACCESSES = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=1024, help="sequence length in tokens")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        case = json.loads(arguments.case)
        if "weights" in case:
            print(json.dumps(measure_blend(**case)))
        else:
            print(json.dumps(measure_index(**case, seq_len=arguments.seq_len)))
        return
    print(f"index, seq {arguments.seq_len}")
    names = ("tokens", "documents", "samples", "epochs", "seconds", "peak MB", "us a look-up")
    table(names, INDEXES, arguments.seq_len)
    print("\nblend")
    table(("parts", "samples", "seconds", "peak MB"), BLENDS, arguments.seq_len)


def table(names: Sequence[str], cases: Sequence[object], seq_len: int) -> None:
    print("".join(f"{name:>15}" for name in names))
    for case in cases:
        row = in_a_process(case, seq_len)
        print("".join(f"{value:>15,}" for value in row), flush=True)


def in_a_process(case: object, seq_len: int) -> list[float]:
    command = [sys.executable, __file__, "--seq-len", str(seq_len), "--case", json.dumps(case)]
    row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert isinstance(row, list)
    return row


def measure_index(tokens: int, epochs: float, seq_len: int) -> list[float]:
    sizes = document_sizes(tokens // DOCUMENT_TOKENS)
    held = int(sizes.sum(dtype=np.int64))
    wanted = int(epochs * ((held - 1) // seq_len))
    before, started = peak_megabytes(), time.perf_counter()
    index = SampleIndex(sizes, range(len(sizes)), seq_len, wanted, seed=1234)
    seconds, added = time.perf_counter() - started, peak_megabytes() - before
    places = np.random.RandomState(0).randint(0, len(index), ACCESSES).tolist()
    started = time.perf_counter()
    for place in places:
        index.spans(place)
    lookup = (time.perf_counter() - started) / ACCESSES * 1e6
    figures = (held, len(sizes), len(index), index.epochs)
    return [*figures, round(seconds, 2), round(added), round(lookup, 1)]


def measure_blend(weights: list[float]) -> list[float]:
    blending_indices(np.array(weights), 1000)
    before, started = peak_megabytes(), time.perf_counter()
    blending_indices(np.array(weights), BLENDED_SAMPLES)
    seconds, added = time.perf_counter() - started, peak_megabytes() - before
    return [len(weights), BLENDED_SAMPLES, round(seconds, 2), round(added)]


def document_sizes(documents: int) -> np.ndarray:
    """Document sizes (int32), generated in blocks to keep peak memory low before indexing."""
    sizes, rng = np.empty(documents, np.int32), np.random.RandomState(0)
    for first in range(0, documents, BLOCK):
        block = sizes[first : first + BLOCK]
        block[:] = rng.geometric(1 / DOCUMENT_TOKENS, len(block))
    return sizes


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
