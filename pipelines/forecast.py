"""About how long the default run takes, in all and from each stage on."""

from lathe.progress import duration

# Seconds of each stage of `full` with its defaults on two quiet cores.
SECONDS = {
    "resolve": 2,
    "prepare": 8,
    "pretrain": 100,
    "prune": 45,
    "analyze": 12,
    "quantize": 22,
    "evaluate-dense": 12,
    "export-dense": 7,
    "evaluate-pruned": 12,
    "export-pruned": 7,
    "evaluate-int8": 14,
    "export-int8": 9,
    "gate": 2,
    "deploy": 15,
    "report": 9,
}
TRUST = 20.0  # seconds of stages from which on this machine's own pace counts for more


class Forecast:
    """The stages that have ended say how fast this machine is."""

    def __init__(self) -> None:
        self._left = dict(SECONDS)
        self._expected = self._taken = TRUST

    def start(self) -> str:
        """What there is to do."""
        seconds = duration(sum(SECONDS.values()))
        return f"{len(SECONDS)} stages, about {seconds} on two free cores; nothing is downloaded"

    def end(self, stage: str, seconds: float | None) -> str:
        """What is left when a stage has ended.

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
