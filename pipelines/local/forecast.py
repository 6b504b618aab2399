"""About how long the default run takes, in all and from each stage on."""

from lathe.progress import duration
from pipelines.compiler.graph import steps
from pipelines.stages import component

DEFAULT = "full"
TRUST = 20.0  # seconds of stages from which on this machine's own pace counts for more


def usual_seconds() -> dict[str, float]:
    """What each step of the default run usually takes, as its component declares: in proportion to
    the CPU time that was measured."""
    found = {step.name: component(step.stage).step.seconds for step in steps(DEFAULT)}
    return {name: seconds for name, seconds in found.items() if seconds}


class Forecast:
    """The stages that have ended say how fast this machine is."""

    def __init__(self) -> None:
        self._all = usual_seconds()
        self._left = dict(self._all)
        self._expected = self._taken = TRUST

    def start(self) -> str:
        """Describe the work ahead."""
        seconds = duration(sum(self._all.values()))
        return f"{len(self._all)} stages, about {seconds} on two free cores; nothing is downloaded"

    def end(self, stage: str, seconds: float | None) -> str:
        """Describe the time left after a stage has ended.

        Args:
            seconds: what it took; None where it was reused.
        """
        expected = self._left.pop(stage, 0)
        if seconds is not None:
            self._expected += expected
            self._taken += seconds
        ended = f"{len(self._all) - len(self._left)} of {len(self._all)} stages"
        left = sum(self._left.values()) * self._taken / self._expected
        return f"{ended}, about {duration(left)} left" if self._left else ended
