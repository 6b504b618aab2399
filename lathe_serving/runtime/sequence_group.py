"""One request of the running batch: its branches and how their next tokens are chosen.

`Samples` are independent branches: greedy search and sampling. `Beams` are those of beam search,
which survive or end together. `Lookup` drafts tokens for a branch that runs alone.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError
from lathe_base.parameters import Params
from lathe_serving.runtime.contract import Receiver
from lathe_serving.runtime.grammar import Grammar
from lathe_serving.runtime.protocol import Chunk, FinishReason
from lathe_serving.runtime.sampling import log_softmax, most_likely, next_token, penalize
from lathe_serving.runtime.text import TextStream, TokenBytes

log = logging.getLogger("lathe")

SIZES = (4, 3, 2)  # tokens that are looked up, the longest first
MAX_DRAFT_TOKENS = 7
TOKEN_COST = 0.2  # of a decoding step, for each token more in it
FIRST_CHANCE = 0.3
EMA_WEIGHT = 0.25  # weight of the latest token in the moving average
MIN_PAUSE_TOKENS, MAX_PAUSE_TOKENS = 16, 128

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
        # Nothing predicts the first token of a prompt.
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
        # Row i predicts the token after it; after the prompt's last one there is none.
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
        # The first branch draws what a request for one sequence would; the others are independent.
        seed = np.random.SeedSequence(request.params.seed)
        generators = [np.random.default_rng(s) for s in [seed, *seed.spawn(self.width - 1)]]
        self._branches = [_Branch(i, request, rng) for i, rng in enumerate(generators)]
        self._only_reads = request.max_tokens == 0

    def choose(self, logits: NDArray[np.float32]) -> Step:
        # At first all branches start from the same row of logits, that of the prompt.
        parents = range(len(self._branches)) if self.begun else [0] * self.width
        if not self.begun and (self._params.echo or self._only_reads):
            # The prompt itself, as the first chunk of every sequence, or as the only one.
            tokens: list[int] = self.prompt.tolist() if self._params.echo else []
            pieces = self._token_bytes.echo(tokens)
            logprobs, top, names, lengths = [], [], [], []
            if self.scores_prompt:
                logprobs, top = map(list, zip(*self._prompt_scores, strict=True))
                names = [self._token_bytes.name(token) for token in tokens]
                lengths = [len(piece) for piece in pieces]
            reason: FinishReason = "length" if self._only_reads else ""
            text, count = "".join(pieces), len(self.prompt) if self._only_reads else 0
            for i in range(self.width):
                chunk = Chunk(text, tokens, reason, i, logprobs, names, top, count, lengths=lengths)
                self.deliver(chunk)
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
        self._branches = alive  # in the order of their rows, which the batcher closes up
        return step

    def draft(self) -> list[int]:
        return self._branches[0].draft() if len(self._branches) == 1 else []

    def expire(self) -> None:
        for branch in self._branches:
            self.deliver(branch.end("timeout"))


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
        self._grammar = request.grammar and request.grammar.copy()  # a state for each branch

    def draft(self) -> list[int]:
        # A step chooses one token more than it has drafts.
        return self._lookup.draft(self._max_tokens - self._count - 1)

    def end(self, reason: FinishReason) -> Chunk:
        """The last chunk, with the text that was held back, but without a token."""
        text = self._text.rest()
        return Chunk(text, [], reason, self._index, prompt_tokens=self._prompt_tokens)

    def choose(self, logits: NDArray[np.float32]) -> Chunk:
        allowed = None
        if self._grammar is not None:
            allowed = self._grammar.allowed()
            if allowed is None:  # the text is complete, and cannot continue
                return self.end("stop")
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
            return self.end("stop")
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
        # The model's own probabilities: of the logits before penalties, bias and grammar.
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


class Beams(SequenceGroup):
    """Beam search with `params.num_beams` branches; the best `num_return_sequences` are delivered
    at the end, best first. The rules, and the tokens, are those of `lathe.model.generate`."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._max_tokens, self._vocabulary = request.max_tokens, request.vocabulary
        self._scores = np.zeros(1)  # (branches,)
        self._tokens = np.zeros((1, 0), np.int64)  # (branches, so far)
        self._ended: list[tuple[float, list[int]]] = []

    def choose(self, logits: NDArray[np.float32]) -> Step:
        """Select the surviving beams; at the first step all of them extend the prompt's branch."""
        self.begun = True
        N, V = self.width, self._vocabulary.size
        log_probabilities = log_softmax(logits)
        for row, tokens in zip(log_probabilities, self._tokens, strict=True):
            if self._params.repetition_penalty != 1.0:
                seen = np.zeros(V, bool)
                seen[self.prompt] = seen[tokens] = True
                row[:] = penalize(row, seen, self._params.repetition_penalty)
        if self._tokens.shape[1] < self._params.min_tokens:
            log_probabilities[:, self._vocabulary.end_ids] = -np.inf

        # The best continuations of all beams together: a beam may have several of them, or none.
        flat = (self._scores[:, None] + log_probabilities).ravel()
        best = np.argpartition(-flat, min(2 * N, flat.size - 1))[: 2 * N]
        best = best[np.argsort(-flat[best], kind="stable")]  # (2N,), no more than N of them end
        scores, beams = flat[best], best // V
        texts = np.concatenate([self._tokens[beams], (best % V)[:, None]], 1)
        count = texts.shape[1]

        # Only an end among the best N is a finished text: a worse one would not have been a beam.
        ends = np.isin(texts[:, -1], self._vocabulary.end_ids) | (count == self._max_tokens)
        for rank in np.flatnonzero(ends[:N]):
            self._ended.append((self._final(scores[rank], count), texts[rank].tolist()))
        self._ended = sorted(self._ended, key=lambda entry: -entry[0])[:N]
        going = np.flatnonzero(~ends)[:N]
        self._scores, self._tokens = scores[going], texts[going]
        if count == self._max_tokens or (
            # Even the best running beam can no longer enter the finished ones.
            len(self._ended) == N and self._final(self._scores[0], count) <= self._ended[-1][0]
        ):
            self._deliver_best("length")
            return Step([], [])
        return Step(self._tokens[:, -1].tolist(), beams[going].tolist())

    def _final(self, score: float, count: int) -> float:
        return float(score / count**self._params.length_penalty)

    def expire(self) -> None:
        count = self._tokens.shape[1]
        for score, tokens in zip(self._scores, self._tokens, strict=True):
            self._ended.append((self._final(score, count), tokens.tolist()))
        self._ended.sort(key=lambda entry: -entry[0])
        self._deliver_best("timeout")

    def _deliver_best(self, cut: FinishReason) -> None:
        for index, (_, ids) in enumerate(self._ended[: self._params.num_return_sequences]):
            reason = cut
            if ids[-1] in self._vocabulary.end_ids:
                ids, reason = ids[:-1], "stop"
            stream = TextStream(self._vocabulary.token_bytes, self._params.stop)
            text = "".join(stream.add(token) for token in ids) + stream.rest()
            self.deliver(Chunk(text, ids, reason, index, prompt_tokens=len(self.prompt)))


