"""Certifies that killed and resumed training produces the same model as uninterrupted training.

A recipe is trained once without interruption, and once while its processes are killed at random
moments and restarted. The certificate has the digests of both models and every kill.
"""

import json
import logging
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lathe.data.tokens import TokenDataset
from lathe.release.certify.tensors import (
    TensorDifference,
    WeightDigests,
    first_difference,
    weight_digests,
)
from lathe.train.state_folder import PARTIAL, committed_steps
from lathe_base import __version__
from lathe_base.artifacts.kinds import RESUME_CERTIFICATE, read_json
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, StageError
from lathe_base.progress import bar
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_file, claim_output_file, digest
from lathe_launch.parent import tied
from lathe_launch.shape import required_shape

log = logging.getLogger("lathe")

Kind = Literal["one rank", "all ranks", "during a save"]
KINDS: tuple[Kind, ...] = ("one rank", "all ranks", "during a save")
POLL_SECONDS = 0.0005
TRACE = "train.jsonl"
TAIL_BYTES = 4000


@dataclass(frozen=True)
class PlannedKill:
    """A kill to perform once training has reached `step` steps.

    Attributes:
        wait: additional wait as a share of a step, so that kills also happen within steps.
        rank: that of the killed process, if it is a single one.
    """

    kind: Kind
    step: int
    wait: float
    rank: int


@dataclass(frozen=True)
class Kill:
    """A kill that was performed.

    Attributes:
        step: the last step that the training has logged.
        saved_step: that of the newest complete state, from which it resumes; 0 if there is none.
        unfinished: names of the unfinished saves that the kill left.
        seconds: seconds since the start of the processes.
    """

    planned: PlannedKill
    step: int
    saved_step: int
    unfinished: list[str]
    seconds: float
    processes: int


@dataclass(frozen=True)
class ResumeResult:
    """The result of a certification.

    Attributes:
        kills: the kills performed; fewer than requested if training ended before.
        difference: that between the two models; None if they are bitwise identical.
    """

    kills: list[Kill]
    whole: WeightDigests
    resumed: WeightDigests
    difference: TensorDifference | None

    @property
    def passed(self) -> bool:
        """Whether the training was killed, and both models are identical."""
        return bool(self.kills) and self.difference is None

    def require(self) -> None:
        """Raise StageError unless it has passed."""
        if self.difference:
            by = self.difference.largest
            how = "has a different shape or type" if by is None else f"differs by up to {by:.3g}"
            raise StageError(
                f"the resumed training produced a different model: {self.difference.tensor} {how}",
                Code.NOT_PROVED,
            )
        if not self.kills:
            raise StageError(
                "the training ended before the first kill: train for more steps", Code.NOT_PROVED
            )


def _result(certificate: Path) -> dict[str, dict[str, Any]]:
    values = read_json(certificate, "certify it again")
    return {"resume": {"passed": values["passed"], "kills": len(values["kills"])}}


@attested("certify-resume", "data", results=_result)
def certify_resume(
    recipe: Recipe, options: Sequence[str], data: Path, output: Path, kills: int, seed: int = 0
) -> ResumeResult:
    """Train twice, killing the second training repeatedly, and write a certificate of the
    comparison.

    Args:
        recipe: trained with the processes of `lathe pretrain`: one, or several on this machine.
        options: the recipe and its overrides as command-line options.
        data: token data set.
        output: the certificate, JSON.
        kills: number of kills; kinds and moments are drawn from `seed`. Kills after the end of the
            training are omitted.

    Raises:
        UserError: `output` is something else, or `data` is not a token data set.
        StageError: a training failed by itself.
    """
    claim_output_file(output, RESUME_CERTIFICATE, data)
    TokenDataset.open(data)
    # Drawn before anything runs, so that the seed alone decides them.
    planned = plan_kills(seed, kills, recipe.Engine.max_steps, required_shape(recipe).processes)
    with tempfile.TemporaryDirectory(prefix="lathe-certify-") as name:
        whole, resumed, done = Path(name) / "whole", Path(name) / "resumed", list[Kill]()
        command = ["pretrain", *options, "--data", str(data.absolute()), "--output"]
        log.info("training without interruption")
        _train([*command, str(whole)], whole)
        with bar("kills", kills) as progress:
            for plan in planned:
                training = Training([*command, str(resumed)], resumed, _log_path(resumed))
                try:
                    kill = training.kill_at(plan)
                finally:
                    training.end()
                if kill is None:
                    break
                done.append(kill)
                progress.advance(status=f"{plan.kind} at step {kill.step}")
        _train([*command, str(resumed)], resumed)
        result = ResumeResult(
            done, weight_digests(whole), weight_digests(resumed), first_difference(whole, resumed)
        )
    write_certificate(_values(result, recipe, options, data, kills, seed), output)
    return result


def write_certificate(values: Mapping[str, Any], path: Path) -> None:
    """Write a certificate as JSON."""
    with atomic_file(path) as work:
        work.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _train(command: list[str], output: Path) -> None:
    training = Training(command, output, _log_path(output))
    try:
        training.finish()
    finally:
        training.end()


def _log_path(output: Path) -> Path:
    return output.with_suffix(".log")


