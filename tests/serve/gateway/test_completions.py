"""OpenAI's client, unmodified, against the gateway in front of a real Triton server."""

import asyncio
import json
import time
from typing import Any

import numpy as np
import openai as sdk
import pytest
import requests
import torch
from openai import AsyncOpenAI, OpenAI

from lathe.model.checkpoint import Checkpoint
from lathe.release.deploy import greedy_tokens
from lathe_serving.client import Client
from lathe_serving.server import TritonServer
from tests.support.gateways import opened
from tests.support.server_metrics import expect_cancelled

HELLO: dict[str, Any] = {"model": "gpt", "prompt": "hello", "temperature": 0}


def decoded(checkpoint: Checkpoint, tokens: list[int]) -> str:
    text: str = checkpoint.tokenizer.decode(tokens)
    return text


def test_the_models_are_those_of_the_repository(openai: OpenAI) -> None:
    assert [(model.id, model.object) for model in openai.models.list()] == [("gpt", "model")]
    assert abs(openai.models.retrieve("gpt").created - time.time()) < 3600


@pytest.mark.parametrize("prompt", ["hello", "naïve 🙂 café", "0123456789" * 9])
def test_greedy_is_the_checkpoints_own(openai: OpenAI, checkpoint: Checkpoint, prompt: str) -> None:
    expected = greedy_tokens(checkpoint, prompt, 24)
    ids = checkpoint.tokenizer.encode(prompt).ids
    whole = openai.completions.create(model="gpt", prompt=prompt, temperature=0, max_tokens=24)
    (choice,) = whole.choices
    assert decoded(checkpoint, expected).startswith(choice.text)
    assert choice.finish_reason == ("length" if len(expected) == 24 else "stop")
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(ids)
    assert whole.usage.completion_tokens == len(expected)
    assert whole.usage.total_tokens == len(ids) + len(expected)
    of_ids = openai.completions.create(model="gpt", prompt=ids, temperature=0, max_tokens=24)
    assert of_ids.choices == whole.choices


def test_omitted_parameters_are_those_that_the_models_authors_recommend(
    server: TritonServer, openai: OpenAI
) -> None:
    def texts(client: OpenAI, **given: Any) -> str:
        ask = client.completions.create
        return ask(model="gpt", prompt="hello", max_tokens=16, seed=1, **given).choices[0].text

    greedy, sampled = texts(openai, temperature=0), texts(openai)
    penalized = texts(openai, temperature=0, extra_body={"repetition_penalty": 5.0})
    assert len({greedy, sampled, penalized}) == 3
    recommended = {"temperature": 0.0, "repetition_penalty": 5.0}
    with opened(server, recommended=recommended) as address:
        own = OpenAI(base_url=f"{address}/v1", api_key="none")
        plain = {"repetition_penalty": 1.0}
        assert texts(own) == texts(own, temperature=0) == penalized
        assert texts(own, extra_body=plain) == greedy
        assert texts(own, temperature=1, extra_body=plain) == sampled
        assert own.models.retrieve("gpt").model_extra["generation_config"] == recommended


def test_a_stream_is_the_whole_in_pieces(openai: OpenAI) -> None:
    whole = openai.completions.create(**HELLO, max_tokens=24)
    options = {"include_usage": True}
    pieces = list(
        openai.completions.create(**HELLO, max_tokens=24, stream=True, stream_options=options)  # type: ignore[call-overload]
    )
    assert "".join(p.choices[0].text for p in pieces[:-1]) == whole.choices[0].text
    assert [p.choices[0].finish_reason for p in pieces[-3:-1]] == [
        None,
        whole.choices[0].finish_reason,
    ]
    assert pieces[-1].choices == [] and pieces[-1].usage is not None and whole.usage is not None
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
    assert {p.usage for p in pieces[:-1]} == {None}
    assert len({p.id for p in pieces}) == 1 and len(pieces) > 3


def test_the_bytes_of_a_stream_are_server_sent_events(address: str) -> None:
    reply = requests.post(f"{address}/v1/completions", json=HELLO | {"stream": True}, timeout=30)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.content.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        piece = json.loads(event.removeprefix(b"data: "))
        assert piece["object"] == "text_completion" and "usage" not in piece


