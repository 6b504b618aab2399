"""Backend features for the gateway: echoed prompts, their log-probabilities, token ids as prompts,
and cancellation by a message."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from tokenizers import Tokenizer
from tritonclient.grpc import model_config_pb2

from lathe.model.checkpoint import Checkpoint
from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_base.errors import Code, UserError
from lathe_serving.client import Client
from lathe_serving.gateway.errors import TritonUnavailable
from lathe_serving.gateway.triton import CrashQuarantine, Triton
from lathe_serving.repository import write_repository
from lathe_serving.runtime.protocol import Chunk
from lathe_serving.runtime.text import TokenBytes
from lathe_serving.server import TritonServer, start
from tests.support.errors import raises
from tests.support.server_metrics import expect_cancelled

GREEDY = {"decode_strategy": "greedy_search", "min_tokens": 0}
SCORED = {"echo": True, "logprobs": True}
LONG = {"max_tokens": 1000, "min_tokens": 1000, "stream": True}


def ask(server: TritonServer, prompt: str | Sequence[int], **parameters: Any) -> list[Chunk]:
    async def collect() -> list[Chunk]:
        triton = Triton(server.state.grpc, CrashQuarantine())
        try:
            return [chunk async for chunk in triton.generate("gpt", prompt, parameters)]
        finally:
            await triton.close()

    return asyncio.run(collect())


def log_probabilities(checkpoint: Checkpoint, tokens: Sequence[int]) -> np.ndarray:
    """Log-probabilities (n - 1, V) after each token but the last."""
    with torch.no_grad():
        logits = checkpoint.model(torch.tensor([tokens]))[0, :-1]
    return logits.log_softmax(-1).numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [2, 128, 129, 500])
def test_an_echoed_prompt_has_the_checkpoints_log_probabilities(
    server: TritonServer, checkpoint: Checkpoint, length: int
) -> None:
    """Prompts shorter and longer than a prefill chunk."""
    prompt = np.random.default_rng(length).integers(0, 256, length).tolist()
    (chunk,) = ask(server, prompt, max_tokens=4, top_logprobs=3, **SCORED, **GREEDY)
    assert chunk.tokens[:length] == prompt and chunk.prompt_tokens == length
    scores = log_probabilities(checkpoint, chunk.tokens)
    own = scores[np.arange(len(scores)), chunk.tokens[1:]]
    assert np.isnan(chunk.log_probabilities[0]) and chunk.top[0] == {}
    np.testing.assert_allclose(chunk.log_probabilities[1:], own, atol=1e-4)
    best = np.sort(scores, 1)[:, :-4:-1]
    for top, row, value in zip(chunk.top[1:], best, chunk.log_probabilities[1:], strict=True):
        np.testing.assert_allclose(list(top.values())[:3], row, atol=1e-4)
        assert value in top.values()


def test_a_prompt_may_be_read_and_not_continued(server: TritonServer) -> None:
    (chunk,) = ask(server, "hello", max_tokens=0, min_tokens=0, **SCORED)
    assert (chunk.text, chunk.finish_reason, chunk.names) == ("hello", "length", list("hello"))
    full = [65] * 1024
    (chunk,) = ask(server, full, max_tokens=0, min_tokens=0, **SCORED)
    assert len(chunk.log_probabilities) == chunk.prompt_tokens == 1024
    (chunk,) = ask(server, "hello", max_tokens=0, min_tokens=0)
    assert (chunk.text, chunk.tokens, chunk.prompt_tokens) == ("", [], 5)
    with raises(Code.TOO_LONG, "1024 tokens"):
        ask(server, full, max_tokens=1)


def test_ids_and_text_are_the_same_prompt(server: TritonServer, checkpoint: Checkpoint) -> None:
    ids = checkpoint.tokenizer.encode("naïve 🙂").ids
    (of_ids,) = ask(server, ids, max_tokens=9, echo=True, **GREEDY)
    (of_text,) = ask(server, "naïve 🙂", max_tokens=9, echo=True, **GREEDY)
    assert of_ids == of_text and of_text.text.startswith("naïve 🙂")
    pieces = ask(server, ids, max_tokens=9, echo=True, stream=True, **GREEDY)
    assert pieces[0].text == "naïve 🙂" and len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == of_text.text
    for wrong in ([], [384], [-1]):
        with raises(Code.INVALID_VALUE, "input_ids"):
            ask(server, wrong)


def test_penalties_lower_what_has_been_generated(server: TritonServer) -> None:
    def distinct(**penalties: float) -> int:
        (chunk,) = ask(server, "a", max_tokens=60, **GREEDY, **penalties)
        return len(set(chunk.tokens))

    free = distinct()
    assert free < distinct(presence_penalty=2.0) <= distinct(frequency_penalty=2.0)
    assert distinct(presence_penalty=-2.0) <= free


def test_a_token_has_a_name(byte_tokenizer: Tokenizer) -> None:
    token_bytes = TokenBytes(byte_tokenizer)
    ids = byte_tokenizer.encode("a é<|endoftext|>").ids
    named = [token_bytes.name(i) for i in [*ids, 300]]
    assert named == ["a", " ", "bytes:\\xc3", "bytes:\\xa9", "<|endoftext|>", "token_id:300"]
    assert token_bytes.echo(ids) == ["a", " ", "", "é", "<|endoftext|>"]


async def cancel_all_and_ask(server: TritonServer) -> None:
    """Check that cancelling all running requests frees their slots and breaks no stream."""
    triton = Triton(server.state.grpc, CrashQuarantine())
    opened = [triton.generate("gpt", "x", LONG) for _ in range(4)]
    for request in opened:
        await anext(request)
    streams = dict(triton._streams)
    for request in opened:
        await request.aclose()
    found = [chunk async for chunk in triton.generate("gpt", "b", {"max_tokens": 2})]
    assert found[-1].finish_reason and triton._streams == streams
    await triton.close()


def test_a_message_cancels_and_the_stream_continues(server: TritonServer) -> None:
    with expect_cancelled(server, 4 * 1000):
        asyncio.run(cancel_all_and_ask(server))


def test_a_request_that_is_cancelled_as_it_is_sent_does_not_run(server: TritonServer) -> None:
    async def cancel_and_ask() -> None:
        triton = Triton(server.state.grpc, CrashQuarantine())
        for i in range(60):
            asked = asyncio.create_task(anext(triton.generate("gpt", "x", LONG)))
            await asyncio.sleep(0.0005 * (i % 3))
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        found = list[Chunk]()
        async with asyncio.timeout(30):
            while not found:
                try:
                    found = [x async for x in triton.generate("gpt", "b", {"max_tokens": 2})]
                except UserError:  # busy: the last ones have not left the queue yet
                    await asyncio.sleep(0.02)
        assert found[-1].finish_reason
        await triton.close()

    with expect_cancelled(server, 10 * 1000):
        asyncio.run(cancel_and_ask())


def test_neighbours_on_a_stream_do_not_mix(server: TritonServer, client: Client) -> None:
    async def ask_all(prompts: list[str]) -> list[list[int]]:
        triton = Triton(server.state.grpc, CrashQuarantine())

        async def one(prompt: str) -> list[int]:
            options = {"max_tokens": 20, "stream": True, **GREEDY}
            found = triton.generate("gpt", prompt, options)
            return [token async for chunk in found for token in chunk.tokens]

        answers = await asyncio.gather(*map(one, prompts))
        await triton.close()
        return answers

    prompts = [f"{i} {'ab' * i}" for i in range(11)]
    expected = [client.generate(prompt, max_tokens=20, **GREEDY).tokens for prompt in prompts]
    assert asyncio.run(ask_all(prompts)) == expected
    assert any(a != b for a, b in pairwise(expected))


@pytest.mark.slow
def test_a_repository_of_an_earlier_version_is_served(
    tmp_path: Path, triton: None, exported: Path, serving: ServingSettings
) -> None:
    """Earlier versions require a text, and have no token ids and fewer outputs."""
    repository = write_repository(exported, tmp_path / "r", serving, GenerationSettings())
    path = repository / "gpt" / "config.pbtxt"
    config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    config.input[0].optional = False
    del config.input[1], config.output[6:]
    path.write_text(text_format.MessageToString(config))
    with start(repository, serving, tmp_path / "state") as server:
        (chunk,) = ask(server, "hello", max_tokens=3, logprobs=True, top_logprobs=1, **GREEDY)
        assert len(chunk.log_probabilities) == 3 and chunk.top == []
        with raises(Code.WRONG_VERSION, "input_ids"):
            ask(server, [1, 2])
        asyncio.run(cancel_all_and_ask(server))


@pytest.mark.slow
def test_a_stopped_server_is_reported_and_the_next_one_discovered(
    tmp_path: Path, triton: None, exported: Path, serving: ServingSettings
) -> None:
    repository = write_repository(exported, tmp_path / "r", serving, GenerationSettings())

    async def outlive() -> list[Chunk]:
        with start(repository, serving, tmp_path / "state") as first:
            client = Triton(first.state.grpc, CrashQuarantine())
            request = client.generate("gpt", "x", LONG)
            await anext(request)
            first.stop()
            with pytest.raises(TritonUnavailable):
                while True:
                    await anext(request)
            with pytest.raises(TritonUnavailable):
                await anext(client.generate("gpt", "x", LONG))
        port = {"grpc_port": first.state.grpc_port}
        with start(repository, serving.model_copy(update=port), tmp_path / "state"):
            while not await client.is_ready("gpt"):
                await asyncio.sleep(0.1)
            found = [chunk async for chunk in client.generate("gpt", "x", {"max_tokens": 2})]
        await client.close()
        return found

    assert asyncio.run(outlive())[-1].finish_reason
