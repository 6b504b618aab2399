"""Mixed load through the gateway during kills and reloads: every request gets one correct response
or a clear error, and memory does not grow."""

import itertools
import os
import random
import re
import signal
import string
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from lathe_base.config.settings import ServingSettings
from lathe_serving import state as serve_state
from lathe_serving.server import start
from lathe_serving.state import ServerState
from tests.serve.test_gateway_process import gateway_of, reload
from tests.serve.test_server import processes
from tests.support.openai_requests import OpenAIRequest, RefusedError, ask

SECONDS = float(os.environ.get("LATHE_SOAK_SECONDS", "1800"))
N_CLIENTS = 6
EVENTS = {
    0.04: "kill the gateway",
    0.07: "kill the server",
    0.10: "reload the model",
    0.92: "reload the model",
    0.94: "kill the gateway",
    0.97: "kill the server",
}
"""Events by the fraction of the test's duration; memory is compared in between."""
MEASURED = (0.17, 0.9)
N_SAMPLES = 400
STEADY_SECONDS = 1200.0  # memory is not steady earlier
PAUSE_SECONDS = 0.05  # before a client retries a rejected request
SETTLE_SECONDS = 3.0  # for responses in flight, after everything is ready again
BAD: list[dict[str, Any]] = [
    {"max_tokens": -1},
    {"temperature": 9},
    {"prompt": ""},
    {"prompt": "x" * 2000},
    {"prompt": [400]},
    {"n": 100},
    {"stop": [""]},
    {"suffix": "x"},
]


@pytest.fixture
def state(
    triton: None, repository: Path, serving: ServingSettings, tmp_path: Path
) -> Iterator[ServerState]:
    options = ("--model-control-mode=explicit", "--load-model=*")
    server = start(repository, serving, tmp_path, options=options, with_gateway=True)
    server.detach()
    yield server.state
    serve_state.stop(tmp_path)


class Load:
    """Random requests of the clients, and the failures."""

    def __init__(self, state: ServerState, seconds: float) -> None:
        self.address = f"{state.openai}".removesuffix("/v1")
        self.asked = list(_requests(random.Random(0)))
        self.alone = {one: ask(self.address, one) for one in self.asked}
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []
        self.disturbed = [(0.0, 0.0)]  # intervals affected by events
        self.events = dict(EVENTS)
        self.end = time.monotonic() + seconds  # at the earliest: all events must be done
        self.kinds: list[Callable[[random.Random], str]] = [
            *[self.ask] * 6,
            *[self.leave] * 2,
            *[self.send_bad] * 2,
        ]

    def run(self, number: int) -> None:
        rng = random.Random(number)
        while (time.monotonic() < self.end or self.events) and len(self.failures) < 10:
            kind, started = rng.choice(self.kinds), time.monotonic()
            try:
                verdict = kind(rng)
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
                verdict = self.verdict(f"{kind.__name__}: {error!r}", started)
            except RefusedError as error:
                is_full = error.code == "overloaded"
                verdict = (
                    "refused" if is_full else self.verdict(f"{kind.__name__}: {error}", started)
                )
            except Exception as error:
                verdict = "wrong"
                self.failures.append(f"{kind.__name__}: {error!r}")
            self.done[verdict] += 1
            if verdict.startswith(("refused", "failed")):
                time.sleep(PAUSE_SECONDS)

    def verdict(self, what: str, started: float) -> str:
        """Record a failure, unless it happened during an event."""
        first, last = self.disturbed[-1]
        if started < last and time.monotonic() > first:
            return "failed with what we killed"
        self.failures.append(what)
        return "failed by itself"

    def ask(self, rng: random.Random) -> str:
        one, stream = rng.choice(self.asked), rng.random() < 0.5
        if (found := ask(self.address, one, stream)) != self.alone[one]:
            raise ValueError(f"{one}: {found}, alone {self.alone[one]}")
        return "right"

    def leave(self, rng: random.Random) -> str:
        body = rng.choice(self.asked).body | {"stream": True, "n": 1, "max_tokens": 400}
        url, options = f"{self.address}/v1/completions", {"stream": True, "timeout": 60}
        with closing(requests.post(url, json=body, **options)) as reply:  # type: ignore[arg-type]
            for _ in itertools.islice(reply.iter_lines(), rng.randrange(20)):
                pass
        return "broken off"

    def send_bad(self, rng: random.Random) -> str:
        body = rng.choice(self.asked).body | rng.choice(BAD)
        try:
            ask(self.address, OpenAIRequest(body))
        except RefusedError as error:
            if error.status == 400:
                return "bad, refused"
            raise
        raise ValueError(f"{body} was accepted")

    def do(self, event: str, state: ServerState, folder: Path) -> None:
        """Perform one of `EVENTS` and wait until everything is ready again."""
        self.disturbed.append((time.monotonic(), float("inf")))
        if event == "kill the server":
            now = serve_state.find(folder)
            assert now is not None
            os.kill(now.server.pid, signal.SIGKILL)
        elif event == "kill the gateway":
            os.kill(gateway_of(state), signal.SIGKILL)
        else:
            Path(
                state.repository, "gpt", "config.pbtxt"
            ).touch()  # otherwise reloading does nothing
            now = serve_state.find(folder)
            assert now is not None
            reload(now)
        time.sleep(0.5)
        deadline = time.monotonic() + 60
        while not self.is_ready():
            assert time.monotonic() < deadline, event
            time.sleep(0.05)
        first, last = self.disturbed[-1][0], time.monotonic()
        print(f"{event}: ready after {last - first:.1f} s", flush=True)
        self.disturbed[-1] = (first, last + SETTLE_SECONDS)

    def is_ready(self) -> bool:
        with suppress(requests.ConnectionError):
            return requests.get(f"{self.address}/health", timeout=30).status_code == 200
        return False


