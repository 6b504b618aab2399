"""Simulates how often the gate passes a model.

    python benchmarks/gate.py [--trials 10000]

False passes: of candidates whose true loss is exactly the margin, at most 2.5 % should pass, in one
look or in all of 52 looks against the same live model. Power: the probability of a pass as a
function of the true loss, compared to an unpaired test with the standard errors of both models, as
in lm-eval's model comparator; plotted in `gate.svg`.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from scipy.stats import norm  # type: ignore[import-untyped]

from lathe.evaluate.gate import confidence_at
from lathe.evaluate.intervals import (
    Interval,
    accuracy_difference,
    cluster_totals,
    unit_totals,
)
from lathe_base.pages.style import LIGHT, Theme, draw

Counts = NDArray[np.int64]
MARGIN, CONFIDENCE, LOOKS = 0.02, 0.95, 52
LAMBADA, RIGHT, FLIPS = 5153, 0.4, 0.08  # examples, accuracy, share of discordant pairs


def passing(lost: Counts, gained: Counts, n: int, confidence: float) -> NDArray[np.bool_]:
    """Whether Tango's interval is within the margin.

    More gains never hurt, so that the fewest passing gains are computed once per number of losses.
    """
    fewest, table = 0, {}
    for losses in range(int(lost.min()), int(lost.max()) + 1):
        while accuracy_difference(losses, fewest, n, confidence).low < -MARGIN:
            fewest += 1
        table[losses] = fewest
    return gained >= np.array([table[losses] for losses in lost.tolist()])


def draw_counts(
    random: np.random.Generator, n: int, right: float, flips: float, loss: float, trials: int
) -> Iterator[tuple[Counts, Counts, Counts]]:
    """Yield the live model's right answers, and the losses and gains of one candidate after another
    against the same live model."""
    live = random.binomial(n, right, trials)
    while True:
        lost = random.binomial(live, (flips + loss) / 2 / right)
        yield live, lost, random.binomial(n - live, (flips - loss) / 2 / (1 - right))


def accuracy_looks(
    random: np.random.Generator, n: int, right: float, flips: float, trials: int
) -> dict[tuple[int, bool], float]:
    """Share of live models for which a candidate at the margin has passed, by number of looks and
    whether alpha spending was used."""
    counts = draw_counts(random, n, right, flips, MARGIN, trials)
    plain, counted = np.zeros(trials, bool), np.zeros(trials, bool)
    found = {}
    for look in range(1, LOOKS + 1):
        _, lost, gained = next(counts)
        plain |= passing(lost, gained, n, CONFIDENCE)
        counted |= passing(lost, gained, n, confidence_at(look, CONFIDENCE))
        found[look, False], found[look, True] = float(plain.mean()), float(counted.mean())
    return found


def rate(trials: int, interval: Callable[[], Interval], margin: float) -> float:
    """How often the upper end of a loss interval is within the margin."""
    return float(np.mean([interval().high <= margin for _ in range(trials)]))


def perplexity_rate(random: np.random.Generator, blocks: int, heavy: bool, trials: int) -> float:
    """Pass rate of candidates with 10 % higher perplexity, with normal or heavy-tailed noise."""
    limit = math.log1p(0.1)

    def interval() -> Interval:
        tokens = random.integers(900, 1100, blocks).astype(float)
        noise = random.standard_t(3, blocks) if heavy else random.normal(0, 1, blocks)
        return unit_totals(tokens * (limit + 0.05 * noise), tokens).interval(CONFIDENCE)

    return rate(trials, interval, limit)


def document_rate(
    random: np.random.Generator, documents: int, clustered: bool, trials: int
) -> float:
    """Pass rate of candidates at the margin, with 12 questions per document on average."""

    def interval() -> Interval:
        of = np.repeat(np.arange(documents), random.integers(4, 21, documents))
        shared = random.normal(0, 0.15, documents)[of]
        cost = MARGIN + shared + random.normal(0, 0.3, len(of))
        ones = np.ones(len(of))
        totals = cluster_totals(cost, ones, of) if clustered else unit_totals(cost, ones)
        return totals.interval(CONFIDENCE)

    return rate(trials, interval, MARGIN)


def power(random: np.random.Generator, loss: float, trials: int) -> dict[str, float]:
    """Probability that a candidate with this true loss passes, by test."""
    n = LAMBADA
    live, lost, gained = next(draw_counts(random, n, RIGHT, FLIPS, loss, trials))
    candidate = live - lost + gained
    variances = [right / n * (1 - right / n) / (n - 1) for right in (live, candidate)]
    z = float(norm.ppf((1 + CONFIDENCE) / 2))
    low = (candidate - live) / n - z * np.sqrt(variances[0] + variances[1])
    found = {"paired, one look": float(passing(lost, gained, n, CONFIDENCE).mean())}
    for look in (4, LOOKS):
        levels = confidence_at(look, CONFIDENCE)
        found[f"paired, look {look}"] = float(passing(lost, gained, n, levels).mean())
    return found | {"unpaired": float((low >= -MARGIN).mean())}


def picture(losses: NDArray[np.float64], curves: list[dict[str, float]]) -> str:
    """Plot the probability of a pass by true loss."""

    def paint(axes: Axes, theme: Theme) -> None:
        for i, name in enumerate(curves[0]):
            axes.plot(
                100 * losses,
                [100 * at[name] for at in curves],
                color=theme.color(i),
                linestyle="--" if name == "unpaired" else "-",
                label=name,
            )
        axes.axvline(100 * MARGIN, color=theme.muted, linewidth=0.8)
        axes.set_xlabel("true loss of accuracy, points (the line is the margin)")
        axes.set_ylabel("passes, %")
        axes.legend(loc="upper right", fontsize=8)

    return draw(3.0, LIGHT, paint)


def main() -> None:
    """Print the tables and plot the power curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000, help="number of simulated trials")
    trials, random = parser.parse_args().trials, np.random.default_rng(0)
    print("| false passes at the margin, one look | |\n|---|---|")
    for blocks in (50, 400):
        for heavy, name in ((False, "normal"), (True, "Student's t, 3 degrees of freedom")):
            share = perplexity_rate(random, blocks, heavy, trials)
            print(f"| perplexity, {blocks} blocks, {name} | {share:.2%} |", flush=True)
    for documents in (5, 10, 20, 100):
        by = [document_rate(random, documents, clustered, trials) for clustered in (True, False)]
        print(f"| scores, {documents} documents | {by[0]:.2%}; as independent {by[1]:.2%} |")
    print("\n| accuracy, at the margin | 1 look | 12 looks | 52 looks |\n|---|---|---|---|")
    settings = ((500, 0.4, 0.1), (LAMBADA, RIGHT, FLIPS), (LAMBADA, 0.03, 0.025))
    for n, right, flips in settings:
        found = accuracy_looks(random, n, right, flips, trials)
        for counted in (False, True):
            shares = " | ".join(f"{found[look, counted]:.2%}" for look in (1, 12, LOOKS))
            title = "counted" if counted else "each alone"
            print(f"| {n:,} examples, {flips:.1%} flip; {title} | {shares} |", flush=True)
    losses = np.arange(0, 0.0301, 0.001)
    curves = [power(random, float(loss), trials) for loss in losses]
    print(f"\n| true loss, points | {' | '.join(curves[0])} |\n|{'---|' * (1 + len(curves[0]))}")
    for loss, at in list(zip(losses, curves, strict=True))[::5]:
        print(f"| {100 * loss:.1f} | {' | '.join(f'{x:.1%}' for x in at.values())} |")
    path = Path(__file__).with_suffix(".svg")
    path.write_text(picture(losses, curves), encoding="utf-8")


if __name__ == "__main__":
    main()
