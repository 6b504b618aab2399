"""Termination signals while processes or pods are running that have to be ended."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

TERMINATION = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def first_signal_raises(
    error: Callable[[int], BaseException], numbers: Sequence[int] = TERMINATION
) -> Iterator[None]:
    """The first of these signals raises `error(number)`; later ones are ignored until the block
    ends, so that they do not interrupt its cleanup."""

    def handler(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise error(number)

    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