def test_several_prompts_and_choices(openai: OpenAI) -> None:
    prompts = ["one", "two", "three", "four", "five", "six"]  # more than can run at once
    single = [
        openai.completions.create(model="gpt", prompt=p, temperature=0, max_tokens=9).choices[0]
        for p in prompts
    ]
    many = openai.completions.create(
        model="gpt", prompt=prompts, n=2, temperature=0, max_tokens=9
    ).choices
    assert [choice.index for choice in many] == list(range(12))
    assert [choice.text for choice in many] == [c.text for c in single for _ in range(2)]
    texts = dict.fromkeys(range(12), "")
    for piece in openai.completions.create(
        model="gpt", prompt=prompts, n=2, temperature=0, max_tokens=9, stream=True
    ):
        texts[piece.choices[0].index] += piece.choices[0].text
    assert list(texts.values()) == [choice.text for choice in many]


def test_sampling_follows_its_seed(openai: OpenAI) -> None:
    drawn = [
        openai.completions.create(model="gpt", prompt="hello", seed=seed, n=2).choices
        for seed in (1, 1, 2, -1)
    ]
    texts = [[choice.text for choice in choices] for choices in drawn]
    assert texts[0] == texts[1] != texts[2] != texts[3]
    assert texts[0][0] != texts[0][1]


def test_an_echo_has_the_checkpoints_log_probabilities(
    openai: OpenAI, checkpoint: Checkpoint
) -> None:
    prompt = "All that glitters is not gold 🙂."
    choice = openai.completions.create(
        model="gpt", prompt=prompt, echo=True, logprobs=5, max_tokens=3, temperature=0
    ).choices[0]
    ids = checkpoint.tokenizer.encode(prompt).ids
    ids += greedy_tokens(checkpoint, prompt, 3)
    with torch.no_grad():
        scores = checkpoint.model(torch.tensor([ids]))[0, :-1].log_softmax(-1).numpy()
    found = choice.logprobs
    assert found is not None and found.token_logprobs and found.top_logprobs and found.text_offset
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    own = scores[np.arange(len(scores)), ids[1:]]
    np.testing.assert_allclose(found.token_logprobs[1:], own, atol=1e-4)  # type: ignore[arg-type]
    for top, row in zip(found.top_logprobs[1:], scores, strict=True):
        np.testing.assert_allclose(sorted(top.values())[-5:], np.sort(row)[-5:], atol=1e-4)
    assert choice.text.startswith(prompt) and found.tokens
    starts = list(zip(found.tokens, found.text_offset, strict=True))[: len(prompt.encode())]
    assert [at for _, at in starts] == [*range(30), 30, 30, 30, 30, 31]
    assert all(choice.text[at:].startswith(t) for t, at in starts if not t.startswith("bytes:"))


@pytest.mark.parametrize("stop", ["<|endoftext|>", "<|endoftext|>x"])
def test_a_stop_string_may_be_a_special_token(openai: OpenAI, stop: str) -> None:
    reply = openai.completions.create(
        model="gpt",
        prompt="a",
        stop=[stop],
        max_tokens=3,
        temperature=0,
        logit_bias={"256": 100},
        extra_body={"ignore_eos": True},
    )
    assert reply.choices[0].finish_reason == ("stop" if stop == "<|endoftext|>" else "length")


def test_text_offsets_count_what_the_text_has(openai: OpenAI, checkpoint: Checkpoint) -> None:
    """An echoed special token is text; ids outside the tokenizer, like generated special tokens,
    are not."""
    choice = openai.completions.create(
        model="gpt",
        prompt=checkpoint.tokenizer.encode("a<|endoftext|>b").ids,
        echo=True,
        logprobs=0,
        max_tokens=4,
        temperature=0,
        logit_bias={"300": 100},
    ).choices[0]
    found = choice.logprobs
    assert found is not None and found.tokens is not None
    assert found.tokens[:4] == ["a", "<|endoftext|>", "b", "token_id:300"]
    assert choice.text == "a<|endoftext|>b"
    assert found.text_offset == [0, 1, 14, *[15] * 4]


