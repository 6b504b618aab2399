"""Runs a stage in Paddle's environment, from a process that has torch but not Paddle."""

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

from lathe_base.config.recipe import recipe_as_text
from lathe_base.config.settings import Recipe
from lathe_base.errors import MESSAGE, Code, Preempted, StageError, UserError, code_in
from lathe_base.storage import atomic_file
from lathe_launch.parent import tied

log = logging.getLogger("lathe")

ROOT = Path(__file__).resolve().parents[2]  # what `import lathe` needs on PYTHONPATH
PYTHON_VARIABLE = "LATHE_PADDLE_PYTHON"
MARK_VARIABLE = "LATHE_PADDLE_MARK"
MARK = "[lathe_paddle] "
"""Prefix of Lathe's own lines on the child's stdout: Paddle writes a lot to both streams."""

LOGS_VARIABLE = "LATHE_PADDLE_LOGS"
OUTCOME = "outcome."
TAIL_LINES = 20


def find_python() -> Path:
    """The interpreter that `LATHE_PADDLE_PYTHON` names, or that of `.venv-paddle` beside the
    package.

    Raises:
        UserError: it does not exist.
    """
    python = Path(os.environ.get(PYTHON_VARIABLE) or ROOT / ".venv-paddle" / "bin" / "python")
    if not python.is_file():
        raise UserError(
            f"{python}: no such interpreter: Paddle needs its own environment",
            f"run `make paddle-env`, or set {PYTHON_VARIABLE}; on a cluster, submit with "
            "ENGINE=paddle, which uses the paddle image; or use -o Compress.engine=torch",
            Code.NOT_INSTALLED,
        )
    return python


def start(verb: str, recipe: Recipe, *arguments: object) -> None:
    """Run `python -m lathe_paddle VERB ARGUMENTS` with this recipe; forward its log lines.

    Raises:
        UserError, Preempted, StageError: what the stage itself raised.
    """
    python = find_python()
    with tempfile.TemporaryDirectory(prefix="lathe-paddle-") as scratch:
        settings = Path(scratch) / "recipe.yaml"
        settings.write_text(recipe_as_text(recipe), encoding="utf-8")
        command = [str(python), "-m", "lathe_paddle", verb, "--recipe", str(settings)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # Variables of this environment would mislead the other interpreter.
        outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")}
        child = subprocess.Popen(
            tied([*command, *map(str, arguments)]),
            env=outside | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", MARK_VARIABLE: MARK},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        noise: deque[str] = deque(maxlen=TAIL_LINES)  # shown if the process ends without a message
        said: list[str] = []
        assert child.stdout is not None
        with _forwarding(child.terminate):
            for line in child.stdout:
                if not line.startswith(MARK):
                    noise.append(line)
                    continue
                # The first line that looks like an error's message begins it, and the rest follow.
                text = line.removeprefix(MARK).rstrip("\n")
                if said or MESSAGE.match(text):
                    said.append(text)
                else:
                    log.info("%s", text)
            status = child.wait()
    if status:
        message = "\n".join(said)
        code = code_in(message)
        message = MESSAGE.sub("", message, count=1)
        message = message or f"the Paddle process ended with status {status}:\n{''.join(noise)}"
        raise rebuild_error(status, message, code)


def write_outcome(error: UserError | StageError) -> bool:
    """Report the error to `lathe_paddle.launch`; False if another started this process."""
    logs = os.environ.get(LOGS_VARIABLE)
    if logs is None:
        return False
    with atomic_file(Path(logs) / f"{OUTCOME}{os.environ['RANK']}") as work:
        work.write_text(
            json.dumps({"status": error.status, "message": str(error), "code": error.code}),
            encoding="utf-8",
        )
    return True


def rebuild_error(status: int, message: str, code: str) -> UserError | StageError:
    """The exception that another process raised, from its exit status, message and code."""
    if status == UserError.status:
        what, _, hint = message.partition("\n  hint: ")
        return UserError(what, hint, Code(code))
    return Preempted(message) if status == Preempted.status else StageError(message, Code(code))


@contextmanager
def _forwarding(terminate: Callable[[], None]) -> Iterator[None]:
    """Forward SIGTERM to the child, which saves its state."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
