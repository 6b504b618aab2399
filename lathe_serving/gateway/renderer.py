"""Runs a model's chat template and tokenizer in a separate process.

A template comes with a checkpoint, so it may be untrusted: it may never end, or allocate all
memory. In a separate process it does not block other requests, has no access to keys or environment
variables, and is killed after RENDER_SECONDS. Tokenizing megabytes of text also takes seconds.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lathe_serving.gateway.errors import ApiError

RENDER_SECONDS = 5.0


class LimitExceeded(Exception):
    """A task exceeded the process's time or memory limit."""


class Renderer:
    """The process of one model; it starts with the first request.

    Args:
        folder: the model's export, with `config.json` and `tokenizer.json`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    async def ids(self, request: Mapping[str, Any]) -> list[int]:
        """Token ids of a prompt.

        Args:
            request: `messages`, and the options of `ChatTemplate.render`.

        Raises:
            ApiError: the template rejects the messages, is invalid, or takes too long.
        """
        token_ids: list[int] = await self._do(
            {"chat": request}, "the model's chat template", "messages"
        )
        return token_ids

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: prepend the tokens that precede every text.

        Raises:
            ApiError: it takes too long.
        """
        request = {"text": text, "add_special_tokens": add_special_tokens}
        token_ids: list[int] = await self._do(request, "the tokenizer", "prompt")
        return token_ids

    async def names(self, ids: list[int]) -> list[str]:
        """The tokens as strings of the tokenizer's vocabulary."""
        token_names: list[str] = await self._do({"names": ids}, "the tokenizer", "tokens")
        return token_names

    async def detokenize(self, ids: list[int]) -> str:
        """The text of tokens.

        Raises:
            ApiError: an id is not a token, or it takes too long.
        """
        text: str = await self._do({"tokens": ids}, "the tokenizer", "tokens")
        return text

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    async def _do(self, request: Mapping[str, Any], who: str, param: str) -> Any:
        line = json.dumps(request).encode() + b"\n"
        async with self._lock:
            if self._process is None:
                # An environment of its own: keys and addresses stay out of a template's reach.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "lathe_serving.gateway.render", str(self._folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={"PYTHONPATH": str(Path(__file__).parents[2])},
                )
            try:
                reply = await self._ask(self._process, line)
            except LimitExceeded as error:
                raise ApiError(400, f"{who} takes too {error}", param=param) from None
        if "done" in reply:
            return reply["done"]
        raise ApiError(500 if reply["is_broken"] else 400, reply["error"], param=param)

    async def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> Any:
        def exchange() -> bytes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(line)
            process.stdin.flush()
            return process.stdout.readline()

        # A thread cannot be cancelled: it is shielded, and ends when its process is killed.
        asked = asyncio.create_task(asyncio.to_thread(exchange))
        try:
            answer = await asyncio.wait_for(asyncio.shield(asked), RENDER_SECONDS)
            return json.loads(answer)
        except (TimeoutError, asyncio.CancelledError, ValueError, OSError) as error:
            self.close()  # what it is at would be taken for the answer to the next request
            if isinstance(error, asyncio.CancelledError):
                raise
            raise LimitExceeded(
                "long" if isinstance(error, TimeoutError) else "much memory"
            ) from None
