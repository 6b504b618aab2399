"""Which pruning ratio a search tries next: a secant method on the cost as a function of the ratio.

Cost is the share of the dense model's latency, bytes or parameters that an INT8 model of this ratio
has, 0 to 1. It falls about linearly with the ratio, so the line through the two nearest trials
tells where it reaches the target.
"""

from collections.abc import Iterator, Sequence

from lathe.search.goal import Goal
from lathe.search.trial import Trial

CLOSE = 0.97  # of the target: what is nearer to it is not searched on
LARGEST = 0.75  # ratio
REST = 0.3  # of the cost, guessed to be left when all heads and channels are gone
STEP = 1 / 64  # of a ratio: finer ones give the same heads


def next_ratios(goal: Goal, done: Sequence[Trial]) -> Iterator[float]:
    """The next ratio to try: on the line through the two trials next to the target; ends when it is
    met so nearly that less pruning would miss it.

    Args:
        done: the trials so far; the caller appends that of a ratio before it asks for the next.
    """
    yield 0.0
    while True:
        points = sorted((trial.ratio, float(getattr(trial, goal.target))) for trial in done)
        missed = [point for point in points if point[1] > goal.at_most]
        met = [point for point in points if point[1] <= goal.at_most]
        if not missed or (met and met[0][1] >= CLOSE * goal.at_most):
            return
        low, above = missed[-1]  # the most pruned that is too costly still
        highest = met[0][0] - STEP if met else LARGEST
        # The line's other point: the least pruned that meets the target; or, while none does, the
        # last but one that misses it; or, after a single trial, a guess for a ratio of 1.
        other, cost = (met or missed[-2:-1] or [(1.0, REST * missed[0][1])])[0]
        slope = (cost - above) / (other - low) if cost != above else -above  # cost a unit of ratio
        ratio = low + (CLOSE * goal.at_most - above) / slope
        # On the grid, and strictly between the trials on either side of the target.
        ratio = min(max(round(ratio / STEP) * STEP, low + STEP), highest)
        if ratio <= low:
            return
        yield ratio
