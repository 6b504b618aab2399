"""Heartbeats of the processes of a group, through its store.

A collective does not tell who is missing, and gives up after a timeout that cannot know how long
one process has to work alone. Heartbeats tell a process that works from one that has stopped: each
process writes its own every few seconds and watches its neighbour's, so a stopped process (SIGSTOP,
a hung file system, a lost node) is named by exactly one other.
"""

import logging
import os
import socket
import threading
import time

from torch._C._distributed_c10d import Store  # the name that type checkers know

log = logging.getLogger("lathe")

BEAT_SECONDS = 5.0
SILENT_SECONDS = 40.0
"""Seconds without a heartbeat after which a process is reported."""


class Heartbeats:
    """A background thread that beats for this rank and watches the next one.

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
