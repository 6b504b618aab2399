"""Speculative decoding by prompt lookup: drafts, and their verification in the batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lathe_base.parameters import Params
from lathe_serving.runtime import sequence_group as group_module
from lathe_serving.runtime import text_generator as generator_module
from lathe_serving.runtime.batcher import Batcher
from lathe_serving.runtime.contract import Receiver, Watcher
from lathe_serving.runtime.protocol import Chunk
from lathe_serving.runtime.sequence_group import (
    MAX_DRAFT_TOKENS,
    MAX_PAUSE_TOKENS,
    MIN_PAUSE_TOKENS,
    SIZES,
    TOKEN_COST,
    Lookup,
    best_length,
)
from lathe_serving.runtime.text_generator import TextGenerator

GREEDY = Params(decode_strategy="greedy_search", min_tokens=0, max_tokens=50)
KINDS = {
    "greedy": GREEDY,
    "penalized": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=20),
    "logprobs": replace(GREEDY, logprobs=True, top_logprobs=2),
    "cold": Params(seed=3, temperature=0.2, min_tokens=0, max_tokens=50),
    "warm": Params(seed=4, top_k=0, top_p=1.0, min_tokens=0, max_tokens=50),
    "stop": replace(GREEDY, stop=("a", "\n")),
    "two": Params(seed=5, num_return_sequences=2, temperature=0.2, max_tokens=30),
    "beams": Params(decode_strategy="beam_search", num_beams=2, max_tokens=9),
}


@dataclass
class Answer:
    """Response to a request, which is cancelled after `leaves_after` tokens."""

    leaves_after: int | None = None
    chunks: list[Chunk] = field(default_factory=list)
    error: Exception | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    def take(self, chunk: Chunk | Exception) -> None:
        if isinstance(chunk, Exception):
            self.error = chunk
        else:
            self.chunks.append(chunk)

    def is_gone(self) -> bool:
        return self.leaves_after is not None and len(self.tokens) >= self.leaves_after


class Counts(Watcher):
    """Counts drafted, accepted and generated tokens."""

    def __init__(self) -> None:
        self.tokens = self.accepted = self.generated = 0

    def drafted(self, tokens: int, accepted: int) -> None:
        self.tokens, self.accepted = self.tokens + tokens, self.accepted + accepted

    def stepped(self, tokens: int) -> None:
        self.generated += tokens


class Stepped(Batcher):
    """Batcher without a thread, whose steps the test runs."""

    def _work(self) -> None:
        """Do nothing: there is no thread."""

    def step(self) -> bool:
        """Run one step; returns False if there was nothing to do."""
        if is_busy := bool(self._waiting or self._reading or self._rows):
            self._step()
        return is_busy


class Loop:
    """Generator with a batch whose steps the test runs."""

    def __init__(self, folder: Path, speculates: bool, max_running: int = 4) -> None:
        self.counts = Counts()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generator_module, "Batcher", Stepped)
            self.generator = TextGenerator(
                folder, 12, 1, max_running, 99, speculates=speculates, watcher=self.counts
            )
        assert isinstance(self.generator._batcher, Stepped)
        self.batcher = self.generator._batcher

    def ask(self, prompt: str, params: Params, leaves_after: int | None = None) -> Answer:
        answer = Answer(leaves_after)
        assert self.generator.submit(prompt, params, Receiver(answer.take, answer.is_gone))
        return answer

    def finish(self) -> None:
        while self.batcher.step():
            pass

    def get(self, prompt: str, params: Params) -> list[Chunk]:
        answer = self.ask(prompt, params)
        self.finish()
        assert answer.error is None
        return answer.chunks


@pytest.fixture(scope="module")
def plain(folder: Path) -> Loop:
    return Loop(folder, speculates=False)


@pytest.fixture(scope="module")
def speculative(folder: Path) -> Loop:
    return Loop(folder, speculates=True)


@contextmanager
def drafts(draft: Callable[[list[int], int], list[int]]) -> Iterator[None]:
    """Replace drafting with a function of the tokens so far and the maximum draft length."""

    def instead(lookup: Lookup, most: int) -> list[int]:
        return draft(lookup._text, most)[:most]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module.Lookup, "draft", instead)
        yield


def same(given: list[Chunk], expected: list[Chunk]) -> None:
    """Check that chunks are equal, up to rounding of the log-probabilities."""
    bare = {"log_probabilities": [], "top": []}
    assert [replace(c, **bare) for c in given] == [replace(c, **bare) for c in expected]
    for chunk, other in zip(given, expected, strict=True):
        np.testing.assert_allclose(chunk.log_probabilities, other.log_probabilities, atol=1e-4)
        for top, wanted in zip(chunk.top, other.top, strict=True):
            assert top == pytest.approx(wanted, abs=1e-4)


requests = st.tuples(
    st.sampled_from(["ab", "abcabcabc", "the cat and the cat and", "xyz xy", "q" * 14]),
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(0, 9)),  # tokens before the client disconnects
    st.integers(0, 20),  # steps until the next request
)


@settings(deadline=None)
@given(st.lists(requests, min_size=1, max_size=6), st.booleans(), st.integers(0, 2**32 - 1))
def test_everyone_gets_what_they_get_without_drafts(
    plain: Loop, speculative: Loop, given: list[Any], guesses: bool, seed: int
) -> None:
    """Results do not depend on drafts, from lookup or random."""
    generator = np.random.default_rng(seed)

    def guess(text: list[int], most: int) -> list[int]:
        return generator.choice(text[-4:], generator.integers(0, 6)).tolist()

    expected, answers = [], []
    for prompt, kind, n, _, _ in given:
        params = replace(KINDS[kind], max_tokens=max(n, KINDS[kind].min_tokens))
        expected.append(plain.get(prompt, params))
    with drafts(guess) if guesses else nullcontext():
        for prompt, kind, n, leaves, steps in given:
            params = replace(KINDS[kind], max_tokens=max(n, KINDS[kind].min_tokens))
            answers.append(speculative.ask(prompt, params, leaves))
            for _ in range(steps):
                speculative.batcher.step()
        speculative.finish()
    for (_, kind, _, leaves, _), answer, chunks in zip(given, answers, expected, strict=True):
        assert answer.error is None
        if answer.chunks[-1].finish_reason == "cancelled":
            assert KINDS[kind].branches > 1 or len(answer.tokens) - leaves in (0, 1)
            answer.chunks.pop()
            chunks = chunks[: len(answer.chunks)]
        same(answer.chunks, chunks)


@pytest.mark.parametrize("kind", ["greedy", "cold", "warm"])
def test_a_text_that_repeats_itself_needs_fewer_steps(folder: Path, plain: Loop, kind: str) -> None:
    loop, steps = Loop(folder, speculates=True), 0
    answer = loop.ask("abcabcabc", replace(KINDS[kind], min_tokens=50))
    while loop.batcher.step():
        steps += 1
    counts = loop.counts
    assert answer.tokens == [
        token
        for chunk in plain.get("abcabcabc", replace(KINDS[kind], min_tokens=50))
        for token in chunk.tokens
    ]
    assert counts.generated == len(answer.tokens) == 50 == steps + counts.accepted
    if kind == "warm":
        assert counts.tokens < 10 > counts.accepted
    else:
        assert counts.accepted > 25 and steps < 25
    loop.generator.close()


def test_a_draft_is_for_whoever_is_alone(folder: Path) -> None:
    """Only a request that is alone gets drafts; otherwise each step generates one token."""
    expected = Loop(folder, speculates=False).get("ab", GREEDY)

    def right(text: list[int], most: int) -> list[int]:
        done = len(text) - 2
        return [chunk.tokens[0] for chunk in expected[done : done + 3]]

    def new(answer: Answer, loop: Loop) -> int:
        before = len(answer.tokens)
        loop.batcher.step()
        return len(answer.tokens) - before

    with drafts(right):
        loop = Loop(folder, speculates=True, max_running=2)
        first = loop.ask("ab", GREEDY)
        assert [new(first, loop) for _ in range(3)] == [1, 4, 4]
        second = loop.ask("ab", replace(GREEDY, max_tokens=4))
        assert [new(first, loop) for _ in range(3)] == [1, 1, 1]  # the first step reads its prompt
        beams = loop.ask("ab", KINDS["beams"])  # waits for two slots
        assert [new(first, loop) for _ in range(2)] == [1, 1]
        assert second.chunks[-1].finish_reason == "length"
        beams.leaves_after = 0
        assert [new(first, loop) for _ in range(2)] == [4, 4]
        loop.finish()
        assert first.chunks == expected
        loop.ask("ab", KINDS["beams"])
        before = loop.counts.tokens
        loop.finish()
        assert loop.counts.tokens == before
        silent = Loop(folder, speculates=False)
        other = silent.ask("ab", GREEDY)
        assert [new(other, silent) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("end", ["leaves", "time", "stop"])
def test_a_request_ends_within_a_draft(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    loop = Loop(folder, speculates=True, max_running=1)
    params = replace(GREEDY, min_tokens=50)
    whole = loop.get("ab", params)
    tokens = [chunk.tokens[0] for chunk in whole]

    def right(text: list[int], most: int) -> list[int]:
        return tokens[len(text) - 2 :][:7]

    with drafts(right):
        if end == "stop":
            params = replace(params, stop=(whole[3].text,))
            whole = Loop(folder, speculates=False).get("ab", params)
            assert len(whole) <= 4
        elif end == "time":
            params = replace(params, timeout_seconds=60)
        answer = loop.ask("ab", params, leaves_after=4 if end == "leaves" else None)
        group = loop.batcher._waiting[0]
        if end == "time":
            late = lambda: group.arrived + 61 * (len(answer.tokens) >= 4)  # noqa: E731
            monkeypatch.setattr("lathe_serving.runtime.sequence_group.time.monotonic", late)
        waiting = loop.ask("ab", replace(params, timeout_seconds=None, max_tokens=50))
        waiting.leaves_after = 0
        loop.batcher.step()
        loop.batcher.step()
        if end == "stop":
            assert answer.chunks == whole
        else:
            assert answer.tokens == tokens[:4]
            assert (
                answer.chunks[-1].finish_reason == {"leaves": "cancelled", "time": "timeout"}[end]
            )
        assert not loop.batcher._rows and not loop.batcher._owners
        monkeypatch.undo()
        again = replace(params, timeout_seconds=None)
        same(loop.get("ab", again), whole)


def test_drafts_end_where_the_answer_does(folder: Path) -> None:
    """Drafts stay within `max_tokens` and the context length."""
    loop, plain = Loop(folder, speculates=True), Loop(folder, speculates=False)
    for prompt, most in (("ab" * 20, 24), ("ab" * 20, 1), ("ab" * 20, 2), ("ab" * 31, 2)):
        params = replace(GREEDY, max_tokens=most)
        with drafts(lambda text, most: text[-1:] * 7):
            same(loop.get(prompt, params), plain.get(prompt, params))
    assert loop.counts.tokens > 0


def test_a_failing_draft_fails_its_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(folder, speculates=True)
    expected = loop.get("abab", GREEDY)

    def fails(*_: object) -> None:
        raise MemoryError("read")

    with drafts(lambda text, most: [1, 2]):
        monkeypatch.setattr(loop.generator.model, "read", fails)
        answer = loop.ask("abab", GREEDY)
        loop.finish()
        assert isinstance(answer.error, MemoryError)
        monkeypatch.undo()
    same(loop.get("abab", GREEDY), expected)


texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@given(texts, texts, st.integers(0, 9))
def test_a_draft_is_what_followed_the_longest_match(
    prompt: list[int], more: list[int], most: int
) -> None:
    lookup = Lookup(prompt)
    for n in range(len(more) + 1):
        text = prompt + more[:n]
        draft = lookup.draft(most)
        found = [
            end
            for size in SIZES
            for end in reversed(range(size, len(text)))
            if text[end - size : end] == text[-size:]
        ]
        if draft:
            assert len(draft) <= most
            period = len(text) - found[0]
            whole = text + draft
            assert all(whole[i] == whole[i - period] for i in range(len(text), len(whole)))
        lookup._chance, lookup._resumes = 0.9, 0  # regardless of earlier drafts' success
        assert bool(found and most) == bool(lookup.draft(most))
        if n < len(more):
            lookup.add(more[n])


@given(st.floats(0, 1))
def test_the_length_of_a_draft_is_the_best(chance: float) -> None:
    def speed(length: int) -> float:
        return sum(chance**i for i in range(length + 1)) / (1 + TOKEN_COST * length)

    fastest = max(map(speed, range(MAX_DRAFT_TOKENS + 1)))
    assert speed(best_length(chance)) == pytest.approx(fastest)


def test_lookup_pauses_for_longer_the_longer_it_fails() -> None:
    """Failed drafts double the pause, and an accepted one resets it."""
    lookup, tried = Lookup([0, 1]), []
    for i in range(1, 500):
        for token in (2 * i, 2 * i + 1, 0, 1):  # a repeated pair with a new continuation
            lookup.add(token)
        if lookup.draft(9):
            tried.append(4 * i)
    waits = np.diff(tried).tolist()
    assert waits == sorted(waits) and waits[-1] == MAX_PAUSE_TOKENS + 4
    assert {MIN_PAUSE_TOKENS + 4, 2 * MIN_PAUSE_TOKENS + 4, 4 * MIN_PAUSE_TOKENS + 4} < set(waits)
    while not (draft := lookup.draft(9)):
        lookup.add(5)
    assert len(draft) == 1
    for _ in range(MAX_DRAFT_TOKENS):
        for token in draft:
            lookup.add(token)
        draft = lookup.draft(9)
    assert len(draft) == MAX_DRAFT_TOKENS
