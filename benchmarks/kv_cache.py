r"""Steps of an export with its KV cache in float and in INT8.

    lathe quantize run/model -o Engine.max_steps=0 --output run/float
    lathe quantize run/model -o Engine.max_steps=0 -o Compress.Quantization.kv_cache_bits=8 \
        --output run/int8
    lathe export run/float --output run/float-onnx
    lathe export run/int8 --output run/int8-onnx
    python benchmarks/kv_cache.py run/float-onnx run/int8-onnx [--threads 2]

Prompts are read in chunks, as a server reads them; the longest one fills the context, which takes
minutes if that has 8,192 tokens. Both exports take turns in one process; ratios are medians over
rounds.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from lathe_serving.runtime.batcher import PREFILL_CHUNK
from lathe_serving.runtime.session import OnnxModel

STEPS = 6
CASES = (1, 512), (1, 2000), (8, 512), (8, 2000), (16, 2000)  # rows, and tokens before the step


def prompt(length: int, model: OnnxModel) -> float:
    """Seconds to read a prompt."""
    cache = model.start(1, length)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (1, length))
    started = time.perf_counter()
    for first in range(0, length, PREFILL_CHUNK):
        model.step(cache, tokens[:, first : first + PREFILL_CHUNK])
    return time.perf_counter() - started


def decode(rows: int, past: int, model: OnnxModel) -> float:
    """Seconds of a step of one token for every row, after `past` tokens."""
    cache = model.start(rows, past + STEPS + 1)
    cache.lengths[:] = past
    for buffer in cache.buffers:  # every page is touched, and no value is subnormal
        buffer[...] = 1
    tokens = np.full((rows, 1), model.eos_id)
    model.step(cache, tokens)
    started = time.perf_counter()
    for _ in range(STEPS):
        model.step(cache, tokens)
    return (time.perf_counter() - started) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exports", type=Path, nargs=2, help="with the cache in float, and in INT8")
    parser.add_argument("--threads", type=int, default=2, help="number of compute threads")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    given = parser.parse_args()
    models = [OnnxModel(folder, given.threads) for folder in given.exports]
    sizes = [sum(buffer.nbytes for buffer in model.start(1, 1).buffers) for model in models]
    print("| | float | INT8 | ratio |\n|---|---|---|---|")
    print(f"| bytes a token | {sizes[0]:,} | {sizes[1]:,} | {sizes[1] / sizes[0]:.2f} |")
    cases: dict[str, Callable[[OnnxModel], float]] = {}
    for length in (512, models[0].n_positions):
        cases[f"prompt of {length:,}"] = partial(prompt, length)
    for rows, past in CASES:
        name = f"step of {rows} row{'s' * (rows > 1)} after {past:,}"
        cases[name] = partial(decode, rows, past)
    for name, measure in cases.items():
        seconds = np.array([[measure(model) for model in models] for _ in range(given.rounds + 1)])
        medians = 1000 * np.median(seconds[1:], axis=0)  # the first round warms up
        ratio = np.median(seconds[1:, 1] / seconds[1:, 0])
        print(f"| {name} | {medians[0]:.1f} ms | {medians[1]:.1f} ms | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
