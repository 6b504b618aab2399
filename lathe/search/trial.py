"""A trial of a search."""

import math
from dataclasses import dataclass

from lathe.search.design import Design
from lathe.search.goal import Goal


@dataclass(frozen=True)
class Trial:
    """A compressed model: figures on the held-out data, and size and time as shares of the dense
    float32 model's.

    Attributes:
        verdict: the gate's, on the budget.
        design: its design, in a search.
        predicted: the predicted share of the target.
        cost: the predicted KL divergence from the dense model before training, nats per token.
    """

    name: str
    accuracy: float | None
    perplexity: float | None
    latency: float
    prefill: float
    bytes: float
    parameters: float
    verdict: str = ""
    design: Design | None = None
    predicted: float | None = None
    cost: float | None = None

    def __str__(self) -> str:
        """Its figures in one line."""
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
        """Whether the trial reaches the target."""
        return self.reached(goal) <= goal.at_most

    def reached(self, goal: Goal) -> float:
        """The trial's value for the target, as a share of the dense model's."""
        return float(getattr(self, goal.target))

    def badness(self, goal: Goal) -> tuple[float, float]:
        """Sort key, lower is better: the budget's measure, then perplexity."""
        perplexity = math.inf if self.perplexity is None else self.perplexity
        wrong = 1 - (self.accuracy or 0.0) if goal.budget == "accuracy" else perplexity
        return wrong, perplexity


@dataclass(frozen=True)
class SearchResult:
    """All trials in order, and the best: the one with the best quality of those that meet the
    target within the budget."""

    goal: Goal
    dense: dict[str, float | None]
    trials: tuple[Trial, ...]
    best: Trial | None