def _requests(rng: random.Random) -> Iterator[OpenAIRequest]:
    for i in range(40):
        prompt = "The same words come first. " * (i % 4)
        prompt += "".join(rng.choices(string.printable, k=20))
        shapes: list[dict[str, Any]] = [
            {"prompt": prompt, "temperature": 0},
            {"prompt": prompt, "seed": i, "n": 2},
            {"prompt": [prompt, "x"], "temperature": 0, "logprobs": 2},
            {"prompt": prompt, "temperature": 0, "stop": ["e", "a"]},
        ]
        yield OpenAIRequest(shapes[i % 4] | {"max_tokens": rng.randrange(8, 64)})


def resident(state: ServerState) -> dict[str, float]:
    """Resident memory in MiB by kind of process."""
    found: dict[str, float] = defaultdict(float)
    for word in (state.shared_memory, f"--port={state.gateway_port}"):
        for pid, line in processes(word).items():
            name = Path(line.split()[0]).name
            kind = {"tritonserver": name, "triton_python_backend_stub": "backends"}.get(name)
            kind = kind or ("guard" if "lathe_serving.guard" in line else "gateway")
            with suppress(OSError, TypeError):  # the process has exited
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                if word == state.shared_memory or kind == "gateway":
                    found[kind] += int(re.search(r"Rss: +(\d+)", rollup)[1]) / 1024  # type: ignore[index]
    return found


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(60.0, marks=pytest.mark.slow), pytest.param(SECONDS, marks=pytest.mark.soak)],
)
def test_mixed_load(state: ServerState, tmp_path: Path, seconds: float) -> None:
    load = Load(state, seconds)
    clients = [threading.Thread(target=load.run, args=(i,)) for i in range(N_CLIENTS)]
    started = time.monotonic()
    for thread in clients:
        thread.start()
    memory: list[tuple[float, dict[str, float]]] = []
    events = load.events
    while (part := (time.monotonic() - started) / seconds) < 1 or events:
        if events and part >= min(events):
            load.do(events[min(events)], state, tmp_path)
            del events[min(events)]
        memory.append((part, resident(state)))
        time.sleep(seconds / N_SAMPLES)
    for thread in clients:
        thread.join(90)
    grown = growth(memory)
    print(
        dict(load.done), {kind: [round(x, 3) for x in g] for kind, g in grown.items()}, flush=True
    )
    assert load.failures == []
    assert not any(thread.is_alive() for thread in clients), "unanswered"
    assert load.done["right"] > seconds and load.done["broken off"] > seconds / 10
    if seconds >= STEADY_SECONDS:
        for kind in ("backends", "gateway", "guard"):
            assert grown[kind][2] < 1.05, kind


def growth(memory: list[tuple[float, dict[str, float]]]) -> dict[str, tuple[float, float, float]]:
    """Memory by kind of process at the start and end of `MEASURED` in MiB, and their ratio."""
    first, last = MEASURED
    fifth = (last - first) / 5
    found = {}
    for kind in ("tritonserver", "backends", "gateway", "guard"):
        before, after = (
            float(np.median([m[kind] for part, m in memory if low <= part <= low + fifth]))
            for low in (first, last - fifth)
        )
        found[kind] = (before, after, after / before)
    return found
