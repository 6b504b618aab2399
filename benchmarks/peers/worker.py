"""One engine in a process of its own, which does what it is told by lines of JSON.

python -m peers.worker convert MODULE MODEL CALIBRATION WEIGHTS OUTPUT
python -m peers.worker serve MODULE FOLDER VOCABULARY THREADS
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from peers.engine import Engine

STEPS = 16
DECODED_PROMPT = 128


def engine(module: str) -> type[Engine]:
    """The engine that a module of this package defines."""
    defined = vars(importlib.import_module(f"peers.{module}")).values()
    classes = [value for value in defined if isinstance(value, type) and issubclass(value, Engine)]
    return next(c for c in classes if c.__module__ == f"peers.{module}")


class Measured:
    """An engine under a clock. That of one thread is the processor time of this process, since
    other work on the machine has no part in it; that of several, which wait for each other, is the
    wall's."""

    def __init__(self, peer: Engine, vocabulary: int, threads: int = 1) -> None:
        self.peer, self.vocabulary = peer, vocabulary
        self.clock = time.process_time if threads == 1 else time.perf_counter

    def prefill(self, length: int) -> list[float]:
        """Seconds of one prompt."""
        prompt = self._random(1, length)[0]
        started = self.clock()
        self.peer.prefill(prompt)
        return [self.clock() - started]

    def decode(self, rows: int) -> list[float]:
        """Seconds of each step of so many rows."""
        times: list[float] = []
        prompts = self._random(rows, DECODED_PROMPT)
        self.peer.decode(prompts, STEPS, lambda: times.append(self.clock()))
        assert len(times) == STEPS + 1, f"{len(times)} ticks"
        return np.diff(times).tolist()

    def score(self, tokens: str) -> list[list[float]]:
        """Negative log-likelihoods (N, T - 1) of the tokens of windows in a file (N, T)."""
        return [(-self.peer.log_likelihoods(row)).tolist() for row in np.load(tokens)]

    def _random(self, rows: int, length: int) -> np.ndarray:
        return np.random.default_rng(length).integers(1, self.vocabulary, (rows, length))


def serve(peer: type[Engine], folder: Path, vocabulary: int, threads: int) -> None:
    # What a library prints must not get between the answers.
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
