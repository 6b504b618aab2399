"""LangChain's client against the gateway; not a dependency: `pip install langchain-openai`."""

from pathlib import Path

import pytest

from tests.serve.gateway.test_chat import TEMPLATE
from tests.support.gateways import opened, with_chat_template

langchain = pytest.importorskip("langchain_openai")


def test_langchain_chats_completes_and_streams(server, tmp_path: Path) -> None:
    with opened(server, **with_chat_template(server, TEMPLATE, tmp_path)) as address:
        options = {
            "base_url": f"{address}/v1", "api_key": "x", "model": "gpt", "temperature": 0,
            "max_retries": 0,
        }  # fmt: skip
        chat = langchain.ChatOpenAI(**options)
        messages = [("system", "Be short."), ("human", "Hello")]
        whole = chat.invoke(messages, max_tokens=20)
        assert whole.usage_metadata["output_tokens"] == 20 or (
            whole.response_metadata["finish_reason"] == "stop"
        )
        pieces = list(chat.stream(messages, max_tokens=20))
        assert len(pieces) > 1 and "".join(piece.content for piece in pieces) == whole.content
        text = langchain.OpenAI(**options, max_tokens=20).invoke(
            "system: Be short.\nuser: Hello\nassistant:"
        )
        assert text == whole.content
        schema = {
            "title": "person", "type": "object", "additionalProperties": False,
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
            "required": ["age"],
        }  # fmt: skip
        found = chat.with_structured_output(schema, method="json_schema").invoke(messages)
        assert 0 <= found["age"] <= 150