def _values(
    result: ResumeResult, recipe: Recipe, options: Sequence[str], data: Path, kills: int, seed: int
) -> dict[str, Any]:
    return {
        "certifies": "killed and resumed training produces the same model as uninterrupted "
        "training",
        "passed": result.passed,
        "difference": asdict(result.difference) if result.difference else None,
        "command": [*options, "--data", str(data)],
        "recipe_sha256": digest(recipe.model_dump_json()),
        "steps": recipe.Engine.max_steps,
        "processes": required_shape(recipe).processes,
        "seed": seed,
        "kills_planned": kills,
        "kills": [asdict(kill) for kill in result.kills],
        "uninterrupted": asdict(result.whole),
        "resumed": asdict(result.resumed),
        "versions": {"lathe": __version__, "python": platform.python_version()},
        "machine": platform.platform(),
    }


def plan_kills(seed: int, count: int, steps: int, ranks: int) -> list[PlannedKill]:
    """Draw kills, ordered by step; kinds take turns in a random order.

    Args:
        steps: of the whole training.
        ranks: its processes.
    """
    draw = random.Random(seed)
    kinds: list[Kind] = []
    while len(kinds) < count:
        # Every kind once before any comes again.
        kinds += draw.sample(KINDS, len(KINDS))
    at = sorted(draw.randrange(steps) for _ in range(count))
    return [
        PlannedKill(kind, step, draw.random(), draw.randrange(ranks))
        for kind, step in zip(kinds, at, strict=False)
    ]


class Training:
    """One attempt of `lathe pretrain` in separate processes, started like the command line does."""

    def __init__(self, command: list[str], output: Path, log: Path) -> None:
        self.output, self.log, self.began = output, log, time.monotonic()
        self._trace_before = _stamp(output / TRACE)
        self._first: tuple[float, int] | None = None  # time and step of this attempt's first sign
        # This process may itself be a worker; the training is not one of its group.
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                tied([sys.executable, "-m", "lathe", *command]),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment | {"PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )

    def finish(self) -> None:
        """Wait for its end.

        Raises:
            StageError: it failed; the message has its last lines.
        """
        if self.process.wait():
            tail = self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
            raise StageError(
                f"the training exited with status {self.process.returncode}:\n{tail}", Code.FAILED
            )

    def kill_at(self, planned: PlannedKill) -> Kill | None:
        """Wait for the planned moment and kill; None if the training ends before.

        Raises:
            StageError: it failed by itself.
        """
        while not self._is_time(planned):  # polled often, since a save takes milliseconds
            if self.process.poll() is not None:
                self.finish()
                return None
            time.sleep(POLL_SECONDS)

        # Which process is which rank is only known from the environment that the launcher has set.
        seconds = time.monotonic() - self.began
        ranks = dict[int, int]()  # process ids of the workers
        for pid in _descendants(self.process.pid):
            with suppress(OSError, ValueError, KeyError):
                words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                variables = dict(w.split("=", 1) for w in words.split("\0") if "=" in w)
                ranks[int(variables["RANK"])] = pid
        step = last_step(self.output)
        if planned.kind == "one rank" and len(ranks) > 1:
            _kill(ranks[planned.rank % len(ranks)])
            self.process.wait()  # the launcher ends the others
        self.end()
        saved = committed_steps(self.output / "state")
        return Kill(
            planned,
            step,
            saved_step=int(saved[-1].name.removeprefix("step_")) if saved else 0,
            unfinished=self._partial(),
            seconds=seconds,
            processes=max(len(ranks), 1),
        )

    def end(self) -> None:
        """Kill the launcher and all ranks, and wait until all have ended."""
        # The list is made before the first kill: orphans are no longer descendants.
        alive = [self.process.pid, *_descendants(self.process.pid)]
        while alive:
            for pid in alive:
                _kill(pid)
            self.process.poll()  # or the launcher would stay a zombie
            alive = [pid for pid in alive if _is_alive(pid)]

    def _is_time(self, planned: PlannedKill) -> bool:
        if _stamp(self.output / TRACE) == self._trace_before:  # an earlier attempt's
            return False
        # The duration of a step, for the wait within it, is measured from the first one on.
        now, step = time.monotonic(), last_step(self.output)
        self._first = self._first or (now, step)
        if step < planned.step:
            return False
        if planned.kind == "during a save":
            return bool(self._partial())
        began, first = self._first
        time.sleep(planned.wait * (now - began) / max(step - first, 1))
        return True

    def _partial(self) -> list[str]:
        return sorted(path.name for path in (self.output / "state").glob(f"*{PARTIAL}"))


def last_step(output: Path) -> int:
    """The last step that a training has logged; 0 before the first."""
    step = 0
    with suppress(OSError):
        # The last line may be incomplete.
        for line in reversed((output / TRACE).read_bytes().splitlines()):
            with suppress(ValueError, TypeError, KeyError):
                return int(json.loads(line)["step"])
    return step


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            != "Z"
        )
    return False


def _descendants(pid: int) -> list[int]:
    """The descendants of a process, in any order."""
    children: dict[int, list[int]] = {}
    # In /proc/PID/stat, the name of the process is in parentheses, which it may contain itself; the
    # state and the parent come after the last one.
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parent = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    descendants, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        descendants += below
        waiting += below
    return descendants
