"""Runs a model's chat template and tokenizer in separate processes, those of `template`.

A template comes with a checkpoint, so it may be untrusted: it may never end, or allocate all
memory. In a separate process it does not block other requests, has no access to keys or environment
variables, and is killed after CPU_SECONDS.

Long texts take long to tokenize. They have processes of their own, as have `/tokenize` and
`/detokenize`, so that the messages of a usual chat never wait for either. These run with a lower
priority than the model.
"""

import asyncio
import json
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGPROF
from typing import Any, TypeVar

from lathe_serving.gateway.errors import ApiError

CPU_SECONDS = 5.0  # of one task, whatever else the machine does
WALL_SECONDS = 60.0
LONG = 32 * 1024  # bytes of a task
NICENESS = 10
MAX_WAITING = 64  # tasks, for each kind of process

T = TypeVar("T")


class Turns:
    """Runs functions in threads, at most `count` at a time; MAX_WAITING more may wait."""

    def __init__(self, count: int) -> None:
        self._free, self._threads = asyncio.Semaphore(count), ThreadPoolExecutor(count)
        self._waiting = 0

    async def run(self, what: str, function: Callable[[], T]) -> T:
        """The result of a function.

        Args:
            what: that requests wait for, for errors.

        Raises:
            ApiError: MAX_WAITING of them wait already.
        """
        if self._waiting >= MAX_WAITING:
            error = f"{MAX_WAITING} requests are waiting for {what}"
            raise ApiError(503, error, code="overloaded")
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        # A thread cannot be cancelled: when the client leaves, its work is completed.
        work = asyncio.get_running_loop().run_in_executor(self._threads, function)
        work.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(work)

    def close(self) -> None:
        """Wait for the work in progress."""
        self._threads.shutdown()


class Renderer:
    """The processes of one model; they start when they are needed.

    Args:
        folder: the model's export, with `config.json` and `tokenizer.json`.
    """

    def __init__(self, folder: Path) -> None:
        self._chats = TemplateProcesses(folder, 2, 0)
        self._long_chats = TemplateProcesses(folder, 1, NICENESS)
        self._texts = TemplateProcesses(folder, 1, NICENESS)

    async def ids(self, request: Mapping[str, Any]) -> list[int]:
        """Token ids of a prompt.

        Args:
            request: `messages`, and the options of `ChatTemplate.render`.

        Raises:
            ApiError: the template rejects the messages, is invalid, or takes too long; the prompt
                is too long; or too many requests wait.
        """
        task = _line({"chat": request})
        processes = self._chats if len(task) <= LONG else self._long_chats
        ids: list[int] = await processes.do(task, "the model's chat template", "messages")
        return ids

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: prepend the tokens that precede every text.

        Raises:
            ApiError: it is too long, or too many requests wait.
        """
        task = _line({"text": text, "add_special_tokens": add_special_tokens})
        ids: list[int] = await self._texts.do(task, "the tokenizer", "prompt")
        return ids

    async def names(self, ids: list[int]) -> list[str]:
        """The tokens as strings of the tokenizer's vocabulary."""
        names: list[str] = await self._texts.do(_line({"names": ids}), "the tokenizer", "tokens")
        return names

    async def detokenize(self, ids: list[int]) -> str:
        """The text of tokens.

        Raises:
            ApiError: an id is not a token, there are more than the context has, or too many
                requests wait.
        """
        text: str = await self._texts.do(_line({"tokens": ids}), "the tokenizer", "tokens")
        return text

    def close(self) -> None:
        """End the processes."""
        for processes in (self._chats, self._long_chats, self._texts):
            processes.close()


def _line(task: Mapping[str, Any]) -> bytes:
    return json.dumps(task).encode() + b"\n"


class TemplateProcesses:
    """At most `count` processes of `lathe_serving.gateway.template`, each with one task at a
    time."""

    def __init__(self, folder: Path, count: int, niceness: int) -> None:
        self._arguments = [str(folder), str(CPU_SECONDS), str(niceness)]
        self._turns, self._is_closed = Turns(count), False
        self._idle: list[subprocess.Popen[bytes]] = []
        self._processes: set[subprocess.Popen[bytes]] = set()

    async def do(self, task: bytes, who: str, param: str) -> Any:
        """Do a task.

        Args:
            task: a line of JSON.
            who: does it, for errors.
            param: the field that an error is about.

        Raises:
            ApiError: of the task; or see `Turns.run`.
        """
        reply = await self._turns.run(who, lambda: self._exchange(task, who))
        if "done" in reply:
            return reply["done"]
        raise ApiError(reply["status"], reply["error"], param=param, code=reply.get("code"))

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        for process in list(self._processes):
            self._end(process)
        self._turns.close()

    def _exchange(self, task: bytes, who: str) -> Any:
        """The reply of a process to a task; it depends on the task alone."""
        while True:
            try:
                process, is_new = self._idle.pop(), False
            except IndexError:
                is_new = True
                process = subprocess.Popen(
                    [sys.executable, "-m", "lathe_serving.gateway.template", *self._arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    # Of its own: keys and addresses stay out of a template's reach.
                    env={"PYTHONPATH": str(Path(__file__).parents[2])},
                )
                self._processes.add(process)
            assert process.stdin is not None and process.stdout is not None
            answer, is_late = b"", False
            try:
                process.stdin.write(task)
                process.stdin.flush()
                stdout = select.poll()
                stdout.register(process.stdout, select.POLLIN)
                is_late = not stdout.poll(1000 * WALL_SECONDS)
                answer = b"" if is_late else process.stdout.readline()
            except (OSError, ValueError):
                pass  # it has ended, or been closed
            if answer:
                self._idle.append(process)
                return json.loads(answer)
            status = self._end(process)
            if is_late:
                return {"error": "the machine is too busy", "status": 503, "code": "overloaded"}
            if status == -SIGPROF:
                return {"error": f"{who} takes too long", "status": 400}
            if is_new or self._is_closed:
                return {"error": f"{who} takes too much memory", "status": 400}
            # Earlier tasks may have used the memory: ask a new one.

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """End a process, unless it has ended by itself; returns its exit status."""
        process.kill()
        process.communicate()
        self._processes.discard(process)
        return process.returncode
