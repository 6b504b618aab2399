"""A backend of the runtime `vllm` in its own environment, used from that of the tests.

`python -m tests.support.vllm_process FD` is the process: it reads the arguments of the backend, and
then requests and cancellations, from a connection.
"""

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lathe_base.errors import UserError
from lathe_base.parameters import Params
from lathe_serving.runtime.contract import Receiver
from tests.support import environments

ASK_SECONDS = 0.005


class VLLMProcess:
    """A `TextBackend` that is another process's."""

    def __init__(self, folder: Path, default_max_tokens: int, **options: Any) -> None:
        python = environments.require("vllm")
        self._pipe, other = Pipe()
        self._process = subprocess.Popen(
            [python, "-m", "tests.support.vllm_process", str(other.fileno())],
            env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"},
            cwd=environments.ROOT,
            pass_fds=[other.fileno()],
        )
        other.close()
        self._ids, self._lock = itertools.count(), threading.Lock()
        self._open: dict[int, Receiver] = {}
        self._answers: dict[int, Any] = {}
        self._pipe.send((folder, default_max_tokens, options))
        self.runtime: str = _opened(self._pipe.recv())
        self._answered = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._tell_cancellations, daemon=True).start()

    def submit(self, prompt: str | Sequence[int], params: Params, receiver: Receiver) -> bool:
        name = next(self._ids)
        self._open[name] = receiver
        answer = self._ask(name, "submit", prompt, params, receiver.cancelled())
        if answer is not True:
            del self._open[name]
        return bool(_opened(answer))

    def close(self) -> None:
        self._ask(next(self._ids), "close")

    def end(self) -> None:
        """End the process."""
        with self._lock:
            self._pipe.send((next(self._ids), "end"))
        self._process.wait(timeout=60)
        self._reader.join(timeout=60)

    def _ask(self, name: int, what: str, *arguments: Any) -> Any:
        with self._lock:
            self._pipe.send((name, what, *arguments))
        with self._answered:
            is_there = self._answered.wait_for(lambda: name in self._answers, timeout=120)
            assert is_there, "no answer"
            return self._answers.pop(name)

    def _read(self) -> None:
        while True:
            try:
                name, is_chunk, value = self._pipe.recv()
            except (EOFError, OSError):
                return
            if is_chunk:
                self._open[name].deliver(value)
            else:
                with self._answered:
                    self._answers[name] = value
                    self._answered.notify_all()

    def _tell_cancellations(self) -> None:
        told = set[int]()
        while self._process.poll() is None:
            for name, receiver in list(self._open.items()):
                if name not in told and receiver.cancelled():
                    told.add(name)
                    with self._lock:
                        self._pipe.send((name, "cancel"))
            time.sleep(ASK_SECONDS)


def _packed(answer: Any) -> Any:
    """An answer that can be pickled, which many of vLLM's exceptions cannot."""
    if isinstance(answer, Exception) and not isinstance(answer, UserError):
        return RuntimeError(repr(answer))
    return answer


def _opened(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(pipe: Any) -> None:
    from lathe_serving.runtime.text_generator import BACKENDS

    folder, default_max_tokens, options = pipe.recv()
    try:
        backend = BACKENDS["vllm"](folder, default_max_tokens, **options)
    except Exception as error:
        pipe.send(_packed(error))
        return
    pipe.send(backend.runtime)
    lock, cancelled = threading.Lock(), set[int]()

    def send(*message: Any) -> None:
        with lock:
            pipe.send(message)

    while True:
        try:
            name, what, *arguments = pipe.recv()
        except EOFError:  # the tests have ended
            return
        if what == "end":
            return
        if what == "cancel":
            cancelled.add(name)
        elif what == "close":
            backend.close()
            send(name, False, None)
        else:
            prompt, params, is_cancelled = arguments
            if is_cancelled:
                cancelled.add(name)

            def deliver(answer: Any, name: int = name) -> None:
                send(name, True, _packed(answer))

            def is_over(name: int = name) -> bool:
                return name in cancelled

            try:
                answer: Any = backend.submit(prompt, params, Receiver(deliver, is_over))
            except Exception as error:
                answer = error
            send(name, False, _packed(answer))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
