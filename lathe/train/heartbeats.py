"""Heartbeats, by which the processes of a group notice that one has stopped, and waiting outside of
collectives for as long as they go on. Imports neither torch nor Paddle."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from lathe_base.errors import Code, StageError

log = logging.getLogger("lathe")

POLL_SECONDS = 0.5
"""Between two looks at whether others have finished what they do alone."""

BEAT_SECONDS = 5.0
SILENT_SECONDS = 40.0
"""Seconds without a heartbeat after which a process is reported."""


class Store(Protocol):
    """The key-value store of a group: torch's `Store`, or `lathe_paddle.workers.PaddleStore`. Its
    methods raise RuntimeError after its server has ended."""

    def set(self, key: str, value: str, /) -> object:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """The value of a key, which exists."""

    def add(self, key: str, value: int, /) -> int:
        """Add to a counter, which begins at 0; returns its new value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these keys exist."""


class Heartbeats:
    """A background thread that beats for this rank, through the group's store, and watches the next
    one.

    A collective does not tell who is missing, and gives up after a timeout that cannot know how
    long one process has to work alone. Heartbeats tell a process that works from one that has
    stopped (SIGSTOP, a hung file system, a lost node), which exactly one other names.

    Args:
        store: of the group, for this thread alone: a client's requests wait for each other.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._watched = store, rank, (rank + 1) % size
        self._beats, self._end = 0, threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._is_silent = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeats")

    def __enter__(self) -> "Heartbeats":
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(BEAT_SECONDS)

    def silence(self, store: Store, rank: int) -> tuple[float, str]:
        """Seconds for which a rank's heartbeat has not changed since it was first asked for, and
        the host and process that it is.

        Args:
            store: the caller's own client.
        """
        key, now = f"beat {rank}", time.monotonic()
        beat = store.get(key).decode() if store.check([key]) else ""
        if rank not in self._seen or self._seen[rank][0] != beat:
            self._seen[rank] = (beat, now)
        return now - self._seen[rank][1], beat.partition(" ")[2] or "not started"

    def _beat(self) -> None:
        self._beats += 1
        who = f"{self._beats} {socket.gethostname()}, process {os.getpid()}"
        self._store.set(f"beat {self._rank}", who)

    def _run(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            try:
                self._beat()
                seconds, who = self.silence(self._store, self._watched)
            except RuntimeError:  # the store has ended with its process, whose end is reported
                return
            if seconds > SILENT_SECONDS and not self._is_silent:
                log.warning(
                    "rank %d (%s) has not responded for %.0f s: it is stopped or cannot be "
                    "reached, and the others wait for it",
                    *(self._watched, who, seconds),
                )
                self._is_silent = True
            elif self._is_silent and seconds < BEAT_SECONDS:
                log.warning("rank %d responds again", self._watched)
                self._is_silent = False


def wait_for(
    is_over: Callable[[], bool],
    missing: Callable[[], list[int]],
    store: Store,
    heartbeats: Heartbeats,
    timeout: float,
) -> None:
    """Wait outside of collectives, whose timeout would end the others' work, until `is_over`.

    Args:
        missing: the ranks that are waited for.
        store: the caller's own client.
        timeout: seconds that one of these may have no heartbeat.

    Raises:
        StageError: one of them has had none for `timeout`.
    """
    began = time.monotonic()
    while not is_over():
        for rank in missing():
            silent, who = heartbeats.silence(store, rank)
            if silent > timeout:
                raise StageError(
                    f"rank {rank} ({who}) has not responded for {silent:.0f} s", Code.TIMEOUT
                )
        # Short at first: as a rule the others are there already.
        time.sleep(min(POLL_SECONDS, 0.01 + 0.1 * (time.monotonic() - began)))


def meet(
    key: str, rank: int, size: int, store: Store, heartbeats: Heartbeats, timeout: float
) -> None:
    """Return when all processes of the group have called it with this key; see `wait_for`."""
    store.set(f"{key} {rank}", "")
    store.add(key, 1)

    def missing() -> list[int]:
        # All would ask for all: the first process watches the others, and these watch it.
        ranks = range(size) if rank == 0 else range(1)
        return [other for other in ranks if not store.check([f"{key} {other}"])]

    wait_for(lambda: store.add(key, 0) == size, missing, store, heartbeats, timeout)
