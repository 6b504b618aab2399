"""Latency of exported models, measured in turn so that noise affects all of them equally."""

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lathe_base.progress import bar
from lathe_serving.runtime.exported_model import n_bytes
from lathe_serving.runtime.session import OnnxModel


def measure(
    models: Mapping[str, Path],
    prompt_tokens: int = 64,
    new_tokens: int = 16,
    batch: int = 1,
    rounds: int = 5,
    threads: int = 0,
) -> dict[str, dict[str, float]]:
    """Prefill and decode times of exported folders on random tokens.

    Args:
        models: name -> export folder; ratios are relative to the first.
        prompt_tokens: length of a prompt, shorter if a model has too few positions.
        new_tokens: decode steps after each prompt.
        batch: prompts that run together.
        rounds: each runs every model once, in turn; one more round for warm-up is not counted.
        threads: onnxruntime's; 0 uses every core.

    Returns:
        By name: `bytes` of the graph and its weights; the medians `prefill_ms` of the batch's
        prompts, `decode_ms` of a step and `tokens_per_second` of decoding; and, relative to the
        first model, `bytes_ratio` (smaller is better), `prefill_speedup` and `decode_speedup`.

    Raises:
        UserError: a folder is not an export.
    """
    opened = {name: OnnxModel(folder, threads) for name, folder in models.items()}
    shortest = min(model.n_positions for model in opened.values())
    # All models get the same tokens, so the one with the shortest context decides.
    prompt_tokens = max(1, min(prompt_tokens, shortest - new_tokens))
    new_tokens = min(new_tokens, shortest - prompt_tokens)
    prefill: dict[str, list[float]] = {name: [] for name in models}
    decode: dict[str, list[float]] = {name: [] for name in models}
    generator = np.random.default_rng(0)
    with bar("latency", (rounds + 1) * len(models)) as progress:
        for turn in range(rounds + 1):
            for name, model in opened.items():
                shape = (batch, prompt_tokens + new_tokens)
                tokens = generator.integers(0, model.vocab_size, shape)
                # Turn by turn, so that a slow moment of the machine does not fall on one model.
                times = _run(model, tokens, prompt_tokens)
                if turn > 0:
                    prefill[name].append(times[0])
                    decode[name].extend(times[1:])
                progress.advance()
    timings = {
        name: {
            "bytes": float(n_bytes(model.folder)),
            "prefill_ms": float(np.median(prefill[name])) * 1e3,
            "decode_ms": float(np.median(decode[name])) * 1e3,
            "tokens_per_second": batch / float(np.median(decode[name])),
        }
        for name, model in opened.items()
    }
    first = timings[next(iter(timings))]
    for timing in timings.values():
        timing["bytes_ratio"] = timing["bytes"] / first["bytes"]
        timing["prefill_speedup"] = first["prefill_ms"] / timing["prefill_ms"]
        timing["decode_speedup"] = first["decode_ms"] / timing["decode_ms"]
    return timings


def _run(model: OnnxModel, tokens: NDArray[np.int64], prompt: int) -> list[float]:
    """Seconds for the prompt, then for every further token."""
    cache = model.start(tokens.shape[0], tokens.shape[1])
    times = []
    for first, last in [(0, prompt), *((i, i + 1) for i in range(prompt, tokens.shape[1]))]:
        start = time.perf_counter()
        model.step(cache, tokens[:, first:last])
        times.append(time.perf_counter() - start)
    return times
