"""Worker process that imports everything once, builds the world, and forks for each case.

It reads case ids or the fuzzer's draws as lines of JSON, and replies with verdicts.
"""

import gc
import importlib
import json
import os
import pkgutil
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path

from lathe_base.ports import free_port
from tests.hostile import child, fuzzed, world
from tests.hostile.case import SECRET, Case, Skip, Verdict
from tests.hostile.check import judge
from tests.hostile.child import Outcome
from tests.hostile.component_call import call
from tests.hostile.sandbox import copy, files_with, snapshot

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 20.0
BUILD_SECONDS = 120.0
NOT_OURS = ("tmp/.ses",)  # Triton's
# Modules that start a client's threads, or belong to another environment.
NOT_IMPORTED = (
    "lathe.__main__",
    "lathe_paddle",
    "lathe_serving.triton",
    "lathe_base.storage.__main__",
)


class Bench:
    """Runs cases one after another, each in a new folder in `scratch`."""

    def __init__(self, good: Path, scratch: Path) -> None:
        self.good, self.scratch = good, scratch
        self._silent = socket.create_server(("127.0.0.1", 0))
        self._count = 0

    def verdict(self, case: Case) -> Verdict:
        verdict = self._verdict(case)
        # Retry: the machine may have been busy for a moment.
        is_late = verdict.verdict == "slow" and verdict.seconds < LIMIT_SECONDS
        return self._verdict(case) if is_late else verdict

    def _verdict(self, case: Case) -> Verdict:
        self._count += 1
        place = self.scratch / f"{os.getpid()}-{self._count}"
        box = place / "box"
        try:
            self._lay_out(case, place)
            before = _seen(place)
            outcome = self._run(case, place)
            complaint = case.after(box) if case.after else None
            after = _seen(place)
            if case.in_deleted:
                before.pop("box")
            leaks = [p for p in files_with(place, SECRET) if before.get(p) != after.get(p, ())]
            verdict, why = judge(case, outcome, before, after, leaks, complaint)
        except Skip as reason:
            return Verdict(case.id, "skipped", str(reason), 0, "", "")
        finally:
            remove(place)
        text = outcome.text.replace(str(box), "BOX")[-1500:]
        return Verdict(case.id, verdict, why, outcome.seconds, command_line(case), text)

    def _lay_out(self, case: Case, place: Path) -> None:
        for folder in (place / "box", place / "tmp", place / "home"):
            folder.mkdir(parents=True)
        for name in case.needs:
            if not (self.good / name).exists():
                raise Skip(f"no {name}")
            copy(self.good / name, place / "box" / name)
        for step in case.make:
            step(place / "box")

    def _run(self, case: Case, place: Path) -> Outcome:
        filled = self._filled(case.env)
        removed = {name for name, value in case.env.items() if value is None}
        environment = {k: v for k, v in (_base(place) | filled).items() if k not in removed}
        argv = [self._fill(w).replace("{box}", str(place / "box")) for w in case.argv]
        if case.fresh:
            return _fresh(argv, place / "box", environment)
        work = partial(_command, argv)
        if case.component is not None:
            work = partial(call, case.verb.removeprefix("component "), case.component)
        log = self.scratch / f"{place.name}.log"
        try:
            return child.run(
                work,
                place / "box" / case.cwd,
                log,
                environment,
                LIMIT_SECONDS,
                case.as_user,
                case.in_deleted,
            )
        finally:
            log.unlink(missing_ok=True)

    def _filled(self, env: object) -> dict[str, str]:
        assert hasattr(env, "items")
        return {name: self._fill(v) for name, v in env.items() if v is not None}

    def _fill(self, text: str) -> str:
        text = text.replace("{silent}", str(self._silent.getsockname()[1]))
        return text.replace("{s3}", self._store) if "{s3}" in text else text

    @cached_property
    def _store(self) -> str:
        """Address of an object store that expects another secret."""
        port = free_port()
        found = Path(sys.executable).with_name("rclone")
        folder = self.scratch / "store"
        (folder / "bucket").mkdir(parents=True, exist_ok=True)
        options = [
            "--addr",
            f"127.0.0.1:{port}",
            "--auth-key",
            "key,another",
            "--config",
            "/dev/null",
        ]
        command = [
            str(found if found.is_file() else "rclone"),
            "serve",
            "s3",
            str(folder),
            *options,
        ]
        self._rclone = subprocess.Popen(command, stdout=-3, stderr=-3)
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        return f"http://127.0.0.1:{port}"

    def close(self) -> None:
        with suppress(AttributeError):
            self._rclone.kill()


def command_line(case: Case) -> str:
    import shlex

    if case.component is not None:
        return f"{case.verb} {dict(case.component)}"
    shown = shlex.join(["lathe", *case.argv]).encode(errors="backslashreplace").decode()
    return shown if len(shown) < 600 else f"{shown[:600]}..."


def remove(place: Path) -> None:
    for folder in place.rglob("*"):
        if folder.is_dir() and not folder.is_symlink():
            folder.chmod(0o755)
    shutil.rmtree(place, ignore_errors=True)


def build(good: Path, scratch: Path) -> None:
    """Build the world with the commands under test."""
    work = good.with_name(f"{good.name}.part")
    place = scratch / "build"
    for folder in (place / "tmp", place / "home"):
        folder.mkdir(parents=True, exist_ok=True)
    log = scratch / "build.log"

    def run(argv: list[str]) -> Outcome:
        log.unlink(missing_ok=True)
        return child.run(partial(_command, argv), work, log, _base(place), BUILD_SECONDS)

    world.build(work, run)
    work.rename(good)


def import_everything() -> None:
    import lathe

    for module in pkgutil.walk_packages(lathe.__path__, "lathe."):
        if not module.name.startswith(NOT_IMPORTED):
            with suppress(ImportError):
                importlib.import_module(module.name)
    for name in ("safetensors.torch", "onnxruntime", "onnx", "matplotlib.figure", "kfp.dsl"):
        with suppress(ImportError):
            importlib.import_module(name)


def _seen(place: Path) -> dict[str, tuple[str, ...]]:
    """Snapshot of everything but the home folder, where caches may appear."""
    found = snapshot(place)
    return {
        path: entry
        for path, entry in found.items()
        if path.split("/")[0] != "home" and path not in NOT_OURS
    }


def _base(place: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
        "LANG": "C.UTF-8",
        "COLUMNS": "400",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LATHE_NETWORK_TIMEOUT": "0.7",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


def _command(argv: list[str]) -> None:
    from lathe.cli import main

    sys.argv = ["lathe", *argv]
    main()


def _fresh(argv: list[str], box: Path, environment: dict[str, str]) -> Outcome:
    started = time.monotonic()
    command = [sys.executable, "-m", "lathe", *argv]
    try:
        done = subprocess.run(
            command,
            cwd=box,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as late:
        return Outcome(None, (late.stdout or b"").decode(errors="replace"), LIMIT_SECONDS)
    text = done.stdout.decode(errors="backslashreplace")
    return Outcome(done.returncode, text, time.monotonic() - started)


def main() -> None:
    good, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout carries only verdicts
    scratch.mkdir(parents=True, exist_ok=True)
    import_everything()
    gc.freeze()  # garbage collection in a fork would copy the pages of all imported modules
    if not good.exists():
        build(good, scratch)
    from tests.hostile.table import CASES

    known = {case.id: case for case in CASES}
    bench = Bench(good, scratch)
    try:
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            verdict = bench.verdict(known[asked] if isinstance(asked, str) else fuzzed.case(asked))
            print(json.dumps(asdict(verdict)), file=answers, flush=True)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
