"""The running batch, in process: whoever joins and leaves, everyone gets what they get alone."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lathe.errors import UserError
from lathe.model.checkpoint import load_checkpoint
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe.serve import batcher as batcher_module
from lathe.serve import group as group_module
from lathe.serve.engine import Engine
from lathe.serve.group import Receiver
from lathe.serve.params import Params
from lathe.serve.piece import Piece
from lathe.settings import GenerationSettings
from tests.support.small_export import PRUNED, make_model, write_unproven

GREEDY = Params(decode_strategy="greedy_search", min_tokens=0)


class Caller:
    """Collects the answers to one request."""

    def __init__(self, engine: Engine, prompt: str, params: Params) -> None:
        self.pieces: list[Piece] = []
        self.error: Exception | None = None
        self.gone = threading.Event()
        self._waiting = params.num_return_sequences
        self._done: queue.Queue[None] = queue.Queue()
        self.taken = engine.submit(prompt, params, Receiver(self._take, self.gone.is_set))

    def _take(self, answer: Piece | Exception) -> None:
        if isinstance(answer, Exception):
            self.error, self._waiting = answer, 0
        else:
            self.pieces.append(answer)
            ended = answer.finish_reason
            self._waiting = 0 if ended == "cancelled" else self._waiting - bool(ended)
        if self._waiting == 0:
            self._done.put(None)

    def wait(self) -> list[list[int]]:
        """The tokens of every sequence."""
        self._done.get(timeout=60)
        if self.error:
            raise self.error
        count = 1 + max(piece.sequence for piece in self.pieces)
        return [[t for p in self.pieces if p.sequence == i for t in p.tokens] for i in range(count)]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    write_unproven(make_model(PRUNED), byte_tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> GPT:
    return load_checkpoint(folder / "checkpoint").model


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder, 12, threads=1, max_running=5, max_queue=200)


def ids_of(engine: Engine, prompt: str) -> list[int]:
    ids: list[int] = engine.tokenizer.encode(prompt).ids
    return ids


@pytest.fixture(scope="module")
def by_torch(engine: Engine, folder: Path) -> Callable[..., list[list[int]]]:
    model = load_checkpoint(folder / "checkpoint").model

    def tokens(prompt: str, **settings: object) -> list[list[int]]:
        wanted = GenerationSettings(**settings)  # type: ignore[arg-type]
        return generate(model, [ids_of(engine, prompt)], wanted, engine.model.eos_id)

    return tokens


@settings(deadline=None, max_examples=15)
@given(
    st.lists(
        st.tuples(
            st.text("abcdefgh ", min_size=1, max_size=40),
            st.integers(1, 20),
            st.sampled_from(["greedy", "two samples", "beams"]),
            st.booleans(),
        ),
        min_size=1,
        max_size=14,
    ),
    st.integers(1, 9),
)
def test_everyone_gets_what_they_get_alone(
    engine: Engine,
    by_torch: Callable[..., list[list[int]]],
    requests: list[tuple[str, int, str, bool]],
    stretch: int,
) -> None:
    kinds = {
        "greedy": Params(decode_strategy="greedy_search", min_tokens=0, repetition_penalty=1.3),
        "two samples": Params(num_return_sequences=2, seed=7, top_k=0, top_p=0.9),
        "beams": Params(
            decode_strategy="beam_search", num_beams=3, num_return_sequences=2, min_tokens=2
        ),
    }
    batcher_module.STRETCH = stretch
    callers = []
    for prompt, n, kind, leaves in requests:
        params = kinds[kind]
        wanted = Params(**{**params.__dict__, "max_tokens": max(n, params.min_tokens)})
        callers.append(Caller(engine, prompt, wanted))
        if leaves:
            callers[-1].gone.set()
    got = [caller.wait() for caller in callers]
    batcher_module.STRETCH = 128
    for (prompt, n, kind, leaves), tokens in zip(requests, got, strict=True):
        if leaves:
            continue
        if kind == "greedy":
            shape = {"decode_strategy": "greedy_search", "repetition_penalty": 1.3}
            assert tokens == by_torch(prompt, max_dec_len=n, min_dec_len=0, **shape)
        elif kind == "beams":
            shape = {"decode_strategy": "beam_search", "num_beams": 3, "num_return_sequences": 2}
            limits = {"max_dec_len": max(n, 2), "min_dec_len": 2}
            assert tokens == by_torch(prompt, **limits, **shape)
        else:
            params = Params(**{**kinds[kind].__dict__, "max_tokens": n})
            assert tokens == Caller(engine, prompt, params).wait()
            assert len(tokens) == 2


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("repetition", [1.0, 1.5])
def test_beam_search_is_torchs(
    engine: Engine, by_torch: Callable[..., list[list[int]]], penalty: float, repetition: float
) -> None:
    shape = {"num_beams": 4, "num_return_sequences": 3, "repetition_penalty": repetition}
    for prompt in ("a", "once upon a", "zzzz zz"):
        params = Params(
            decode_strategy="beam_search",
            length_penalty=penalty,
            max_tokens=15,
            min_tokens=3,
            **shape,
        )
        expected = by_torch(
            prompt,
            decode_strategy="beam_search",
            length_penalty=penalty,
            max_dec_len=15,
            min_dec_len=3,
            **shape,
        )
        assert Caller(engine, prompt, params).wait() == expected


def test_log_probabilities_are_the_models(engine: Engine, model: GPT) -> None:
    params = Params(logprobs=True, max_tokens=9, min_tokens=9, seed=1, temperature=0.5)
    caller = Caller(engine, "hello", params)
    (tokens,) = caller.wait()
    given = [value for piece in caller.pieces for value in piece.log_probabilities]
    with torch.inference_mode():
        ids = ids_of(engine, "hello")
        logits = model(torch.tensor([ids + tokens]))[0].log_softmax(-1)
    expected = logits[len(ids) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    np.testing.assert_allclose(given, expected, atol=1e-4)


def test_stop_strings_end_a_text_before_them(engine: Engine) -> None:
    params = Params(seed=5, max_tokens=40, min_tokens=40, top_k=0, top_p=1.0)
    free = Caller(engine, "x", params)
    free.wait()
    stop = free.text[9:12]
    ended = Caller(engine, "x", Params(**{**params.__dict__, "stop": ("\0never", stop)}))
    ended.wait()
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.pieces[-1].finish_reason == "stop"
    held = Caller(engine, "x", Params(**{**params.__dict__, "stop": (free.text[-1] + "\0",)}))
    held.wait()
    assert held.text == free.text  # what only began like a stop string comes in the end


def test_a_long_prompt_does_not_hold_others_up(folder: Path) -> None:
    """Tokens of the others come between two stretches of it."""
    engine = Engine(folder, 12, threads=1, max_running=2, max_queue=2)
    batcher_module.STRETCH = 1
    try:
        first = Caller(engine, "a", Params(max_tokens=60, min_tokens=60))
        while not first.pieces:
            time.sleep(0.001)
        before = len(first.pieces)
        second = Caller(engine, "b" * 30, Params(max_tokens=1))
        second.wait()
        assert len(first.pieces) - before >= 20
        first.wait()
    finally:
        batcher_module.STRETCH = 128
        engine.close()


def test_who_leaves_frees_a_row_and_the_queue_is_bounded(folder: Path) -> None:
    engine = Engine(folder, 12, threads=1, max_running=1, max_queue=1)
    long = Params(max_tokens=60, min_tokens=60)
    running = Caller(engine, "a", long)
    while not running.pieces:
        time.sleep(0.001)
    waiting = Caller(engine, "b", Params(max_tokens=1))
    refused = Caller(engine, "c", long)
    assert (running.taken, waiting.taken, refused.taken) == (True, True, False)
    running.gone.set()
    assert len(waiting.wait()[0]) == 1
    running.wait()
    assert running.pieces[-1].finish_reason == "cancelled" and len(running.pieces) < 60
    last = Caller(engine, "d", long)
    engine.close()
    last.wait()
    assert last.pieces[-1].finish_reason == "cancelled"
    assert not Caller(engine, "e", long).taken


def test_time_that_is_over_ends_a_request_with_what_it_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folder, 12, threads=1, max_running=3, max_queue=2)
    step = engine.model.step
    monkeypatch.setattr(engine.model, "step", lambda *given: time.sleep(0.01) or step(*given))
    long = Params(max_tokens=60, min_tokens=60, timeout_seconds=0.2)
    try:
        beams = replace(long, decode_strategy="beam_search", num_beams=3)
        for params in (replace(long, seed=1), beams):
            whole = Caller(engine, "a", replace(params, timeout_seconds=None)).wait()[0]
            late = Caller(engine, "a", params)
            (tokens,) = late.wait()
            assert late.pieces[-1].finish_reason == "timeout"
            assert 0 < len(tokens) < len(whole)
            assert params is beams or tokens == whole[: len(tokens)]
        running = Caller(engine, "a", replace(beams, timeout_seconds=None))
        waiting = Caller(engine, "b", replace(long, timeout_seconds=0.05))
        with pytest.raises(UserError, match=r"no token within timeout_seconds 0\.05"):
            waiting.wait()
        assert not any(piece.finish_reason for piece in running.pieces)
        running.wait()
    finally:
        engine.close()


def test_a_failure_is_the_requests_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder, 12, threads=1, max_running=3, max_queue=3)
    params = Params(max_tokens=30, min_tokens=30, decode_strategy="greedy_search")
    expected = Caller(engine, "fine", params).wait()
    choose = group_module.next_token

    def fails(*arguments: Any) -> int:
        if arguments[3].seed == 13:
            raise ValueError("of one request")
        return choose(*arguments)

    def deaf(_: Piece | Exception) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(group_module, "next_token", fails)
    neighbour = Caller(engine, "fine", params)
    engine.submit("deaf", params, Receiver(deaf, lambda: False))
    with pytest.raises(ValueError, match="of one request"):
        Caller(engine, "bad", Params(seed=13)).wait()
    cold = Caller(engine, "a", Params(max_tokens=5, temperature=1e-320, top_k=0, min_tokens=0))
    greedy = Caller(engine, "a", Params(**{**GREEDY.__dict__, "max_tokens": 5}))
    assert cold.wait() == greedy.wait()
    assert neighbour.wait() == expected
    with pytest.raises(UserError, match="above what runs at a time"):  # and nothing made for them
        Caller(engine, "many", Params(num_return_sequences=2**62))
    with pytest.raises(UserError, match="num_beams 4 is above what runs at a time, 3"):
        Caller(engine, "x", Params(decode_strategy="beam_search"))
    engine.close()
