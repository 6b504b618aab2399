"""Distributes cases over worker processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.hostile.case import Case, Verdict
from tests.hostile.fuzzed import Drawn

WORKERS = 2


class Worker:
    """A `tests.hostile.worker` process, ready once `wait` has returned."""

    def __init__(self, good: Path, scratch: Path) -> None:
        repository = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.worker", str(good), str(scratch)],
            cwd=repository,
            env=os.environ | {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        if self._answer() != "ready\n":
            raise RuntimeError("a worker exited: see its messages above")

    def verdict(self, case: Case) -> Verdict:
        return self._ask(case.id)

    def fuzzed(self, drawn: Drawn) -> Verdict:
        """Run the case of a fuzzer's draw."""
        return self._ask(drawn)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, question: str | Drawn) -> Verdict:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if not answer:
            raise RuntimeError(f"the worker exited on {question}")
        return Verdict(**json.loads(answer))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def workers(folder: Path, number: int = WORKERS) -> Iterator[list[Worker]]:
    """Start workers; the first one builds the world in `folder` if it does not exist."""
    good, scratch = folder / "world", folder / f"scratch-{os.getpid()}"
    started = [Worker(good, scratch)]
    try:
        started[0].wait()
        started += [Worker(good, scratch) for _ in range(number - 1)]
        for worker in started[1:]:
            worker.wait()
        yield started
    finally:
        for worker in started:
            worker.close()


def run(cases: Sequence[Case], started: Sequence[Worker]) -> list[Verdict]:
    """Run cases in parallel; returns the verdicts in the same order."""
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in started:
        free.put(worker)

    def verdict(case: Case) -> Verdict:
        worker = free.get()
        try:
            return worker.verdict(case)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(len(started)) as threads:
        return list(threads.map(verdict, cases))
