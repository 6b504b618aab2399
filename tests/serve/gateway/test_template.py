"""The processes that render and tokenize: who waits for whom, and what each task may take."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe_serving.gateway import template
from lathe_serving.gateway.errors import ApiError
from lathe_serving.gateway.template import LONG, Renderer

SLOW = "{% if messages[0].content[:4] == 'slow' %}{% for i in range(99999) %}"
SLOW += "{% for j in range(999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("export")
    byte_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "export.json").write_text(json.dumps({"n_positions": 64}))
    (folder / "config.json").write_text(json.dumps({"lathe": {"chat_template": SLOW}}))
    return folder


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Renderer]:
    renderer = Renderer(folder)
    try:
        yield renderer
    finally:
        renderer.close()


def chat(renderer: Renderer, text: str) -> Awaitable[list[int]]:
    return renderer.ids({"messages": [{"role": "user", "content": text}]})


Ask = Callable[[Renderer], Awaitable[object]]
ASKED: dict[str, Ask] = {
    "messages": lambda renderer: chat(renderer, "x" * 100_000),
    "few messages": lambda renderer: chat(renderer, "x" * 65),
    "a text": lambda renderer: renderer.tokenize("x" * 4_000_000, True),
    "a text without special tokens": lambda renderer: renderer.tokenize("é" * 33, False),
    "tokens": lambda renderer: renderer.detokenize([65] * 65),
}


def test_what_exceeds_the_context_is_refused_each_time_in_the_same_words(folder: Path) -> None:
    async def check() -> None:
        async with opened(folder) as renderer:
            for name, ask in ASKED.items():
                results = await asyncio.gather(
                    *(ask(renderer) for _ in range(4)), return_exceptions=True
                )
                for error in results:
                    assert isinstance(error, ApiError), name
                    assert (error.status, error.code) == (400, "context_length_exceeded"), name
                    assert "more tokens than the model's 64 positions" in error.message, name
            assert len(await chat(renderer, "x" * 64)) == 64
            assert len(await renderer.tokenize("x" * 64, True)) == 64

    asyncio.run(check())


def test_chats_wait_neither_for_long_ones_nor_for_tokenizing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "MAX_WAITING", 2)

    async def check() -> None:
        async with opened(folder) as renderer:
            long = [asyncio.ensure_future(chat(renderer, "slow" + " " * LONG)) for _ in range(4)]
            await asyncio.sleep(0)  # one has begun
            assert await chat(renderer, "quick") and await renderer.tokenize("quick", True)
            assert not any(task.done() for task in long[:3])
            assert long[3].done()
            refused = long[3].exception()
            assert isinstance(refused, ApiError) and (refused.status, refused.code) == (
                503,
                "overloaded",
            )
            for task in long:
                task.cancel()

    asyncio.run(check())


@pytest.mark.slow
def test_a_task_ends_by_its_own_time_and_memory_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends in the middle of a task for the sake of earlier ones is replaced."""
    monkeypatch.setattr(template, "CPU_SECONDS", 0.2)

    async def check() -> None:
        async with opened(folder) as renderer:
            for _ in range(2):
                with pytest.raises(ApiError, match="the model's chat template takes too long"):
                    await chat(renderer, "slow")
                assert await chat(renderer, "quick")
            (process,) = renderer._chats._processes
            process.kill()
            process.wait()
            assert await chat(renderer, "quick")

    asyncio.run(check())
