"""Worker process of one engine, controlled by lines of JSON.

python -m peers.worker convert MODULE MODEL CALIBRATION WEIGHTS OUTPUT
python -m peers.worker serve MODULE FOLDER VOCABULARY THREADS
"""

import importlib
import itertools
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from peers.engine import DECODED_PROMPT, STEPS, Engine

PER_THREAD = 6  # the kernel's CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED


def engine(module: str) -> type[Engine]:
    """Engine class defined in a module of this package."""
    defined = vars(importlib.import_module(f"peers.{module}")).values()
    classes = [value for value in defined if isinstance(value, type) and issubclass(value, Engine)]
    return next(c for c in classes if c.__module__ == f"peers.{module}")


Times = dict[int, float]  # CPU seconds by thread


def of_process() -> Times:
    """CPU time of all threads, including those that have exited."""
    return {0: time.process_time()}


def of_threads() -> Times:
    """CPU time of every thread of this process by id."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        # Python has no API for another thread's clock: see clock_getcpuclockid(3).
        with suppress(OSError):  # the thread has exited
            found[int(name)] = time.clock_gettime((~int(name) << 3) | PER_THREAD)
    return found


def elapsed(before: Times, after: Times) -> float:
    """CPU time of the busiest thread."""
    return max(now - before.get(thread, 0.0) for thread, now in after.items())


class Measured:
    """Measures an engine.

    With one thread, time is CPU time of the process, which other work on the machine hardly
    affects. With several, it is that of the busiest thread, which equals wall time if the threads
    share all work and nothing else runs; waiting threads spin, so other work increases it.
    """

    def __init__(self, peer: Engine, vocabulary: int, threads: int = 1) -> None:
        self.peer, self.vocabulary = peer, vocabulary
        self.clock = of_process if threads == 1 else of_threads

    def prefill(self, length: int) -> list[float]:
        """Seconds to prefill a prompt."""
        prompt = self._random(1, length)[0]
        started = self.clock()
        self.peer.prefill(prompt)
        return [elapsed(started, self.clock())]

    def decode(self, rows: int) -> list[float]:
        """Seconds of each decoding step with this many rows."""
        times: list[Times] = []
        prompts = self._random(rows, DECODED_PROMPT)
        found = self.peer.decode(prompts, STEPS, lambda: times.append(self.clock()))
        assert len(times) == STEPS + 1, f"{len(times)} ticks"
        assert found.shape == (rows, STEPS + 1), f"tokens {found.shape}"
        return [elapsed(*pair) for pair in itertools.pairwise(times)]

    def score(self, tokens: str) -> list[list[float]]:
        """Negative log-likelihoods (N, T - 1) of the windows (N, T) in a file."""
        return [(-self.peer.log_likelihoods(row)).tolist() for row in np.load(tokens)]

    def cloze(self, passages: str) -> list[tuple[float, bool]]:
        """Log-likelihood of every last word in a file of (context, word), and whether greedy
        decoding gives all of its tokens."""
        found = []
        for context, word in json.loads(Path(passages).read_text()):
            likelihoods = self.peer.log_likelihoods(np.array(context + word))
            said = self.peer.decode(np.array([context]), len(word) - 1, lambda: None)[0]
            found.append((float(likelihoods[-len(word) :].sum()), said.tolist() == word))
        return found

    def _random(self, rows: int, length: int) -> np.ndarray:
        return np.random.default_rng(length).integers(1, self.vocabulary, (rows, length))


def serve(peer: type[Engine], folder: Path, vocabulary: int, threads: int) -> None:
    # Libraries must not print between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    measured = Measured(peer(folder, threads), vocabulary, threads)
    answer(peer.version)
    for line in sys.stdin:
        method, argument = json.loads(line)
        answer(getattr(measured, method)(argument))


def main() -> None:
    task, module, *rest = sys.argv[1:]
    if task == "serve":
        serve(engine(module), Path(rest[0]), int(rest[1]), int(rest[2]))
    else:
        model, calibration, weights, output = rest
        engine(module).convert(Path(model), np.load(calibration), weights, Path(output))


if __name__ == "__main__":
    main()
