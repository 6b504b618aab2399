"""Runs a part of a test in a process of its own, a fork."""

import gc
import multiprocessing
from collections.abc import Callable


def run_apart(work: Callable[[], None]) -> None:
    """Run `work`, which compiles with torch: afterwards its process has threads for autograd, and
    no fork of it can train, as those of other tests do."""

    def run() -> None:
        gc.freeze()  # or process groups of earlier tests are collected, and wait for their threads
        work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0, "its traceback is above"
