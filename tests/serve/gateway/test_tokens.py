"""The endpoints /tokenize and /detokenize, compatible with vLLM's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
import requests
from openai import OpenAI
from tokenizers import Tokenizer

from lathe_serving.server import TritonServer
from tests.support.gateways import opened, with_chat_template

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant:{% endif %}"
TEXT = "naïve 🙂 <|endoftext|>"


@pytest.fixture(scope="module")
def chat(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with opened(
        server, **with_chat_template(server, TEMPLATE, tmp_path_factory.mktemp("chat"))
    ) as address:
        yield OpenAI(base_url=f"{address}/", api_key="x", max_retries=0, timeout=30)


@pytest.fixture
def tokenizer(repository: Path) -> Tokenizer:
    return Tokenizer.from_file(str(repository / "gpt/1/tokenizer.json"))


def post(client: OpenAI, path: str, **body: Any) -> Any:
    return client.post(path, cast_to=object, body={"model": "gpt", **body})


def test_a_text_becomes_tokens_and_they_the_text(chat: OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).ids
    found = post(chat, "/tokenize", prompt=TEXT, return_token_strs=True)
    assert found == {
        "count": len(ids),
        "max_model_len": 1024,
        "tokens": ids,
        "token_strs": [tokenizer.id_to_token(i) for i in ids],
    }
    assert post(chat, "/detokenize", tokens=ids) == {"prompt": TEXT}
    assert post(chat, "/tokenize", prompt="")["tokens"] == []


def test_messages_become_the_tokens_of_their_prompt(chat: OpenAI, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    found = post(chat, "/tokenize", messages=messages)
    assert found["tokens"] == tokenizer.encode("user: Hello\nassistant:").ids
    assert found["token_strs"] is None
    plain = post(chat, "/tokenize", messages=messages, add_generation_prompt=False)
    assert plain["tokens"] == tokenizer.encode("user: Hello\n").ids
    answer = chat.post(
        "/v1/chat/completions",
        cast_to=object,
        body={"model": "gpt", "messages": messages, "max_tokens": 1},
    )
    assert answer["usage"]["prompt_tokens"] == found["count"]  # type: ignore[index]


def test_a_partial_character_is_reported(chat: OpenAI) -> None:
    body = {"model": "gpt", "prompt": "a\ud800"}
    reply = requests.post(f"{chat.base_url}tokenize", json=body, timeout=30)
    error = reply.json()["error"]
    assert reply.status_code == 400 and "incomplete UTF-8 character" in error["message"]
    assert error["param"] == "prompt"
    assert post(chat, "/tokenize", prompt="a")["count"] == 1


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "Field required"),
        ("/tokenize", {"prompt": 5}, "prompt", "valid string"),
        ("/tokenize", {"messages": []}, "messages", "at least 1"),
        (
            "/tokenize",
            {"messages": [{"role": "user"}], "add_special_tokens": True},
            "add_special_tokens",
            "not supported with messages",
        ),
        ("/detokenize", {"tokens": [400]}, "tokens", "400 is outside the"),
        ("/detokenize", {"tokens": [2**40]}, "tokens", "is outside the"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
        ("/detokenize", {"tokens": "a"}, "tokens", "valid list"),
        ("/detokenize", {"tokens": [65] * 1025}, "tokens", "the model's 1024 positions"),
        ("/detokenize", {"tokens": [65] * 20_000}, None, " bytes have more tokens than"),
        ("/tokenize", {"prompt": "x" * 1025}, "prompt", "the model's 1024 positions"),
        ("/tokenize", {"prompt": "x" * 10**6}, "prompt", "the model's 1024 positions"),
    ],
)
def test_a_mistake_is_named(
    chat: OpenAI, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(sdk.BadRequestError, match=message) as raised:
        post(chat, path, **body)
    assert raised.value.param == param
