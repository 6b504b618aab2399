"""Continuous batching in process: requests get the same result in any batch as alone."""

import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lathe.model.checkpoint import load_checkpoint
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe_base.config.settings import GenerationSettings
from lathe_base.errors import Code
from lathe_base.parameters import Params
from lathe_serving.runtime import batcher as batcher_module
from lathe_serving.runtime import contract
from lathe_serving.runtime import sequence_group as group_module
from lathe_serving.runtime.batcher import Batcher
from lathe_serving.runtime.contract import ENCODERS, Receiver, Watcher
from lathe_serving.runtime.kv_cache import BLOCK
from lathe_serving.runtime.protocol import Chunk, InvalidRequest
from lathe_serving.runtime.sequence_group import SequenceGroup
from lathe_serving.runtime.text import encode_prompts
from lathe_serving.runtime.text_generator import TextGenerator
from tests.support.errors import raises
from tests.support.small_export import PRUNED, make_model, write_unproven
from tests.support.tables import quick_only

MIXED_ONLY = ("mixed", "mixed_sizes", "chunk_lengths", "chunk_seqlens_k")
GREEDY = Params(decode_strategy="greedy_search", min_tokens=0)


class Caller:
    """Submits a request and collects its chunks."""

    def __init__(self, generator: TextGenerator, prompt: str, params: Params) -> None:
        self.chunks: list[Chunk] = []
        self.error: Exception | None = None
        self.gone = threading.Event()
        self._waiting = params.num_return_sequences
        self._done: queue.Queue[None] = queue.Queue()
        self.taken = generator.submit(prompt, params, Receiver(self._take, self.gone.is_set))

    def _take(self, answer: Chunk | Exception) -> None:
        if isinstance(answer, Exception):
            self.error, self._waiting = answer, 0
        else:
            self.chunks.append(answer)
            ended = answer.finish_reason
            self._waiting = 0 if ended == "cancelled" else self._waiting - bool(ended)
        if self._waiting == 0:
            self._done.put(None)

    def wait(self) -> list[list[int]]:
        """Wait for the end; returns the tokens of every sequence."""
        self._done.get(timeout=60)
        if self.error:
            raise self.error
        count = 1 + max(chunk.sequence for chunk in self.chunks)
        return [[t for p in self.chunks if p.sequence == i for t in p.tokens] for i in range(count)]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


@pytest.fixture(scope="module")
def model(generator: TextGenerator) -> GPT:
    return load_checkpoint(generator.model.folder / "checkpoint").model


