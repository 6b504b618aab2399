"""Follow a pod's log over unreliable connections: no line is lost or repeated.

After reconnecting, the API repeats the lines of the last second, and a connection may break in the
middle of a line; timestamps show which lines were seen.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from kubernetes.client import ApiException  # type: ignore[import-untyped]

from lathe_launch.cluster.api import Cluster, is_transient

log = logging.getLogger("lathe")

TAIL_LINES = 20
PAUSE_SECONDS = 1.0
LAST_TRIES = 5  # at an ended pod's log


class LogFollower(threading.Thread):
    """Reads one container's log from the start and passes every line to `emit`.

    Attributes:
        tail: the last lines, kept because the pods of a failed job are deleted soon.
    """

    def __init__(
        self, cluster: Cluster, pod: str, container: str, emit: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(daemon=True, name=f"log of {pod}")
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._cluster, self._pod, self._container, self._emit = cluster, pod, container, emit
        self._ended = threading.Event()
        self._last = (0, "", 0)  # the last line's time, in ns and as text, and lines at it

    def finish(self, seconds: float = 30.0) -> None:
        """Wait until the log of the ended container has been read completely."""
        self._ended.set()
        self.join(seconds)

    def run(self) -> None:
        """Read until the container has ended, reconnecting as needed."""
        tries = 0
        while tries < LAST_TRIES:
            # Asked before reading: a log that is read after its container has ended is complete.
            ended = self._ended.is_set()
            try:
                self._read(complete=ended)
                if ended:
                    return
            except ApiException as error:
                if error.status == 404:
                    return
                # 400: not started yet; 401: until the token is renewed
                if not (is_transient(error) or error.status in (400, 401)):
                    log.warning("cannot read the log of pod %s: %s", self._pod, error.reason)
                    return
            except Exception as error:
                if not is_transient(error):
                    raise
            # A running container's log is tried for ever.
            tries += ended
            self._ended.wait(PAUSE_SECONDS)

    def _read(self, complete: bool) -> None:
        """Read to the end of the stream; an unterminated last line counts only if `complete`."""
        since, text, repeated = self._last
        response = self._cluster.pod_log(
            self._pod, self._container, follow=not complete, since=text or None
        )
        try:
            for line in _lines(response, complete):
                stamp, _, content = line.partition(" ")
                time = nanoseconds(stamp)
                if time < since:
                    continue
                # Lines of the same time are counted, not compared: their texts may be equal.
                if time == since and repeated:
                    repeated -= 1
                    continue
                before = self._last
                self._last = (time, stamp, before[2] + 1 if time == before[0] else 1)
                self.tail.append(content)
                if self._emit:
                    self._emit(content)
        finally:
            response.close()
            response.release_conn()


def nanoseconds(stamp: str) -> int:
    """Nanoseconds since 1970 of an RFC 3339 timestamp with up to nine fractional digits."""
    # By hand: `datetime` would drop what is below a microsecond.
    whole, _, rest = stamp.partition(".")
    digits = rest.rstrip("Z").partition("+")[0].partition("-")[0]
    zone = rest[len(digits) :] if rest else ""
    seconds = int(datetime.fromisoformat(whole + zone).timestamp())
    return seconds * 10**9 + int(digits.ljust(9, "0") or 0)


def _lines(response: Any, complete: bool) -> Iterator[str]:
    buffer = b""
    # Split as bytes: a chunk may end within a character.
    for chunk in response.stream(amt=None, decode_content=False):
        *whole, buffer = (buffer + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if buffer and complete:
        yield buffer.decode(errors="replace")
