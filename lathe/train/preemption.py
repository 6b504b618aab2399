"""SIGTERM as a request to save the state and exit with a distinct status."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def watch_for_preemption() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM was received; the old handler is restored at
    the end. After a SIGTERM later ones are ignored, so that the process can end with its status.

    Always False outside the main thread, where Python delivers no signals.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: requested.set())
    try:
        yield requested.is_set
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if requested.is_set() else before)
