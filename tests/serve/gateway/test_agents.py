"""Agents' frameworks against the real server. None is a dependency, and they disagree on versions:
`pip install` one of langchain and langchain-openai, pydantic-ai-slim[openai], instructor, litellm,
or openai-agents, and give the tests of this file."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from lathe_serving.server import TritonServer
from tests.support.gateways import opened, with_chat_template

pytestmark = pytest.mark.slow

TEMPLATE = """\
{% if tools %}<tool_call>"arguments"{% for t in tools %} {{ t.function.name }}{% endfor %}
{% endif %}
{% for m in messages %}{{ m.role }}:{{ m.content[:20] }}{% for call in m.tool_calls %}
{{ (call.function.arguments | tojson)[:20] }}{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
"""A short one: the model's context is of 1,024 bytes."""

LIMIT = {"recursion_limit": 60}
ASKED = "What is the weather in Paris?"


class Weather(BaseModel):
    """The weather of a town."""

    model_config = ConfigDict(extra="forbid")  # else the model adds keys without end

    town: str = Field(max_length=8)
    degrees: int = Field(ge=-50, le=50)


@pytest.fixture(scope="module")
def base_url(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    changes = with_chat_template(server, TEMPLATE, tmp_path_factory.mktemp("agents"))
    with opened(server, **changes) as address:
        yield f"{address}/v1"


TOWNS = list[str]()


def get_weather(town: Literal["Paris", "Rome"]) -> str:
    """The weather of a town.

    Args:
        town: its name
    """
    TOWNS.append(town)
    return "5 degrees"


class Place(BaseModel):
    """The arguments of `get_weather`, and no others, as most frameworks say by themselves."""

    model_config = ConfigDict(extra="forbid")

    town: Literal["Paris", "Rome"]


def until_called(run: Callable[[], Any], may_be_cut: bool = False) -> None:
    """Run an agent, which has to end with a weather, until it has called the tool on its way: a
    model of random weights may call it or not.

    Args:
        may_be_cut: whether a call may add keys without end, and the agent then ends with None.
    """
    TOWNS.clear()
    answers = []
    for _ in range(60):
        answers.append(run())
        assert isinstance(answers[-1], Weather) or (may_be_cut and answers[-1] is None)
        if TOWNS and any(answers):
            return
    raise AssertionError("the tool is never called, or no answer is complete")


@pytest.mark.parametrize("is_responses", [False, True])
def test_langchain(base_url: str, is_responses: bool) -> None:
    openai = pytest.importorskip("langchain_openai")
    agents = pytest.importorskip("langchain.agents")
    from langchain.agents.structured_output import (
        ProviderStrategy,
        StructuredOutputValidationError,
        ToolStrategy,
    )
    from langchain_core import tools

    options: dict[str, Any] = {
        "base_url": base_url,
        "api_key": "x",
        "model": "gpt",
        "max_retries": 0,
        "use_responses_api": is_responses,
        "max_tokens": 400,
    }
    chat = openai.ChatOpenAI(**options, temperature=0)
    whole = chat.invoke(ASKED)
    assert whole.usage_metadata["output_tokens"] > 0
    pieces = list(chat.stream(ASKED))
    assert len(pieces) > 1 and "".join(piece.text for piece in pieces) == whole.text
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Weather, method=method).invoke(ASKED)
        assert isinstance(found, Weather)
    chat = openai.ChatOpenAI(**options, temperature=2, model_kwargs={"parallel_tool_calls": False})
    asked = {"messages": [("user", ASKED)]}
    tool = tools.StructuredTool.from_function(get_weather, args_schema=Place)
    for strategy in (ProviderStrategy(Weather), ToolStrategy(Weather)):
        agent = agents.create_agent(chat, [tool], response_format=strategy)

        def run(agent: Any = agent) -> Any:
            try:
                return agent.invoke(asked, LIMIT).get("structured_response")
            except StructuredOutputValidationError as error:
                assert "char 0" in str(error)  # no text, but a call that is cut
                return None

        until_called(run, may_be_cut=True)  # LangChain drops `additionalProperties`
    if not is_responses:
        text = openai.OpenAI(base_url=base_url, api_key="x", model="gpt", max_tokens=20)
        assert isinstance(text.invoke("Hello"), str)


@pytest.mark.parametrize("name", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(base_url: str, name: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(openai, name)("gpt", provider=OpenAIProvider(base_url=base_url, api_key="x"))
    settings = {"max_tokens": 400, "temperature": 2, "parallel_tool_calls": False}

    def answer(output: Any) -> Any:
        agent = ai.Agent(model, output_type=output, tools=[get_weather], model_settings=settings)
        return agent.run_sync(ASKED).output

    until_called(lambda: answer(ai.NativeOutput(Weather)))
    # This model nearly always chooses the other tool, with which the agent ends.
    assert all(isinstance(answer(ai.ToolOutput(Weather)), Weather) for _ in range(5))

    async def stream() -> list[str]:
        agent = ai.Agent(model, model_settings={"max_tokens": 20})
        async with agent.run_stream(ASKED) as found:
            return [piece async for piece in found.stream_text(delta=True)]

    assert len("".join(asyncio.run(stream()))) > 5


def test_instructor(base_url: str) -> None:
    instructor = pytest.importorskip("instructor")
    client = OpenAI(base_url=base_url, api_key="x")
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        found = instructor.from_openai(client, mode=instructor.Mode[mode]).create(
            model="gpt",
            messages=[{"role": "user", "content": ASKED}],
            response_model=Weather,
            max_tokens=700,
            max_retries=0,
        )
        assert isinstance(found, Weather)


def test_litellm(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    options: dict[str, Any] = {"model": "openai/gpt", "api_base": base_url, "api_key": "x"}
    chat = options | {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 700}
    whole = litellm.completion(**chat, temperature=0).choices[0].message.content
    pieces = litellm.completion(**chat, temperature=0, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    schema = Weather.model_json_schema()
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    (call, *_) = (
        litellm.completion(**chat, tools=[tool], tool_choice="required")
        .choices[0]
        .message.tool_calls
    )
    Weather.model_validate_json(call.function.arguments)
    found = litellm.completion(**chat, response_format=Weather, tools=[tool], seed=1)
    message = found.choices[0].message
    text = message.tool_calls[0].function.arguments if message.tool_calls else message.content
    Weather.model_validate_json(text)
    response = litellm.responses(**options, input=ASKED, max_output_tokens=20)
    assert response.output[0].type == "message"
    events = litellm.responses(**options, input=ASKED, max_output_tokens=20, stream=True)
    assert [event.type for event in events][-1] in ("response.completed", "response.incomplete")


@pytest.mark.parametrize("name", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(base_url: str, name: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def run(is_stream: bool) -> Any:
        client = AsyncOpenAI(base_url=base_url, api_key="x")
        agent = agents.Agent(
            name="weather",
            instructions="Be short.",
            tools=[agents.function_tool(get_weather)],
            output_type=Weather,
            model=getattr(agents, name)(model="gpt", openai_client=client),
            model_settings=agents.ModelSettings(
                temperature=2, max_tokens=400, parallel_tool_calls=False
            ),
        )
        try:
            if not is_stream:
                return (await agents.Runner.run(agent, ASKED, max_turns=30)).final_output
            stream = agents.Runner.run_streamed(agent, ASKED, max_turns=30)
            assert [event async for event in stream.stream_events()]
            return stream.final_output
        finally:
            await client.close()

    for is_stream in (False, True):
        until_called(lambda is_stream=is_stream: asyncio.run(run(is_stream)))
