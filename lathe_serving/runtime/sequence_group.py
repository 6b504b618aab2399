"""One request of the running batch: its branches and how their next tokens are chosen."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError
from lathe_serving.runtime.contract import Receiver
from lathe_serving.runtime.grammar import Grammar
from lathe_serving.runtime.lookup import Lookup
from lathe_serving.runtime.params import Params
from lathe_serving.runtime.protocol import Chunk, FinishReason
from lathe_serving.runtime.sampling import log_softmax, most_likely, next_token
from lathe_serving.runtime.text import TextStream, TokenBytes

log = logging.getLogger("lathe")

Score = tuple[float, dict[str, float]]
"""A token's log-probability, and by name those of the most likely tokens at its position."""


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary size, the ids that end a text, and the bytes of every id."""

    size: int
    end_ids: list[int]
    token_bytes: TokenBytes


@dataclass(frozen=True)
class Request:
    """A prompt's ids, generation parameters, maximum number of tokens and grammar."""

    prompt: Sequence[int]
    max_tokens: int
    params: Params
    vocabulary: Vocabulary
    receiver: Receiver
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Step:
    """A group's next step: for each branch its token and its parent (an index into the branches of
    the step before). No branches means that the group has finished."""

    tokens: list[int]
    parents: list[int]


class SequenceGroup(ABC):
    """A prompt and the branches that continue it, at most `width` at a time.

    Attributes:
        begun: whether its first tokens have been chosen.
        cached_tokens: tokens of the prompt that need not be read.
    """

    def __init__(self, request: Request) -> None:
        self.prompt = np.array(request.prompt, np.int64)
        self.width = request.params.branches
        self.arrived = time.monotonic()
        self.begun = False
        self.cached_tokens = 0
        self._params, self._receiver = request.params, request.receiver
        self._token_bytes = request.vocabulary.token_bytes
        self._prompt_scores: list[Score] = [(math.nan, {})]

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt are requested."""
        return self._params.echo and self._params.logprobs

    def read(self, first: int, logits: NDArray[np.float32]) -> None:
        """Record the log-probabilities of the prompt.

        Args:
            first: position in the prompt of the first row.
            logits: (T, V) after each of T tokens.
        """
        targets = self.prompt[first + 1 : first + 1 + len(logits)]
        scores = log_softmax(logits[: len(targets)])
        for token, row in zip(targets.tolist(), scores, strict=True):
            self._prompt_scores.append(score(token, row, self._params, self._token_bytes))

    @abstractmethod
    def choose(self, logits: NDArray[np.float32]) -> Step:
        """Choose from logits (branches, V) after the last tokens; at first (1, V), of the
        prompt."""

    def draft(self) -> list[int]:
        """Draft the next tokens, if one branch is left and drafting pays off."""
        return []

    @abstractmethod
    def expire(self) -> None:
        """Deliver the sequences generated so far as final; each has at least one token."""

    def keeps_running(self) -> bool:
        """Whether to continue; ends the group if it is cancelled or has timed out."""
        if self._receiver.cancelled():
            self.cancel()
            return False
        timeout = self._params.timeout_seconds
        if timeout is None or time.monotonic() - self.arrived < timeout:
            return True
        if self.begun:
            self.expire()
        else:
            self.deliver(
                UserError(
                    f"no token within timeout_seconds {timeout:g}",
                    "try again in a moment, or raise timeout_seconds",
                    Code.TIMEOUT,
                )
            )
        return False

    def cancel(self) -> None:
        """Deliver a cancellation."""
        self.deliver(Chunk("", [], "cancelled"))

    def deliver(self, answer: Chunk | Exception) -> None:
        """Deliver a chunk or an error; a failing receiver must not affect any request."""
        if isinstance(answer, Chunk) and answer.prompt_tokens:
            answer = replace(answer, cached_tokens=self.cached_tokens)
        try:
            self._receiver.deliver(answer)
        except Exception:
            log.exception("failed to deliver an answer")


def score(
    token: int, scores: NDArray[np.float32], params: Params, token_bytes: TokenBytes
) -> Score:
    """The log-probability of a token, and by name those of the most likely tokens and of itself.

    Args:
        scores: (V,) log-probabilities.
    """
    top: dict[str, float] = {}
    if params.top_logprobs:
        ids = [*most_likely(scores, params.top_logprobs).tolist(), token]
        top = {token_bytes.name(i): float(scores[i]) for i in ids}
    return float(scores[token]), top


class Samples(SequenceGroup):
    """Greedy search and sampling: `params.num_return_sequences` independent branches."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        seed = np.random.SeedSequence(request.params.seed)
        generators = [np.random.default_rng(s) for s in [seed, *seed.spawn(self.width - 1)]]
        self._branches = [_Branch(i, request, rng) for i, rng in enumerate(generators)]
        self._only_reads = request.max_tokens == 0

    def choose(self, logits: NDArray[np.float32]) -> Step:
        parents = range(len(self._branches)) if self.begun else [0] * self.width
        if not self.begun and (self._params.echo or self._only_reads):
            self._answer_prompt()
        self.begun = True
        if self._only_reads:
            return Step([], [])
        step, alive = Step([], []), []
        for branch, parent in zip(self._branches, parents, strict=True):
            chunk = branch.choose(logits[parent])
            self.deliver(chunk)
            if not chunk.finish_reason:
                alive.append(branch)
                step.tokens.append(chunk.tokens[-1])
                step.parents.append(parent)
        self._branches = alive
        return step

    def draft(self) -> list[int]:
        return self._branches[0].draft() if len(self._branches) == 1 else []

    def expire(self) -> None:
        for branch in self._branches:
            self.deliver(branch.expired())

    def _answer_prompt(self) -> None:
        tokens: list[int] = self.prompt.tolist() if self._params.echo else []
        pieces = self._token_bytes.echo(tokens)
        text = "".join(pieces)
        logprobs, top, names, lengths = [], [], [], []
        if self.scores_prompt:
            logprobs, top = map(list, zip(*self._prompt_scores, strict=True))
            names = [self._token_bytes.name(token) for token in tokens]
            lengths = [len(piece) for piece in pieces]
        reason: FinishReason = "length" if self._only_reads else ""
        count = len(self.prompt) if self._only_reads else 0
        for i in range(self.width):
            chunk = Chunk(text, tokens, reason, i, logprobs, names, top, count, lengths=lengths)
            self.deliver(chunk)


