"""Estimates the time that the default run takes, and how much of it is left after each stage."""

from components.step import component
from lathe_base.progress import duration
from pipelines.compiler.graph import steps

DEFAULT = "full"
PRIOR_SECONDS = 20.0  # weight of the declared pace against this machine's, in seconds of stages


def usual_seconds() -> dict[str, float]:
    """Usual duration of each step of the default run, as its component declares: in proportion to
    its measured CPU time."""
    by_step = {step.name: component(step.stage).step.seconds for step in steps(DEFAULT)}
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
