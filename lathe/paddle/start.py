"""Start a stage in the Paddle environment, from a process that has torch and not paddle."""

import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lathe.errors import Preempted, StageError, UserError
from lathe.settings import Recipe

log = logging.getLogger("lathe")

ROOT = Path(__file__).resolve().parents[2]  # what `import lathe` needs on PYTHONPATH
PYTHON_VARIABLE = "LATHE_PADDLE_PYTHON"
MARK_VARIABLE = "LATHE_PADDLE_MARK"
MARK = "[lathe.paddle] "
"""Opens every line of the child's stdout that is Lathe's own: Paddle says much on both streams."""

TAIL_LINES = 20


def find_python() -> Path:
    """The interpreter of `LATHE_PADDLE_PYTHON`, or of `.venv-paddle` beside the package.

    Raises:
        UserError: it is absent.
    """
    python = Path(os.environ.get(PYTHON_VARIABLE) or ROOT / ".venv-paddle" / "bin" / "python")
    if not python.is_file():
        raise UserError(
            f"{python}: no such interpreter: Paddle has an environment of its own",
            f"run `make paddle-env`, or name its interpreter in {PYTHON_VARIABLE}; on a cluster, "
            "submit with ENGINE=paddle, which takes the image paddle; or use "
            "-o Compress.engine=torch",
        )
    return python


def start(verb: str, recipe: Recipe, *arguments: object) -> None:
    """Run `python -m lathe.paddle VERB ARGUMENTS` with this recipe; its log lines become ours.

    Raises:
        UserError, Preempted, StageError: what the stage itself raised.
    """
    python = find_python()
    with tempfile.TemporaryDirectory(prefix="lathe-paddle-") as scratch:
        settings = Path(scratch) / "recipe.yaml"
        settings.write_text(json.dumps(recipe.model_dump(mode="json")))
        command = [str(python), "-m", "lathe.paddle", verb, "--recipe", str(settings)]
        _run([*command, *map(str, arguments)])


def _run(command: list[str]) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")}
    child = subprocess.Popen(
        command,
        env=outside | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", MARK_VARIABLE: MARK},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    noise: deque[str] = deque(maxlen=TAIL_LINES)
    said: list[str] = []
    assert child.stdout is not None
    with _forwarding(child.terminate):
        for line in child.stdout:
            if not line.startswith(MARK):
                noise.append(line)
                continue
            text = line.removeprefix(MARK).rstrip("\n")
            if said or text.startswith(("error: ", "preempted: ")):
                said.append(text)
            else:
                log.info("%s", text)
        status = child.wait()
    if status:
        raise _error(status, "\n".join(said), "".join(noise))


def _error(status: int, said: str, noise: str) -> Exception:
    """What the child raised, from its exit status and what it said."""
    _, _, message = said.partition(": ")
    if status == UserError.status:
        what, _, cure = message.partition("\n  cure: ")
        return UserError(what, cure)
    if status == Preempted.status:
        return Preempted(message)
    return StageError(message or f"the Paddle process ended with status {status}:\n{noise}")


@contextmanager
def _forwarding(terminate: Callable[[], None]) -> Iterator[None]:
    """SIGTERM goes on to the child, which saves its state."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
