"""SIGTERM as a request: save, and end with a status of its own."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def watch_for_preemption() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether SIGTERM has come since; its handler is put back after.

    Outside the main thread, where Python delivers no signals, it never has.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
