"""A trial of a search."""

from dataclasses import dataclass

from lathe.search.goal import Goal


@dataclass(frozen=True)
class Trial:
    """An INT8 model of which `ratio` of heads and channels was pruned; figures of the held-out
    data, and shares of the dense float32 model's size and time.

    `verdict` is the gate's, on the budget.
    """

    name: str
    ratio: float
    accuracy: float | None
    perplexity: float | None
    latency: float
    prefill: float
    bytes: float
    parameters: float
    verdict: str = ""

    def __str__(self) -> str:
        """One line of its figures."""
        quality = [
            *([f"cloze accuracy {self.accuracy:.2%}"] if self.accuracy is not None else []),
            *([f"perplexity {self.perplexity:.2f}"] if self.perplexity is not None else []),
        ]
        return (
            f"{self.name}: {', '.join(quality)}; latency {self.latency:.3f}, prefill "
            f"{self.prefill:.3f}, bytes {self.bytes:.3f}, parameters {self.parameters:.3f} of "
            f"dense; budget: {self.verdict}"
        )

    def meets(self, goal: Goal) -> bool:
        return bool(getattr(self, goal.target) <= goal.at_most)


@dataclass(frozen=True)
class SearchResult:
    """All trials in their order, and the best: the least pruned one that meets the target."""

    goal: Goal
    dense: dict[str, float | None]
    trials: tuple[Trial, ...]
    best: Trial | None
