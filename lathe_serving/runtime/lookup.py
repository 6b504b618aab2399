"""Speculative decoding by prompt lookup: drafts the tokens that followed an earlier occurrence of
the last ones.

The tokens of a draft are verified in one step, which reads the model's weights once for all of
them. If a text repeats itself or its prompt, most drafts are accepted; otherwise they are wasted.

Draft length: if each token is accepted with probability a, a draft of k tokens yields 1 + a + ... +
a^k tokens on average, in the time of 1 + k TOKEN_COST decoding steps. The length maximizes this
ratio, with a as a moving average over the sequence's own drafts. If not even one token pays off,
drafting pauses, then one token is tried; every failure doubles the pause.

Sources: prompt lookup decoding (Saxena, 2023); the expected number of tokens, Leviathan et al.,
Fast inference from transformers via speculative decoding (ICML 2023).
"""

from collections.abc import Sequence
from itertools import cycle, islice

SIZES = (4, 3, 2)  # tokens that are looked up, the longest first
MOST = 7  # tokens of a draft
TOKEN_COST = 0.2  # of a decoding step, for each token more in it
FIRST_CHANCE = 0.3
NEWS = 0.25  # weight of the latest token in the moving average
LEAST_PAUSE, MOST_PAUSE = 16, 128  # tokens


class Lookup:
    """The text of a sequence, and drafts of its next tokens.

    Its index is updated when a draft is requested.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._follows: dict[tuple[int, ...], int] = {}  # where the text goes on after some tokens
        self._indexed = 0
        self._draft: list[int] = []  # what is left of it
        self._chance = FIRST_CHANCE
        self._pause, self._resumes = LEAST_PAUSE, 0

    def add(self, token: int) -> None:
        """Append the chosen token, and compare it with the draft."""
        self._text.append(token)
        if not self._draft:
            return
        is_right = self._draft.pop(0) == token
        self._chance += NEWS * (is_right - self._chance)
        if is_right:
            self._pause = LEAST_PAUSE
            return
        self._draft = []
        if not best_length(self._chance):
            self._resumes = len(self._text) + self._pause
            self._pause = min(2 * self._pause, MOST_PAUSE)

    def draft(self, most: int) -> list[int]:
        """Draft at most `most` tokens; empty if drafting does not pay off."""
        if len(self._text) < self._resumes:
            return []
        length = min(most, max(1, best_length(self._chance)))
        start = self._find() if length > 0 else None
        if start is None:
            return []
        # A repetition that reaches the end of the text goes on in the draft.
        repeated = cycle(self._text[start : start + length])
        self._draft = list(islice(repeated, length))
        return list(self._draft)

    def _find(self) -> int | None:
        """The position after the last earlier occurrence of the most recent tokens."""
        text = self._text
        for end in range(self._indexed + 1, len(text)):
            for size in SIZES:
                self._follows[tuple(text[max(0, end - size) : end])] = end
        self._indexed = len(text) - 1
        found = (self._follows.get(tuple(text[-size:])) for size in SIZES)
        return next((place for place in found if place is not None), None)


def best_length(chance: float) -> int:
    """The draft length that yields the most tokens per time.

    Args:
        chance: probability that a drafted token is accepted.
    """
    tokens, right = 1.0, chance
    for length in range(MOST):
        cost = 1 + length * TOKEN_COST
        if right / TOKEN_COST <= tokens / cost:
            return length
        tokens, right = tokens + right, right * chance
    return MOST
