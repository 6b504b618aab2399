"""The asyncio client against a real server: results, errors and cancellation."""

import asyncio
import re

from lathe_base.errors import Code
from lathe_serving.client import Client
from lathe_serving.client.async_client import AsyncClient
from lathe_serving.server import TritonServer
from tests.support.errors import raises
from tests.support.server_metrics import expect_cancelled


def test_many_tasks_get_what_a_client_gets(url: str, client: Client) -> None:
    options = {"decode_strategy": "greedy_search", "max_tokens": 10}
    prompts = [f"task {i}" for i in range(6)]

    async def ask() -> list[list[int]]:
        async with AsyncClient(url, "gpt", timeout_seconds=30) as asynchronous:
            whole = [asynchronous.generate(prompt, **options) for prompt in prompts[:3]]

            async def streamed(prompt: str) -> list[int]:
                stream = asynchronous.stream(prompt, **options)
                return [token async for chunk in stream for token in chunk.tokens]

            answers = await asyncio.gather(*whole)
            rest = await asyncio.gather(*(streamed(prompt) for prompt in prompts[3:]))
            return [answer.tokens for answer in answers] + rest

    assert asyncio.run(ask()) == [client.generate(prompt, **options).tokens for prompt in prompts]


def test_errors_are_the_clients(url: str) -> None:
    async def ask(where: str, seconds: float = 2.0, **parameters: float) -> None:
        async with AsyncClient(where, "gpt", timeout_seconds=seconds) as asynchronous:
            await asynchronous.generate("x", **parameters)

    with raises(Code.INVALID_VALUE, "top_p 1.5"):
        asyncio.run(ask(url, top_p=1.5))
    with raises(Code.UNREACHABLE):
        asyncio.run(ask(re.sub(r":\d+", ":1", url)))
    with raises(Code.TIMEOUT, "0.05 s"):
        asyncio.run(ask(url, 0.05, max_tokens=1000, min_tokens=1000))


def test_a_cancelled_task_frees_its_slot(server: TritonServer, url: str, client: Client) -> None:
    async def leave() -> None:
        async with AsyncClient(url, "gpt") as asynchronous:
            long, has_begun = {"max_tokens": 1000, "min_tokens": 1000}, asyncio.Event()

            async def read() -> None:
                async for _ in asynchronous.stream("x", **long):
                    has_begun.set()

            whole = [asyncio.create_task(asynchronous.generate("x", **long)) for _ in range(3)]
            tasks = [*whole, asyncio.create_task(read())]  # all slots
            await asyncio.wait_for(has_begun.wait(), 60)
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with expect_cancelled(server, 4 * 1000):
        asyncio.run(leave())
        client.generate("b", max_tokens=1)
