"""Clients get the same results from both APIs: OpenAI's (the gateway) and Triton's own."""

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lathe_base.errors import Code, StageError, UserError
from lathe_serving.client import Client
from lathe_serving.client.grpc_transport import refusal
from lathe_serving.runtime.protocol import error_message
from lathe_serving.server import TritonServer
from tests.documents.pages import TEXTS, blocks
from tests.support.errors import raises
from tests.support.gateways import opened
from tests.support.server_metrics import expect_cancelled

GREEDY = {"decode_strategy": "greedy_search", "max_tokens": 20}
PROMPTS = ("hello", "naïve \U0001f642 café", "line\u2028separator\x85", "0123456789" * 9)


@pytest.fixture
def openai(base_url: str) -> Iterator[Client]:
    with Client(base_url, "gpt", timeout_seconds=30) as client:
        yield client


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_whole_answer_is_the_same(client: Client, openai: Client, prompt: str) -> None:
    options = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    triton, ours = client.generate(prompt, **options), openai.generate(prompt, **options)
    assert (ours.text, ours.tokens, ours.finish_reason, ours.names, ours.prompt_tokens) == (
        triton.text,
        triton.tokens,
        triton.finish_reason,
        triton.names,
        triton.prompt_tokens,
    )
    np.testing.assert_allclose(ours.log_probabilities, triton.log_probabilities, rtol=1e-3)
    assert [top.keys() for top in ours.top] == [top.keys() for top in triton.top]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_is_the_whole_answer_in_pieces(either: Client, prompt: str) -> None:
    whole = either.generate(prompt, **GREEDY)
    chunks = list(either.stream(prompt, **GREEDY))
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
    assert [chunk.finish_reason for chunk in chunks] == [""] * (len(chunks) - 1) + [
        whole.finish_reason
    ]


def test_sampling_takes_every_parameter(client: Client, openai: Client) -> None:
    options = {
        "max_tokens": 9,
        "min_tokens": 9,
        "temperature": 0.8,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.05,
        "logit_bias": '{"104": 4, "105": -100}',
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_return_sequences": 3,
    }
    triton, ours = client.generate_all("x", **options), openai.generate_all("x", **options)
    assert [c.tokens for c in ours] == [c.tokens for c in triton]
    assert [c.sequence for c in ours] == [0, 1, 2]
    aliases = {**options, "max_dec_len": options["max_tokens"], "max_tokens": None}
    assert [c.tokens for c in openai.generate_all("x", **aliases)] == [c.tokens for c in ours]


def test_a_token_that_is_named_ends_the_text(either: Client) -> None:
    whole = either.generate("hello", **GREEDY)
    last = whole.tokens[-1]
    chunk = either.generate("hello", stop_token_ids=f"[{last}]", **GREEDY)
    assert chunk.tokens == whole.tokens[: whole.tokens.index(last)]
    assert chunk.finish_reason == "stop"
    longer = either.generate("hello", stop_token_ids=f"[{last}]", **GREEDY, min_tokens=20)
    assert len(longer.tokens) == 20 and last not in longer.tokens[:-1]


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_ends_the_text(either: Client, as_list: bool) -> None:
    whole = either.generate("hello", **GREEDY).text
    stop = whole[-1]
    chunk = either.generate("hello", stop=json.dumps([stop]) if as_list else stop, **GREEDY)
    assert chunk.finish_reason == "stop" and chunk.text == whole[: whole.index(stop)]


def test_an_echo_begins_with_the_prompt(either: Client) -> None:
    chunk = either.generate("hello", echo=True, logprobs=True, max_tokens=3, min_tokens=3)
    assert chunk.text.startswith("hello")
    assert len(chunk.tokens) == len(chunk.log_probabilities) == len("hello") + 3
    assert math.isnan(chunk.log_probabilities[0]) and chunk.log_probabilities[1] < 0


@pytest.mark.parametrize(
    ("parameters", "codes", "texts"),
    [
        ({"top_p": 1.5}, 2 * (Code.INVALID_VALUE,), ("top_p 1.5",)),
        ({"temprature": 1.0}, 2 * (Code.UNKNOWN_NAME,), ("temprature",)),
        ({"max_tokens": 2**70}, 2 * (Code.INVALID_VALUE,), (f"max_tokens {2**70}",)),
        ({"max_tokens": 2000}, 2 * (Code.TOO_LONG,), ()),
        ({"num_return_sequences": 99}, (Code.INVALID_VALUE, Code.INVALID_REQUEST), ("99",)),
    ],
)
def test_invalid_parameters_are_reported(
    url: str,
    either: Client,
    parameters: dict[str, int | float],
    codes: tuple[Code, Code],
    texts: tuple[str, ...],
) -> None:
    code = codes[url.startswith("http")]
    with raises(code, *texts):
        either.generate("x", **parameters)
    with raises(code, *texts):
        list(either.stream("x", **parameters))