class Lookup:
    """The text of a sequence, and drafts of its next tokens: speculative decoding by prompt lookup,
    which drafts the tokens that followed an earlier occurrence of the last ones.

    The tokens of a draft are verified in one step, which reads the model's weights once for all of
    them. If a text repeats itself or its prompt, most drafts are accepted; otherwise they are
    wasted.

    Draft length: if each token is accepted with probability a, a draft of k tokens yields 1 + a +
    ... + a^k tokens on average, in the time of 1 + k TOKEN_COST decoding steps. The length
    maximizes this ratio, with a as a moving average over the sequence's own drafts. If not even one
    token pays off, drafting pauses, then one token is tried; every failure doubles the pause.

    Sources: prompt lookup decoding (Saxena, 2023); the expected number of tokens, Leviathan et al.,
    Fast inference from transformers via speculative decoding (ICML 2023).
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._follows: dict[tuple[int, ...], int] = {}  # where the text goes on after some tokens
        self._indexed = 0
        self._draft: list[int] = []  # what is left of it
        self._chance = FIRST_CHANCE
        self._pause, self._resumes = MIN_PAUSE_TOKENS, 0

    def add(self, token: int) -> None:
        """Append the chosen token, and compare it with the draft."""
        self._text.append(token)
        if not self._draft:
            return
        is_right = self._draft.pop(0) == token
        self._chance += EMA_WEIGHT * (is_right - self._chance)
        if is_right:
            self._pause = MIN_PAUSE_TOKENS
            return
        self._draft = []
        if not best_length(self._chance):
            self._resumes = len(self._text) + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE_TOKENS)

    def draft(self, max_tokens: int) -> list[int]:
        """Draft at most `max_tokens` tokens; empty if drafting does not pay off."""
        if len(self._text) < self._resumes:
            return []
        length = min(max_tokens, max(1, best_length(self._chance)))
        if length <= 0:
            return []
        # Index what has come since the last draft, except the last token, which nothing follows
        # yet. Of several occurrences the latest one remains.
        text = self._text
        for end in range(self._indexed + 1, len(text)):
            for size in SIZES:
                self._follows[tuple(text[max(0, end - size) : end])] = end
        self._indexed = len(text) - 1
        continuations = (self._follows.get(tuple(text[-size:])) for size in SIZES)
        start = next((start for start in continuations if start is not None), None)
        if start is None:
            return []
        # A repetition that reaches the end of the text goes on in the draft.
        repeated = cycle(self._text[start : start + length])
        self._draft = list(islice(repeated, length))
        return list(self._draft)


def best_length(chance: float) -> int:
    """The draft length that yields the most tokens per time.

    Args:
        chance: probability that a drafted token is accepted.
    """
    # `tokens` come out of a draft of `length` tokens; one more would add `right` to them, and
    # TOKEN_COST to the time. The first length is best at which that lowers the rate.
    tokens, right = 1.0, chance
    for length in range(MAX_DRAFT_TOKENS):
        cost = 1 + length * TOKEN_COST
        if right / TOKEN_COST <= tokens / cost:
            return length
        tokens, right = tokens + right, right * chance
    return MAX_DRAFT_TOKENS