@pytest.fixture(scope="module")
def after_prefix(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """Export of a model with a prefix."""
    folder, model = tmp_path_factory.mktemp("prefix"), make_model(PRUNED)
    model.set_prefix((7, 130, 21))
    write_unproven(model, byte_tokenizer, folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[("folder", 0), ("folder", 2**13), ("after_prefix", 2**20)],
    ids="{0[0]}, prefix_bytes={0[1]}".format,
)
def generator(request: pytest.FixtureRequest) -> Iterator[TextGenerator]:
    """Generators without a prefix cache, with one of a few blocks, and with a large one."""
    name, prefixes = request.param
    folder: Path = request.getfixturevalue(name)
    generator = TextGenerator(
        folder, 12, threads=1, max_running=5, max_queue=200, prefix_bytes=prefixes
    )
    yield generator
    generator.close()


@contextmanager
def chunk_size(tokens: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PREFILL_CHUNK", "MIXED_CHUNK"):
            patch.setattr(batcher_module, name, tokens)
        patch.setattr(batcher_module, "MIN_CHUNK_TOKENS", min(tokens, 2))
        patch.setattr(batcher_module, "TOKENS_PER_SLOT", 0)
        yield


def prompt_ids(generator: TextGenerator, prompt: str) -> list[int]:
    ids: list[int] = generator.tokenizer.encode(prompt).ids
    return ids


@pytest.fixture(scope="module")
def by_torch(generator: TextGenerator, model: GPT) -> Callable[..., list[list[int]]]:
    def tokens(prompt: str, **settings: object) -> list[list[int]]:
        wanted = GenerationSettings(**settings)  # type: ignore[arg-type]
        return generate(model, [prompt_ids(generator, prompt)], wanted, generator.model.eos_id)

    return tokens


@settings(deadline=None, max_examples=15)
@given(
    st.lists(
        st.tuples(
            st.builds(
                str.__add__,
                st.sampled_from(["", "shared by several "]),
                st.text("ab ", min_size=1, max_size=20),
            ),
            st.integers(1, 20),
            st.sampled_from(["greedy", "two samples", "beams"]),
            st.booleans(),
        ),
        min_size=1,
        max_size=14,
    ),
    st.sampled_from([1, 3, 7, 20, 64]),
)
def test_everyone_gets_what_they_get_alone(
    generator: TextGenerator,
    by_torch: Callable[..., list[list[int]]],
    requests: list[tuple[str, int, str, bool]],
    chunk: int,
) -> None:
    kinds = {
        "greedy": Params(decode_strategy="greedy_search", min_tokens=0, repetition_penalty=1.3),
        "two samples": Params(num_return_sequences=2, seed=7, top_k=0, top_p=0.9),
        "beams": Params(
            decode_strategy="beam_search", num_beams=3, num_return_sequences=2, min_tokens=2
        ),
    }
    callers = []
    with chunk_size(chunk):
        for prompt, n, kind, leaves in requests:
            params = kinds[kind]
            wanted = Params(**{**params.__dict__, "max_tokens": max(n, params.min_tokens)})
            callers.append(Caller(generator, prompt, wanted))
            if leaves:
                callers[-1].gone.set()
        got = [caller.wait() for caller in callers]
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
            assert tokens == Caller(generator, prompt, params).wait()
            assert len(tokens) == 2


@pytest.mark.parametrize(
    ("penalty", "repetition"),
    quick_only(product((0.0, 1.0, 2.0), (1.0, 1.5)), [(0.0, 1.5), (1.0, 1.0), (2.0, 1.5)]),
)
def test_beam_search_is_torchs(
    generator: TextGenerator,
    by_torch: Callable[..., list[list[int]]],
    penalty: float,
    repetition: float,
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
        assert Caller(generator, prompt, params).wait() == expected


def test_log_probabilities_are_the_models(generator: TextGenerator, model: GPT) -> None:
    params = Params(logprobs=True, max_tokens=9, min_tokens=9, seed=1, temperature=0.5)
    caller = Caller(generator, "hello", params)
    (tokens,) = caller.wait()
    given = [value for chunk in caller.chunks for value in chunk.log_probabilities]
    with torch.inference_mode():
        ids = prompt_ids(generator, "hello")
        logits = model(torch.tensor([ids + tokens]))[0].log_softmax(-1)
    expected = logits[len(ids) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    np.testing.assert_allclose(given, expected, atol=1e-4)


def test_stop_strings_end_a_text_before_them(generator: TextGenerator) -> None:
    params = Params(seed=5, max_tokens=40, min_tokens=40, top_k=0, top_p=1.0)
    free = Caller(generator, "x", params)
    free.wait()
    stop = free.text[9:12]
    ended = Caller(generator, "x", Params(**{**params.__dict__, "stop": ("\0never", stop)}))
    ended.wait()
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.chunks[-1].finish_reason == "stop"
    held = Caller(generator, "x", Params(**{**params.__dict__, "stop": (free.text[-1] + "\0",)}))
    held.wait()
    assert held.text == free.text  # text that only began like a stop string is emitted at the end


@pytest.mark.parametrize("can_mix", [True, False])
def test_a_long_prompt_does_not_hold_others_up(folder: Path, tmp_path: Path, can_mix: bool) -> None:
    """Other requests generate tokens between the chunks of a long prompt."""
    if not can_mix:
        folder = shutil.copytree(folder, tmp_path / "earlier")
        _as_before_mixed_steps(folder / "model.onnx")
    generator = TextGenerator(folder, 12, threads=1, max_running=2, max_queue=2)
    assert generator.model.can_mix is can_mix
    try:
        with chunk_size(1):
            first = Caller(generator, "a", Params(max_tokens=60, min_tokens=60))
            while not first.chunks:
                time.sleep(0.001)
            before = len(first.chunks)
            second = Caller(generator, "b" * 30, Params(max_tokens=1))
            second.wait()
            assert len(first.chunks) - before >= 20
            first.wait()
    finally:
        generator.close()


@contextmanager
def logged_chunks(
    generator: TextGenerator, before_chunk: Callable[[str], object] = lambda log: None
) -> Iterator[list[str]]:
    """The first characters of the prompts that chunks are read of, in their order."""
    log: list[str] = []
    letters = {prompt_ids(generator, letter)[0]: letter for letter in "abcls"}

    def chunk(self: Batcher, group: SequenceGroup, size: int) -> Any:
        before_chunk("".join(log))
        log.append(letters[int(group.prompt[0])])
        return plain(self, group, size)

    plain = Batcher._chunk
    with chunk_size(4), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batcher, "_chunk", chunk)
        yield log


@pytest.mark.parametrize("tokens", [4, 2])
def test_a_short_prompt_waits_for_one_chunk_of_a_long_one(folder: Path, tokens: int) -> None:
    one, short = Params(max_tokens=1), list[Caller]()
    generator = TextGenerator(folder, 12, threads=1, max_running=4, max_queue=4)

    def arrive(log: str) -> None:
        if log == "ll":
            short.append(Caller(generator, "s" * tokens, one))

    try:
        with logged_chunks(generator, arrive) as log:
            Caller(generator, "l" * 60, one).wait()
            short[0].wait()
        # Also a short prompt that leaves room in its step does not wait for a chunk in it.
        assert "".join(log) == "lll" + "s" + 12 * "l"
    finally:
        generator.close()


def test_a_stream_of_short_prompts_does_not_starve_a_long_one(folder: Path) -> None:
    one, short = Params(max_tokens=1), list[Caller]()
    generator = TextGenerator(folder, 12, threads=1, max_running=4, max_queue=4)

    def arrive(log: str) -> None:
        if log.count("l") < 15:
            short.append(Caller(generator, "s" * 4, one))

    try:
        with logged_chunks(generator, arrive) as log:
            Caller(generator, "l" * 60, one).wait()
            for caller in short:
                if caller.taken:
                    caller.wait()
        reading, _, _ = "".join(log).rpartition("l")
        assert reading.startswith("lslsls") and reading.count("l") == 14
        assert "ss" not in reading  # every other chunk belongs to the oldest request
    finally:
        generator.close()


def test_prompts_of_equal_length_are_read_in_the_order_of_their_arrival(folder: Path) -> None:
    generator = TextGenerator(folder, 12, threads=1, max_running=4, max_queue=4)
    try:
        with logged_chunks(generator) as log:
            callers = [Caller(generator, name * 40, Params(max_tokens=1)) for name in "abc"]
            for caller in callers:
                caller.wait()
        assert "".join(log) == "a" * 10 + "b" * 10 + "c" * 10
    finally:
        generator.close()


def test_no_request_waits_for_the_tokens_of_a_long_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_encode = threading.Event()

    def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        assert texts == ["a"] or may_encode.wait(60)
        return encode_prompts(tokenizer, texts)

    monkeypatch.setattr(contract, "encode_prompts", encode)
    monkeypatch.setattr(contract, "LONG_TEXT", 20)
    generator = TextGenerator(folder, 12, threads=1, max_running=2, max_queue=2)
    try:
        long = [Caller(generator, "a" * 21, GREEDY) for _ in range(ENCODERS + 2)]
        too_long = Caller(generator, "a" * 9999, GREEDY)
        assert all(caller.taken for caller in long) and not too_long.taken
        Caller(generator, "a", GREEDY).wait()
        may_encode.set()
        tokens = [caller.wait() for caller in long]
        assert tokens == [tokens[0]] * len(long)
        with raises(Code.TOO_LONG, "text_input", kind=InvalidRequest):
            Caller(generator, "a" * 9999, GREEDY).wait()
    finally:
        may_encode.set()
        generator.close()


def _as_before_mixed_steps(path: Path) -> None:
    """Convert a graph to what was exported before mixed steps existed."""
    model = onnx.load(path)
    graph = model.graph
    for node in list(graph.node):
        if node.op_type == "If":
            branch = next(a.g for a in node.attribute if a.name == "else_branch")
            attention = next(n for n in branch.node if n.op_type == "GroupQueryAttention")
            attention.output[:] = node.output[:3]
            node.CopyFrom(attention)
    for values in (graph.input, graph.output):
        for value in [value for value in values if value.name.startswith("chunk_")]:
            values.remove(value)
    made = {output for node in graph.node for output in node.output}
    made |= {value.name for value in (*graph.input, *graph.initializer)}
    for node in list(graph.node):
        if not made.issuperset(filter(None, node.input)) or node.output[0] in MIXED_ONLY:
            graph.node.remove(node)
    onnx.save(model, path)


def test_a_shared_beginning_is_read_once(folder: Path) -> None:
    """A request with the same prefix reuses all blocks before the one of its last token."""
    reused = []

    class Notes(Watcher):
        def begun(self, prompt_tokens: int, reused_tokens: int, seconds: float) -> None:
            reused.append(reused_tokens)

    generator = TextGenerator(folder, 12, 1, 2, 8, prefix_bytes=2**20, watcher=Notes())
    shared = "x" * (2 * BLOCK)
    expected = Caller(generator, shared + "aa", GREEDY).wait()
    Caller(generator, "y" + shared, GREEDY).wait()  # not shared as a prefix
    for prompt in (shared + "bb", shared + "aa", shared, shared[:-1]):
        tokens = Caller(generator, prompt, GREEDY).wait()
        assert prompt != shared + "aa" or tokens == expected
    echo = Caller(generator, shared, replace(GREEDY, echo=True, logprobs=True, max_tokens=0))
    echo.wait()  # needs the logits of every token
    assert reused == [0, 0, 2 * BLOCK, 2 * BLOCK, BLOCK, BLOCK, 0]
    generator.close()


def test_the_watcher_is_told_what_the_slots_hold(folder: Path) -> None:
    told = []

    class Load(Watcher):
        def holds(self, running: int, waiting: int, kv_tokens: int, kv_usage: float) -> None:
            told.append((running, waiting, kv_tokens, kv_usage))

    generator = TextGenerator(folder, 12, 1, 2, 8, watcher=Load())
    size = 2 * generator.model.n_positions
    Caller(generator, "hello", GREEDY).wait()
    generator.close()
    running, _, tokens, _ = max(told)
    assert running == 1 and tokens >= len("hello")
    assert all(usage == tokens / size for _, _, tokens, usage in told)
    assert told[-1] == (0, 0, 0, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"int8": True}, marks=pytest.mark.slow),
        {"int8": True, "int8_cache": True},
        {"int8": True, "group_size": 32},
    ],
    ids=str,
)
def test_prefix_cache_hits_are_bit_identical(
    tmp_path: Path, byte_tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    """Also with quantized activations, keys and values: turns of a conversation, and prompts of
    many lengths."""
    write_unproven(make_model(PRUNED, **options), byte_tokenizer, tmp_path)
    params = replace(GREEDY, logprobs=True, top_logprobs=5, max_tokens=4)
    letters = "".join(chr(97 + i * i % 23) for i in range(60))
    answers, cached = [], []
    for prefix_bytes in (0, 2**20):
        generator = TextGenerator(tmp_path, 12, 1, 2, 8, prefix_bytes)
        callers = []
        for length in range(10, 60):
            callers.append(Caller(generator, letters[:length], params))
            callers[-1].wait()
        answers.append([[(c.tokens, c.top) for c in caller.chunks] for caller in callers])
        cached.append([caller.chunks[-1].cached_tokens for caller in callers])
        generator.close()
    assert answers[0] == answers[1]
    assert not any(cached[0]) and cached[1] == [(n - 2) // BLOCK * BLOCK for n in range(10, 60)]


@pytest.mark.parametrize("failing", ["mix", "step"])
def test_a_failing_step_fails_those_in_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """A failing prefill does not affect decoding requests, nor a failing decode waiting ones."""
    generator = TextGenerator(folder, 12, threads=1, max_running=2, max_queue=9)
    long = Params(max_tokens=60, min_tokens=60, decode_strategy="greedy_search")
    short = replace(long, max_tokens=5, min_tokens=5)
    expected = [Caller(generator, "a", long).wait(), Caller(generator, "c", short).wait()]
    model, is_failing = generator.model, threading.Event()
    for name in ("mix", "step"):
        real = getattr(model, name)

        def sometimes(*given: Any, real: Any = real, name: str = name) -> Any:
            if is_failing.is_set() and name == failing:
                is_failing.clear()
                raise MemoryError(name)
            time.sleep(0.002)
            return real(*given)

        monkeypatch.setattr(model, name, sometimes)
    running = Caller(generator, "a", long)
    while not running.chunks:
        time.sleep(0.001)
    is_failing.set()
    if failing == "mix":
        with pytest.raises(MemoryError, match="mix"):
            Caller(generator, "b", short).wait()
        assert running.wait() == expected[0]
    else:
        with pytest.raises(MemoryError, match="step"):
            running.wait()
    assert Caller(generator, "c", short).wait() == expected[1]
    generator.close()


def test_a_disconnect_frees_a_row_and_the_queue_is_bounded(folder: Path) -> None:
    generator = TextGenerator(folder, 12, threads=1, max_running=1, max_queue=1)
    long = Params(max_tokens=60, min_tokens=60)
    running = Caller(generator, "a", long)
    while not running.chunks:
        time.sleep(0.001)
    waiting = Caller(generator, "b", Params(max_tokens=1))
    refused = Caller(generator, "c", long)
    assert (running.taken, waiting.taken, refused.taken) == (True, True, False)
    running.gone.set()
    assert len(waiting.wait()[0]) == 1
    running.wait()
    assert running.chunks[-1].finish_reason == "cancelled" and len(running.chunks) < 60
    last = Caller(generator, "d", long)
    generator.close()
    last.wait()
    assert last.chunks[-1].finish_reason == "cancelled"
    assert not Caller(generator, "e", long).taken


def test_time_that_is_over_ends_a_request_with_what_it_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = TextGenerator(folder, 12, threads=1, max_running=3, max_queue=2)
    step = generator.model.step
    monkeypatch.setattr(generator.model, "step", lambda *given: time.sleep(0.01) or step(*given))
    long = Params(max_tokens=60, min_tokens=60, timeout_seconds=0.2)
    try:
        beams = replace(long, decode_strategy="beam_search", num_beams=3)
        for params in (replace(long, seed=1), beams):
            whole = Caller(generator, "a", replace(params, timeout_seconds=None)).wait()[0]
            late = Caller(generator, "a", params)
            (tokens,) = late.wait()
            assert late.chunks[-1].finish_reason == "timeout"
            assert 0 < len(tokens) < len(whole)
            assert params is beams or tokens == whole[: len(tokens)]
        running = Caller(generator, "a", replace(beams, timeout_seconds=None))
        waiting = Caller(generator, "b", replace(long, timeout_seconds=0.05))
        with raises(Code.TIMEOUT, "timeout_seconds 0.05"):
            waiting.wait()
        assert not any(chunk.finish_reason for chunk in running.chunks)
        running.wait()
    finally:
        generator.close()


def test_a_failure_is_the_requests_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = TextGenerator(folder, 12, threads=1, max_running=3, max_queue=3)
    params = Params(max_tokens=30, min_tokens=30, decode_strategy="greedy_search")
    expected = Caller(generator, "fine", params).wait()
    choose = group_module.next_token

    def fails(*arguments: Any) -> int:
        if arguments[3].seed == 13:
            raise ValueError("of one request")
        return choose(*arguments)

    def deaf(_: Chunk | Exception) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(group_module, "next_token", fails)
    neighbour = Caller(generator, "fine", params)
    generator.submit("deaf", params, Receiver(deaf, lambda: False))
    with pytest.raises(ValueError, match="of one request"):
        Caller(generator, "bad", Params(seed=13)).wait()
    cold = Caller(generator, "a", Params(max_tokens=5, temperature=1e-320, top_k=0, min_tokens=0))
    greedy = Caller(generator, "a", Params(**{**GREEDY.__dict__, "max_tokens": 5}))
    assert cold.wait() == greedy.wait()
    assert neighbour.wait() == expected
    # rejected before anything is allocated
    with raises(Code.INVALID_VALUE, "num_return_sequences", 2**62):
        Caller(generator, "many", Params(num_return_sequences=2**62))
    with raises(Code.INVALID_VALUE, "num_beams 4", "3"):
        Caller(generator, "x", Params(decode_strategy="beam_search"))
    generator.close()
