"""One request in the running batch: its branches, and how their next tokens are chosen."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lathe.serve.params import Params
from lathe.serve.piece import FinishReason, Piece
from lathe.serve.sampling import log_softmax, next_token
from lathe.serve.text import TextStream, TokenBytes

log = logging.getLogger("lathe")


@dataclass(frozen=True)
class Vocabulary:
    """What ids mean: how many there are, which one ends a text, and their bytes."""

    size: int
    eos_id: int
    token_bytes: TokenBytes


@dataclass(frozen=True)
class Receiver:
    """Who waits for the answer.

    Attributes:
        deliver: takes every piece, and last one with a finish reason, or an error.
        cancelled: whether nobody waits any more; asked before every step.
    """

    deliver: Callable[[Piece | Exception], None]
    cancelled: Callable[[], bool]


@dataclass(frozen=True)
class Step:
    """How a group goes on: a token a branch, and after which of its branches (indexes into those
    of the step before); no branches: it has ended."""

    tokens: list[int]
    parents: list[int]


class Group(ABC):
    """A prompt and the branches that follow it, `width` at most at a time."""

    def __init__(self, prompt: Sequence[int], width: int, receiver: Receiver) -> None:
        self.prompt, self.width = np.array(prompt, np.int64), width
        self.arrived = time.monotonic()
        self._receiver = receiver

    @abstractmethod
    def choose(self, logits: NDArray[np.float32]) -> Step:
        """Of logits (branches, V) after the last tokens; the first time (1, V), of the prompt."""

    def is_wanted(self) -> bool:
        """False, and ended, once nobody waits for it."""
        if self._receiver.cancelled():
            self.cancel()
            return False
        return True

    def cancel(self) -> None:
        self.deliver(Piece("", [], "cancelled"))

    def deliver(self, answer: Piece | Exception) -> None:
        """What the receiver does with it is not this text's failure, nor its neighbours'."""
        try:
            self._receiver.deliver(answer)
        except Exception:
            log.exception("an answer could not be delivered")


class Samples(Group):
    """Greedy search and sampling: `params.num_return_sequences` branches that go their own ways."""

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        params: Params,
        vocabulary: Vocabulary,
        receiver: Receiver,
    ) -> None:
        super().__init__(prompt, params.num_return_sequences, receiver)
        seed = np.random.SeedSequence(params.seed)
        generators = [np.random.default_rng(s) for s in [seed, *seed.spawn(self.width - 1)]]
        self._branches = [
            _Branch(i, self.prompt, max_tokens, params, vocabulary, generator)
            for i, generator in enumerate(generators)
        ]
        self._begun = False

    def choose(self, logits: NDArray[np.float32]) -> Step:
        parents = range(len(self._branches)) if self._begun else [0] * self.width
        self._begun = True
        step, alive = Step([], []), []
        for branch, parent in zip(self._branches, parents, strict=True):
            piece = branch.choose(logits[parent])
            self.deliver(piece)
            if not piece.finish_reason:
                alive.append(branch)
                step.tokens.append(piece.tokens[-1])
                step.parents.append(parent)
        self._branches = alive
        return step


class _Branch:
    def __init__(
        self,
        index: int,
        prompt: NDArray[np.int64],
        max_tokens: int,
        params: Params,
        vocabulary: Vocabulary,
        rng: np.random.Generator,
    ) -> None:
        self._index, self._max_tokens, self._params = index, max_tokens, params
        self._eos_id, self._rng = vocabulary.eos_id, rng
        self._text = TextStream(vocabulary.token_bytes, params.stop)
        self._seen = np.zeros(vocabulary.size, bool)
        self._seen[prompt] = True
        self._count = 0

    def choose(self, logits: NDArray[np.float32]) -> Piece:
        token = next_token(logits, self._seen, self._count, self._params, self._eos_id, self._rng)
        if token == self._eos_id:
            return Piece(self._text.rest(), [], "stop", self._index)
        chances = [float(log_softmax(logits)[token])] if self._params.logprobs else []
        self._count, self._seen[token] = self._count + 1, True
        text = self._text.add(token)
        reason: FinishReason = ""
        if self._text.stopped:
            reason = "stop"
        elif self._count == self._max_tokens:
            text, reason = text + self._text.rest(), "length"
        return Piece(text, [token], reason, self._index, chances)
