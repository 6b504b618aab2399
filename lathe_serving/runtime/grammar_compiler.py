"""Compiles grammars with llguidance after a trial in a separate process, because some take version
1.9 minutes, gigabytes or its whole stack.

`python -m lathe_serving.runtime.grammar_compiler` is that process. It reads the arguments of
`read_tokenizer` and then grammars, and answers each grammar with its error, or an empty string.
"""

import json
import os
import resource
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lathe_base.errors import Code, UserError

LIMITS = {
    # A quarter of llguidance's own: a mask then takes 2 ms at most, while others wait for it.
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,  # each takes 1 to 2 kB
    "verbose_errors": False,
}
CPU_SECONDS = 1
WALL_SECONDS = 60.0  # where other processes take the processor; also to start
MEMORY = 256 * 2**20  # bytes beyond what the tokenizer takes
STACK = 4 * 2**20  # half of what the thread has that compiles it for use

JSON_OPTIONS = {"whitespace_pattern": r"\x20|\n\x20{0,20}"}
"""llguidance's for JSON: bounded white space, so that a text with a bounded schema always ends."""


class LimitExceeded(Exception):
    """Compiling exceeded the process's limits."""


def llguidance() -> Any:
    """The library.

    Raises:
        UserError: it is not installed.
    """
    try:
        import llguidance as found
    except ImportError:
        raise UserError(
            "structured_outputs: llguidance is not installed",
            "install it where Triton runs: `make serve-env`, or `pip install llguidance`",
            Code.NOT_INSTALLED,
        ) from None
    return found


def read_tokenizer(source: str, size: int, end_ids: list[int]) -> Any:
    """llguidance's own tokenizer.

    Args:
        source: the contents of `tokenizer.json`.
        size: of the model's vocabulary.
    """
    return llguidance().LLTokenizer(source, n_vocab=size, eos_token=end_ids)


def compiled(grammar: str, tokenizer: Any) -> Any:
    """llguidance's matcher at the beginning of a text, which may be in an error state."""
    library = llguidance()
    limits = library.LLParserLimits(**LIMITS)
    matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what is too large mostly fails here already
    return matcher


class LimitedProcess:
    """A process that runs `answer_lines`. It starts with the first value, and again after a value
    has ended it.

    Args:
        module: its Python module.
        first: returns the first value that the process reads, which it does not answer.
    """

    def __init__(self, module: str, first: Callable[[], Any]) -> None:
        self._module, self._first = module, first
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, value: Any) -> Any:
        """The process's answer to a value.

        Raises:
            LimitExceeded: it takes more than the process may have.
        """
        with self._lock:
            try:
                if self._process is None:
                    # Triton's Python stub is not the interpreter that its environment has first on
                    # PATH.
                    is_python = Path(sys.executable or "").name.startswith("python")
                    python = sys.executable if is_python else shutil.which("python3")
                    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
                    python_path = os.pathsep.join(filter(None, paths))
                    self._process = subprocess.Popen(
                        [python or "python3", "-m", self._module],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        env={"PYTHONPATH": python_path, "PATH": os.environ["PATH"]},
                    )
                    _send(self._process, self._first())
                _send(self._process, value)
                assert self._process.stdout is not None
                # CPU_SECONDS does not count the time in which other processes take the processor.
                ready, _, _ = select.select([self._process.stdout], [], [], WALL_SECONDS)
                line = self._process.stdout.readline() if ready else b""
            except BrokenPipeError:
                line = b""
            if not line:
                self._end()
                raise LimitExceeded(
                    f"too complex to compile in {CPU_SECONDS} s of processor time and "
                    f"{MEMORY >> 20} MiB"
                )
            return json.loads(line)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _send(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value).encode() + b"\n")
    process.stdin.flush()


def limit_memory() -> None:
    """Let this process take MEMORY more than it has now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def answer_lines(prepare: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Answer JSON values, one per line, until the end of standard input; each within the limits.

    Args:
        prepare: returns the function that answers, given the first value.
    """

    def work() -> None:
        answer = prepare(json.loads(sys.stdin.readline()))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here is an answer, not a bug
        limit_memory()
        for line in sys.stdin:
            # The limit counts from the start of the process, in whole seconds.
            seconds = int(time.process_time()) + 1 + CPU_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
            print(json.dumps(answer(json.loads(line))), flush=True)

    # On a thread, whose stack can be limited: what overflows it ends this process, not the server.
    threading.stack_size(STACK)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _error_finder(arguments: tuple[str, int, list[int]]) -> Callable[[str], str]:
    tokenizer = read_tokenizer(*arguments)
    return lambda grammar: str(compiled(grammar, tokenizer).get_error())


if __name__ == "__main__":
    answer_lines(_error_finder)