def test_an_error_of_another_version_has_a_code_of_ours() -> None:
    sent = error_message(UserError("input_ids is empty", "give one", Code.TOO_LONG))
    for message, code in (
        (sent, Code.TOO_LONG),
        (sent.replace("too-long", "too-tall"), Code.INVALID_REQUEST),
        (sent.partition("\n  code: ")[0], Code.INVALID_REQUEST),
    ):
        told = refusal(message)
        assert isinstance(told, UserError) and told.code is code
        assert (told.what, told.hint) == ("input_ids is empty", "give one")
    broken = refusal("CUDA failed")
    assert isinstance(broken, StageError) and broken.code is Code.SERVER_ERROR


def test_a_non_text_prompt_is_reported(either: Client) -> None:
    with raises(Code.MALFORMED, "prompt"):
        either.generate("a\udcff")


def test_another_model_is_reported(url: str) -> None:
    with (
        Client(url, "absent", timeout_seconds=30) as client,
        raises(Code.NOT_FOUND, "absent", "--model-name"),
    ):
        client.generate("x")


def test_a_generation_that_takes_too_long_is_given_up(url: str) -> None:
    with Client(url, "gpt", timeout_seconds=0.05) as client:
        for ask in (client.generate, lambda *a, **k: list(client.stream(*a, **k))):
            with raises(Code.TIMEOUT, "0.05 s"):
                ask("x", max_tokens=1000, min_tokens=1000)


def test_leaving_a_stream_frees_its_slot(server: TritonServer, either: Client) -> None:
    long = {"max_tokens": 1000, "min_tokens": 1000}
    with expect_cancelled(server, 4 * 1000):
        streams = [either.stream(f"{i}", **long) for i in range(4)]  # all slots
        for stream in streams:
            next(stream)
            stream.close()
        either.generate("b", max_tokens=1)


def test_threads_share_a_client(either: Client) -> None:
    expected = [either.generate(f"{i}", **GREEDY).tokens for i in range(6)]
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        found[i] = [token for c in either.stream(f"{i}", **GREEDY) for token in c.tokens]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == expected


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("beam_search", {"decode_strategy": "beam_search"}),
        ("num_beams", {"num_beams": 3}),
        ("length_penalty", {"length_penalty": 0.5}),
        ("timeout_seconds", {"timeout_seconds": 1.0}),
    ],
)
def test_parameters_of_triton_only_are_rejected_by_name(
    openai: Client, name: str, parameters: dict[str, int | float | str]
) -> None:
    with raises(Code.UNSUPPORTED, name):
        openai.generate("x", **parameters)


def test_scores_and_digests_are_tritons_alone(openai: Client) -> None:
    with raises(Code.UNSUPPORTED, "scores"):
        openai.score_text("a", "b")
    with raises(Code.UNSUPPORTED, "SHA-256"):
        openai.served_digest()


def test_the_three_lines_of_the_readme_work(
    base_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = blocks(TEXTS["README.md"], "python")
    assert len([line for line in program.splitlines() if line]) == 3
    exec(program.replace("http://localhost:9000/v1", base_url), {})
    assert capsys.readouterr().out


def test_keys_are_sent_to_the_server_that_wants_them(
    server: TritonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("the-key\n")
    monkeypatch.delenv("LATHE_API_KEY", raising=False)
    with opened(server, keys=tmp_path / "keys") as address:
        with (
            Client(f"{address}/v1", "gpt") as nobody,
            raises(Code.UNAUTHORIZED, "LATHE_API_KEY"),
        ):
            nobody.generate("x")
        with (
            Client(f"{address}/v1/", "gpt", api_key="a-key") as stranger,
            raises(Code.UNAUTHORIZED, "LATHE_API_KEY") as told,
        ):
            stranger.generate("x")
        assert "a-key" not in str(told.value)
        monkeypatch.setenv("LATHE_API_KEY", "the-key")
        with Client(f"{address}/v1", "gpt") as friend:
            assert friend.generate("x", max_tokens=2, min_tokens=2).tokens
    for key in ("ungültig", "two\nlines", "\udcff", " "):
        with raises(Code.INVALID_VALUE, "LATHE_API_KEY") as told:
            Client("http://localhost:9/v1", "gpt", api_key=key)
        assert key.strip() not in str(told.value) or not key.strip()
