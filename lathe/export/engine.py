"""The interface of an engine for verification, and an engine in a separate process, so that a crash
of native code becomes an error."""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe_base.errors import StageError

Array = NDArray[np.float32]


class Engine:
    """A model that an engine has loaded.

    Attributes:
        version: the engine and its version.
    """

    version: str

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def logits(self, tokens: NDArray[np.int64]) -> Array:
        """Logits (1, T, V) of tokens (1, T)."""
        raise NotImplementedError

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        """The most likely next token, n times; by default each from a pass over the whole text."""
        tokens = list(prompt)
        for _ in range(n):
            tokens.append(int(self.logits(np.array([tokens]))[0, -1].argmax()))
        return tokens[len(prompt) :]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens at its beginning or end."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found


class Isolated(Engine):
    """Loads `engine(folder)` in a new process, and runs its methods there.

    Raises:
        StageError: from every method, if the process has crashed.
    """

    def __init__(self, name: str, engine: Callable[[Path], Engine], folder: Path) -> None:
        context = get_context("spawn")
        self._name, (self._pipe, other) = name, context.Pipe()
        self._process = context.Process(target=_answer, args=(engine, folder, other), daemon=True)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # else the child runs the command again
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
        other.close()
        self.version = self._result()

    def logits(self, tokens: NDArray[np.int64]) -> Array:
        found: Array = self._ask("logits", tokens)
        return found

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        return list(self._ask("greedy", prompt, n))

    def encode(self, text: str) -> list[int]:
        return list(self._ask("encode", text))

    def _ask(self, method: str, *arguments: Any) -> Any:
        with suppress(OSError):  # it has crashed: the next line says how
            self._pipe.send((method, arguments))
        return self._result()

    def _result(self) -> Any:
        try:
            found = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise StageError(
                f"{self._name} crashed ({how}): it cannot run this model on this processor, or is "
                "another version than its package says"
            ) from None
        if isinstance(found, Exception):
            raise found
        return found


def _answer(engine: Callable[[Path], Engine], folder: Path, pipe: Connection) -> None:
    """Load the engine, and run requested methods until the other end is closed."""
    try:
        opened = engine(folder)
        pipe.send(opened.version)
    except Exception as error:
        pipe.send(error)
        return
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(opened, method)(*arguments))
        except Exception as error:
            pipe.send(error)