def test_a_prompt_is_scored_and_not_continued(openai: OpenAI) -> None:
    """The request that lm-eval sends."""
    ids = [[1, 2, 3, 4], [5, 6, 7]]
    both = openai.completions.create(
        model="gpt", prompt=ids, echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    assert [len(c.logprobs.tokens) for c in both.choices] == [4, 3]  # type: ignore[union-attr, arg-type]
    assert both.usage is not None and both.usage.completion_tokens == 0
    assert both.usage.prompt_tokens == 7


def test_the_best_of_several_is_the_likeliest(openai: OpenAI) -> None:
    options: dict[str, Any] = {"model": "gpt", "prompt": "hello", "seed": 4, "logprobs": 0}
    drawn = openai.completions.create(**options, n=4).choices
    best = openai.completions.create(**options, n=1, best_of=4)

    def mean(choice: Any) -> float:
        return float(np.mean(choice.logprobs.token_logprobs))

    assert best.choices[0].text == max(drawn, key=mean).text
    assert best.usage is not None and best.usage.completion_tokens == sum(
        len(choice.logprobs.tokens)  # type: ignore[union-attr, arg-type]
        for choice in drawn
    )


def test_stop_strings_end_the_text(openai: OpenAI) -> None:
    text = openai.completions.create(**HELLO, max_tokens=24).choices[0].text
    stop = next(letter for letter in text[3:] if letter.isascii())
    for stops in (stop, [stop, "never"]):
        choice = openai.completions.create(**HELLO, max_tokens=24, stop=stops).choices[0]
        assert (choice.text, choice.finish_reason) == (text.split(stop)[0], "stop")


def test_penalties_and_the_parameters_of_others(openai: OpenAI) -> None:
    plain = openai.completions.create(**HELLO, max_tokens=60).choices[0].text
    penalized = openai.completions.create(**HELLO, max_tokens=60, frequency_penalty=2.0)
    assert len(set(penalized.choices[0].text)) > len(set(plain))
    extra = {"ignore_eos": True, "top_k": 1, "user": "ignored", "unknown_field": 1}
    long = openai.completions.create(model="gpt", prompt="hello", max_tokens=60, extra_body=extra)
    assert long.usage is not None and long.usage.completion_tokens == 60


@pytest.mark.parametrize(
    ("changes", "status", "param", "message"),
    [
        ({"model": "nope"}, 404, "model", "'nope' does not exist; available: gpt"),
        ({"suffix": "x"}, 400, "suffix", "not supported"),
        ({"logit_bias": {"1": 101}}, 400, "logit_bias.1", "less than or equal to 100"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias.a.[key]", "should match"),
        ({"logit_bias": {"400": 1}}, 400, "logit_bias", "400 is outside the"),
        ({"stop_token_ids": [400]}, 400, "stop_token_ids", "400 is outside the"),
        ({"stop_token_ids": ["a"]}, 400, "stop_token_ids[0]", "valid integer"),
        ({"min_p": 2}, 400, "min_p", "less than or equal to 1"),
        ({"temperature": 3}, 400, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, 400, "temperature", "valid number.*'hot'"),
        ({"n": 0}, 400, "n", "greater than or equal to 1"),
        (
            {"n": 5},
            400,
            "n",
            "5 exceeds the number of sequences that gpt generates concurrently, 4",
        ),
        ({"best_of": 2, "n": 3}, 400, None, "best_of 2 is less than n 3"),
        ({"best_of": 2, "stream": True}, 400, None, "cannot be streamed"),
        ({"prompt": ""}, 400, "prompt", "must be a string"),
        ({"prompt": []}, 400, "prompt", "must be a string"),
        ({"prompt": [1, "a"]}, 400, "prompt", "must be a string"),
        ({"prompt": [400]}, 400, "prompt", "prompt: 400 is outside the vocabulary: give ids"),
        ({"prompt": [-1]}, 400, "prompt", "must be a string"),
        ({"prompt": [2**70]}, 400, "prompt", "must be a string"),
        ({"prompt": None}, 400, "prompt", "Field required"),
        ({"prompt": ["x"] * 300}, 400, "prompt", "300 prompts exceed the limit of 256"),
        ({"prompt": "x" * 1020}, 400, None, "1020 tokens and max_tokens 16 exceed"),
        ({"prompt": "x" * 1020, "stream": True}, 400, None, "1020 tokens and max_tokens 16"),
        ({"stop": ["a"] * 17}, 400, "stop", "at most 16"),
        ({"max_tokens": -1}, 400, "max_tokens", "greater than or equal to 0"),
    ],
)
def test_a_mistake_is_named(
    openai: OpenAI, changes: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    with pytest.raises(sdk.APIStatusError, match=message) as raised:
        openai.post("/completions", cast_to=object, body=HELLO | changes)
    assert (raised.value.status_code, raised.value.param) == (status, param)
    assert raised.value.type == "invalid_request_error"
    if "exceed the model" in raised.value.message:
        assert raised.value.code == "context_length_exceeded"


def test_a_token_is_as_likely_as_its_bias_says(openai: OpenAI) -> None:
    (banned,) = openai.completions.create(
        **HELLO, max_tokens=1, extra_body={"return_token_ids": True}
    ).choices
    (first,) = banned.model_extra["token_ids"]  # type: ignore[index]
    for bias, is_first in ((-100, False), (100, True)):
        drawn = openai.completions.create(
            model="gpt", prompt="hello", n=4, seed=1, max_tokens=9, logit_bias={str(first): bias},
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        tokens = {t for choice in drawn.choices for t in choice.model_extra["token_ids"]}  # type: ignore[index]
        assert tokens == {first} if is_first else first not in tokens


@pytest.mark.parametrize("path", ["embeddings", "responses/resp_1", "images/generations"])
def test_the_paths_that_are_there_are_named(address: str, path: str) -> None:
    reply = requests.post(f"{address}/v1/{path}", json={}, timeout=30)
    error = reply.json()["error"]
    assert reply.status_code == 404 and error["type"] == "invalid_request_error"
    assert f"/v1/{path} does not exist" in error["message"]
    assert "/v1/chat/completions" in error["message"]


def test_embeddings_and_stored_responses_are_said_to_be_missing(openai: OpenAI) -> None:
    with pytest.raises(sdk.NotFoundError, match="/v1/embeddings does not exist"):
        openai.embeddings.create(model="gpt", input="x")
    with pytest.raises(sdk.NotFoundError, match="/v1/responses/resp_1 does not exist"):
        openai.responses.retrieve("resp_1")


ASKED = 16  # four times the slots, so that some still wait when a slow client disconnects


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows(
    server: TritonServer, address: str, client: Client, stream: bool
) -> None:
    async def leave() -> None:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="x") as asynchronous:
            extra = {"ignore_eos": True}
            asked = [
                asyncio.create_task(
                    asynchronous.completions.create(
                        model="gpt", prompt="x", max_tokens=1000, stream=stream, extra_body=extra
                    )
                )
                for _ in range(ASKED)
            ]
            await asyncio.sleep(0.05)  # the model generates 4,000 tokens in 0.22 s
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    with expect_cancelled(server, ASKED * 1000):
        asyncio.run(leave())
        client.generate("b", max_tokens=1)


def test_the_asynchronous_client_streams(address: str, openai: OpenAI) -> None:
    prompts = [f"task {i}" for i in range(8)]

    async def ask(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model="gpt", prompt=prompt, temperature=0, stream=True
        )
        return "".join([piece.choices[0].text async for piece in stream])

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="x") as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    whole = openai.completions.create(model="gpt", prompt=prompts, temperature=0)
    assert asyncio.run(ask_all()) == [choice.text for choice in whole.choices]


def test_a_model_answers_to_its_other_names(server: TritonServer) -> None:
    names = ("gpt", "gpt-4o-mini", "team/chat")
    with opened(server, aliases=names[1:]) as address:
        openai = OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=30)
        listed = {model.id: model.model_extra for model in openai.models.list()}
        assert tuple(listed) == names
        texts = set()
        for name in names:
            extra = listed[name]
            assert extra is not None and (extra["root"], extra["max_model_len"]) == ("gpt", 1024)
            assert openai.models.retrieve(name).id == name
            answer = openai.completions.create(**HELLO | {"model": name}, max_tokens=5)
            texts.add(answer.choices[0].text)
        assert len(texts) == 1
        with pytest.raises(sdk.NotFoundError, match="available: gpt, gpt-4o-mini, team/chat"):
            openai.completions.create(**HELLO | {"model": "team"})
