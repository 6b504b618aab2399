"""Kills a training at random moments: draws the kills, and finds its processes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lathe.train.saved import PARTIAL, committed_steps
from lathe_base.errors import StageError
from lathe_launch.parent import tied

Kind = Literal["one rank", "all ranks", "during a save"]
KINDS: tuple[Kind, ...] = ("one rank", "all ranks", "during a save")
POLL_SECONDS = 0.0005
TRACE = "train.jsonl"
TAIL_BYTES = 4000


@dataclass(frozen=True)
class PlannedKill:
    """A kill to perform once training has reached `step` steps.

    Attributes:
        wait: additional wait as a share of a step, so that kills also happen within steps.
        rank: that of the killed process, if it is a single one.
    """

    kind: Kind
    step: int
    wait: float
    rank: int


@dataclass(frozen=True)
class Kill:
    """A kill that was performed.

    Attributes:
        step: the last step that the training has logged.
        saved_step: that of the newest complete state, from which it resumes; 0 if there is none.
        unfinished: names of the unfinished saves that the kill left.
        seconds: seconds since the start of the processes.
    """

    planned: PlannedKill
    step: int
    saved_step: int
    unfinished: list[str]
    seconds: float
    processes: int


def plan_kills(seed: int, count: int, steps: int, ranks: int) -> list[PlannedKill]:
    """Draw kills, ordered by step; kinds take turns in a random order.

    Args:
        steps: of the whole training.
        ranks: its processes.
    """
    draw = random.Random(seed)
    kinds: list[Kind] = []
    while len(kinds) < count:
        kinds += draw.sample(KINDS, len(KINDS))
    at = sorted(draw.randrange(steps) for _ in range(count))
    return [
        PlannedKill(kind, step, draw.random(), draw.randrange(ranks))
        for kind, step in zip(kinds, at, strict=False)
    ]


class Training:
    """One attempt of `lathe pretrain` in separate processes, started like the command line does."""

    def __init__(self, command: list[str], output: Path, log: Path) -> None:
        self.output, self.log, self.began = output, log, time.monotonic()
        self._trace_before = _stamp(output / TRACE)
        self._first: tuple[float, int] | None = None  # time and step of this attempt's first sign
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                tied([sys.executable, "-m", "lathe", *command]),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment | {"PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )

    def finish(self) -> None:
        """Wait for its end.

        Raises:
            StageError: it failed; the message has its last lines.
        """
        if self.process.wait():
            tail = self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
            raise StageError(f"the training exited with status {self.process.returncode}:\n{tail}")

    def kill_at(self, planned: PlannedKill) -> Kill | None:
        """Wait for the planned moment and kill; None if the training ends before.

        Raises:
            StageError: it failed by itself.
        """
        while not self._is_time(planned):
            if self.process.poll() is not None:
                self.finish()
                return None
            time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - self.began
        ranks = dict(self._ranks())
        step = last_step(self.output)
        if planned.kind == "one rank" and len(ranks) > 1:
            _kill(ranks[planned.rank % len(ranks)])
            self.process.wait()  # the launcher ends the others
        self.end()
        return Kill(
            planned, step, _saved_step(self.output), self._partial(), seconds, max(len(ranks), 1)
        )

    def end(self) -> None:
        """Kill the launcher and all ranks, and wait until all have ended."""
        left = [self.process.pid, *_descendants(self.process.pid)]
        while left:
            for pid in left:
                _kill(pid)
            self.process.poll()
            left = [pid for pid in left if _is_alive(pid)]

    def _is_time(self, planned: PlannedKill) -> bool:
        if _stamp(self.output / TRACE) == self._trace_before:  # an earlier attempt's
            return False
        now, step = time.monotonic(), last_step(self.output)
        self._first = self._first or (now, step)
        if step < planned.step:
            return False
        if planned.kind == "during a save":
            return bool(self._partial())
        began, first = self._first
        time.sleep(planned.wait * (now - began) / max(step - first, 1))
        return True

    def _partial(self) -> list[str]:
        return sorted(path.name for path in (self.output / "state").glob(f"*{PARTIAL}"))

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """Rank and process id of every worker."""
        for pid in _descendants(self.process.pid):
            with suppress(OSError, ValueError, KeyError):
                yield int(_environment(pid)["RANK"]), pid


def last_step(output: Path) -> int:
    """The last step that a training has logged; 0 before the first."""
    step = 0
    with suppress(OSError):
        for line in reversed((output / TRACE).read_bytes().splitlines()):
            with suppress(ValueError, TypeError, KeyError):
                return int(json.loads(line)["step"])
    return step


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _saved_step(output: Path) -> int:
    found = committed_steps(output / "state")
    return int(found[-1].name.removeprefix("step_")) if found else 0


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            != "Z"
        )
    return False


def _environment(pid: int) -> Mapping[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def _descendants(pid: int) -> list[int]:
    """The descendants of a process, in any order."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parent = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
