"""About how long the default run takes, in all and from each stage on."""

from lathe.progress import duration

# About the seconds of each stage of `full` with its defaults on two free cores, in proportion to
# the CPU time that they were measured to take.
SECONDS = {
    "inputs": 2,
    "prepare": 8,
    "pretrain": 110,
    "prune": 38,
    "analyze": 15,
    "quantize": 21,
    "evaluate-dense": 8,
    "export-dense": 6,
    "evaluate-pruned": 8,
    "export-pruned": 6,
    "evaluate-int8": 13,
    "export-int8": 6,
    "gate": 2,
    "rehearse": 10,
    "report": 6,
}
TRUST = 20.0  # seconds of stages from which on this machine's own pace counts for more


class Forecast:
    """The stages that have ended say how fast this machine is."""

    def __init__(self) -> None:
        self._left = dict(SECONDS)
        self._expected = self._taken = TRUST

    def start(self) -> str:
        """Describe the work ahead."""
        seconds = duration(sum(SECONDS.values()))
        return f"{len(SECONDS)} stages, about {seconds} on two free cores; nothing is downloaded"

    def end(self, stage: str, seconds: float | None) -> str:
        """Describe the time left after a stage has ended.

        Args:
            seconds: what it took; None where it was reused.
        """
        expected = self._left.pop(stage, 0)
        if seconds is not None:
            self._expected += expected
            self._taken += seconds
        ended = f"{len(SECONDS) - len(self._left)} of {len(SECONDS)} stages"
        left = sum(self._left.values()) * self._taken / self._expected
        return f"{ended}, about {duration(left)} left" if self._left else ended