class _Branch:
    def __init__(self, index: int, request: Request, rng: np.random.Generator) -> None:
        vocabulary, params = request.vocabulary, request.params
        self._index, self._max_tokens, self._params = index, request.max_tokens, params
        self._end_ids, self._rng = vocabulary.end_ids, rng
        self._text = TextStream(vocabulary.token_bytes, params.stop)
        self._seen = np.zeros(vocabulary.size, bool)
        self._seen[list(request.prompt)] = True
        self._counts = np.zeros(vocabulary.size, np.int32)
        self._count, self._prompt_tokens = 0, len(request.prompt)
        self._token_bytes = vocabulary.token_bytes
        self._lookup = Lookup(request.prompt)
        self._grammar = request.grammar and request.grammar.copy()

    def draft(self) -> list[int]:
        return self._lookup.draft(self._max_tokens - self._count - 1)

    def expired(self) -> Chunk:
        return self._ended(self._text.rest(), "timeout")

    def _ended(self, text: str, reason: FinishReason) -> Chunk:
        return Chunk(text, [], reason, self._index, prompt_tokens=self._prompt_tokens)

    def choose(self, logits: NDArray[np.float32]) -> Chunk:
        allowed = None
        if self._grammar is not None:
            allowed = self._grammar.allowed()
            if allowed is None:
                return self._ended(self._text.rest(), "stop")
        token = next_token(
            logits,
            self._seen,
            self._count,
            self._params,
            self._end_ids,
            self._rng,
            self._counts,
            allowed,
        )
        if token in self._end_ids or token in self._params.stop_token_ids:
            return self._ended(self._text.rest(), "stop")
        self._count, self._seen[token] = self._count + 1, True
        self._counts[token] += 1
        self._lookup.add(token)
        if self._grammar is not None:
            self._grammar.add(token)
        before = self._text.length
        text = self._text.add(token)
        reason: FinishReason = ""
        if self._text.stopped:
            reason = "stop"
        elif self._count == self._max_tokens:
            text, reason = text + self._text.rest(), "length"
        count = self._prompt_tokens if reason else 0
        if not self._params.logprobs:
            return Chunk(text, [token], reason, self._index, prompt_tokens=count)
        chance, top = score(token, log_softmax(logits), self._params, self._token_bytes)
        return Chunk(
            text,
            [token],
            reason,
            self._index,
            [chance],
            [self._token_bytes.name(token)],
            [top],
            prompt_tokens=count,
            lengths=[self._text.length - before],
        )
