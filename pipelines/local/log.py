"""Turns a local run's output into a log of its stages: start, Lathe's messages, end, and an
estimate of the time that is left."""

import json
import re
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress

from components.artifacts import FIGURES
from components.step import component
from components.supervise import MARK
from lathe_base.errors import MESSAGE, Code, StageError, code_in
from lathe_base.progress import duration
from pipelines.compiler.compile import placed_steps

DONE_AGAIN = "runs again"
FIRST = "runs for the first time"
_ERROR = re.compile(re.escape(MARK) + MESSAGE.pattern)
_COLOUR = re.compile(r"\x1b\[\d*m")
_BEGAN = re.compile(r"Executing task '(.+)'$")
_ENDED = re.compile(r"Task '(.+)' finished with status (SUCCESS|FAILURE)$")
_REUSED = re.compile(r"Task (\S+) cache hit")
_DONE_AGAIN = re.compile(rf"Task ((\S+) {DONE_AGAIN}: (.+))$")
_FIRST = re.compile(rf"Task (\S+) {FIRST}$")
_FIRST_WORKER = re.compile(r"\[rank0\]:")
_KFP = re.compile(r"\[KFP Executor .*?\]: ")

ALWAYS = "always runs"
TAIL_LINES = 30
DEFAULT = "full"
PRIOR_SECONDS = 20.0  # weight of the declared pace against this machine's, in seconds of stages


class StageLog:
    """Filters the output of `pipelines.local.runner` for display, and records errors and outcomes.

    Args:
        forecast: forecast of the default run, to show the time left.

    Attributes:
        failed: name of the stage that failed.
        figures: metrics that the last stage recorded.
        marked: the last lines that Lathe itself printed.
        outcomes: stage -> "reused" or why it ran; a stage in a loop has several outcomes.
    """

    def __init__(self, forecast: "Forecast | None" = None) -> None:
        self.failed: str | None = None
        self._code = Code.FAILED
        self.figures: dict[str, float] = {}
        self.outcomes: dict[str, list[str]] = {}
        self._forecast = forecast
        self._stage, self._since = "", 0.0
        self._errors: list[str] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.marked: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, line: str) -> Iterator[str]:
        """Process a line of output; yields the lines to show for it."""
        line = _COLOUR.sub("", line.rstrip("\n"))
        text = line.strip()
        if text.startswith(MARK):
            self.marked.append(text.removeprefix(MARK))
        # KFP's own lines about a task, and those of the cache; what is left is the task's output.
        if match := _BEGAN.search(text):
            self._stage, self._since = match[1], time.monotonic()
            self._errors.clear()
            self._tail.clear()
            self.outcomes.setdefault(match[1], [ALWAYS])
            yield match[1]
        elif match := _ENDED.search(text):
            if match[2] == "FAILURE":
                self.failed = match[1]
            elif match[1] == self._stage:
                seconds = time.monotonic() - self._since
                yield f"    done in {seconds:.1f} s{self._left(match[1], seconds)}"
        elif match := _REUSED.search(text):
            self.outcomes.setdefault(match[1], []).append("reused")
            yield match[1]
            yield f"    finished in an earlier run of this folder: reused{self._left(match[1])}"
        elif match := _FIRST.search(text):
            self.outcomes.setdefault(match[1], []).append("not done before")
        elif match := _DONE_AGAIN.search(text):
            self.outcomes.setdefault(match[2], []).append(match[3])
            yield match[1]
        elif text.startswith(FIGURES):
            with suppress(ValueError):
                self.figures = json.loads(text.removeprefix(FIGURES))
        elif match := _ERROR.match(text):
            self._code = code_in(match[0])
            self._errors.append(text[match.end() :])
        elif text.startswith(MARK):
            yield "    " + text.removeprefix(MARK)
        elif match := _FIRST_WORKER.match(text):
            yield "    " + text[match.end() :]
        elif not _KFP.match(text):  # told only if the stage fails without an error of Lathe's
            self._tail.append(line)

    def reuse(self) -> Iterator[str]:
        """One line per stage: reused, or why not. Nothing if no stage ran before."""
        counted = {name: Counter(outcomes) for name, outcomes in self.outcomes.items()}
        if all(counts.keys() <= {ALWAYS, "not done before"} for counts in counted.values()):
            return
        width = max(map(len, counted)) + 2
        for name, counts in counted.items():
            parts = [f"{text} ({n} times)" if n > 1 else text for text, n in counts.items()]
            yield f"{name:{width}}{'; '.join(parts)}"

    def _left(self, stage: str, seconds: float | None = None) -> str:
        return f"; {self._forecast.end(stage, seconds)}" if self._forecast else ""

    def error(self) -> StageError:
        """The stage's error, whose message may be its last lines of output."""
        where = f"{self.failed}: " if self.failed else ""
        if self._errors:
            return StageError(where + "\n".join(self._errors), self._code)
        tail = "\n".join(self._tail)
        # KFP indents a task's output; what comes before the traceback is of no interest.
        tail = tail[max(tail.find("    Traceback"), 0) :].rstrip()
        return StageError(f"{where}failed\n{tail}", Code.FAILED)


def usual_seconds() -> dict[str, float]:
    """Usual duration of each step of the default run, as its component declares: in proportion to
    its measured CPU time."""
    by_step = {step.name: component(step.stage).step.seconds for step in placed_steps(DEFAULT)}
    return {name: seconds for name, seconds in by_step.items() if seconds}


class Forecast:
    """Estimates the remaining time from this machine's pace in the stages that have ended."""

    def __init__(self) -> None:
        self._all = usual_seconds()
        self._left = dict(self._all)
        self._expected = self._taken = PRIOR_SECONDS

    def start(self) -> str:
        """Describe the work ahead."""
        seconds = duration(sum(self._all.values()))
        return f"{len(self._all)} stages, about {seconds} on two free cores; nothing is downloaded"

    def end(self, stage: str, seconds: float | None) -> str:
        """Describe the time left after a stage has ended.

        Args:
            seconds: its duration; None if it was reused.
        """
        expected = self._left.pop(stage, 0)
        if seconds is not None:
            self._expected += expected
            self._taken += seconds
        ended = f"{len(self._all) - len(self._left)} of {len(self._all)} stages"
        left = sum(self._left.values()) * self._taken / self._expected
        return f"{ended}, about {duration(left)} left" if self._left else ended
