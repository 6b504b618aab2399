"""A server under half an hour of mixed load: nothing crashes, leaks, or goes without an answer."""

import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from tritonclient.grpc import service_pb2

from lathe.config.settings import ServingSettings
from lathe.errors import UserError
from lathe.model.checkpoint import Checkpoint
from lathe.production.agreement import greedy_tokens
from lathe.production.rehearsal import ask, ask_http
from lathe.serve.client import Client
from lathe.serve.server import TritonServer, start
from tests.serve.test_backend import GREEDY, LONG
from tests.serve.test_server import processes

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("LATHE_SOAK_SECONDS", "1800"))
N_CLIENTS = 6
RELOADS = (0.1, 0.4)  # of the time
N_SAMPLES = 200  # of memory
PROMPTS = ["x", "naïve 🙂 café", "0123456789" * 9, "All that glitters", "z" * 300]


@pytest.fixture(scope="module")
def reloadable(
    tmp_path_factory: pytest.TempPathFactory,
    triton: None,
    repository: Path,
    serving: ServingSettings,
) -> Iterator[TritonServer]:
    options = ("--model-control-mode=explicit", "--load-model=*")
    with start(repository, serving, tmp_path_factory.mktemp("soak"), options=options) as server:
        yield server


def text(*values: bytes) -> dict[str, Any]:
    contents = {"bytes_contents": list(values)}
    return {
        "name": "text_input",
        "datatype": "BYTES",
        "shape": [len(values)],
        "contents": contents,
    }


NUMBER = {"datatype": "INT64", "shape": [1], "contents": {"int64_contents": [7]}}
MALFORMED: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([text(b"a", b"b")], {}, "unexpected shape"),
    ([NUMBER | {"name": "text_input"}], {}, "data-type is 'INT64'"),
    ([text(b"a"), NUMBER | {"name": "temperature"}], {}, "data-type is 'INT64'"),
    ([text(b"a"), NUMBER | {"name": "nonsense"}], {}, "unexpected inference input 'nonsense'"),
    ([NUMBER | {"name": "max_tokens"}], {}, "text_input is missing"),
    ([text(b"ab\xff")], {}, "not UTF-8"),
    ([text(b"")], {}, "text_input is empty"),
    ([text(b"y" * 1_000_000)], {}, "cannot fit"),
    ([text(b"a")], {"max_tokens": {"int64_param": -5}}, "max_tokens -5"),
    ([text(b"a")], {"min_dec_len": {"int64_param": -1}}, "min_dec_len -1"),
    ([text(b"a")], {"temperature": {"double_param": float("nan")}}, "temperature nan"),
    ([text(b"a")], {"top_p": {"string_param": "half"}}, "top_p 'half' is not of type"),
    ([text(b"a")], {"temprature": {"double_param": 1.0}}, "did you mean temperature"),
]


class Load:
    """What the clients do, each at random, and what went otherwise than it should."""

    def __init__(self, server: TritonServer, checkpoint: Checkpoint) -> None:
        self.server = server
        self.greedy = {prompt: greedy_tokens(checkpoint, prompt, 40) for prompt in PROMPTS}
        self.seen: dict[Any, list[int]] = {}
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []
        self.end = time.monotonic() + SECONDS
        self.kinds: list[Callable[[Client, random.Random], None]] = [
            self.ask_greedy,
            self.ask_greedy,
            self.ask_over_http,
            self.ask_again,
            self.leave,
            self.leave_over_http,
            self.run_out_of_time,
            self.send_malformed,
            self.send_malformed,
        ]

    def run(self, number: int) -> None:
        rng = random.Random(number)
        with Client(self.server.state.grpc, "gpt", timeout_seconds=60) as client:
            while time.monotonic() < self.end and len(self.failures) < 10:
                kind = rng.choice(self.kinds)
                try:
                    kind(client, rng)
                except Exception as error:
                    self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")
                self.done[kind.__name__] += 1

    def ask_greedy(self, client: Client, rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        assert ask(client, prompt, max_tokens=40, **GREEDY).tokens == self.greedy[prompt]

    def ask_over_http(self, client: Client, rng: random.Random) -> None:
        prompt, stream = rng.choice(PROMPTS), rng.random() < 0.5
        answer = ask_http(self.server.state, prompt, stream, max_tokens=40, **GREEDY)
        assert answer == self.greedy[prompt]

    def ask_again(self, client: Client, rng: random.Random) -> None:
        """Samples and beams are the same every time."""
        prompt, seed = rng.choice(PROMPTS), rng.randrange(5)
        options = rng.choice([{"seed": seed}, {"decode_strategy": "beam_search", "num_beams": 3}])
        chunks = client.generate_all(prompt, max_tokens=30, num_return_sequences=2, **options)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        assert self.seen.setdefault((prompt, *options.items()), tokens) == tokens

    def leave(self, client: Client, rng: random.Random) -> None:
        stream = client.stream("leaving", **LONG)
        for _ in range(rng.randrange(1, 20)):
            next(stream)
        stream.close()

    def leave_over_http(self, client: Client, rng: random.Random) -> None:
        url = f"http://{self.server.state.http}/v2/models/gpt/generate_stream"
        body = {"text_input": "leaving", "stream": True, **LONG}
        with requests.post(url, json=body, timeout=60, stream=True) as reply:
            next(reply.iter_lines())

    def run_out_of_time(self, client: Client, rng: random.Random) -> None:
        try:
            chunk = client.generate("late", timeout_seconds=rng.uniform(0.001, 0.1), **LONG)
        except UserError as error:
            assert "no token within timeout_seconds" in str(error)
        else:
            assert chunk.finish_reason == "timeout"
            assert 0 < len(chunk.tokens) < 1000

    def send_malformed(self, client: Client, rng: random.Random) -> None:
        inputs, parameters, message = rng.choice(MALFORMED)
        request = service_pb2.ModelInferRequest(model_name="gpt", inputs=inputs)
        for name, value in parameters.items():
            for field, content in value.items():
                setattr(request.parameters[name], field, content)
        (response, *rest) = client._stub.ModelStreamInfer(iter([request]), timeout=60)
        assert re.search(message, response.error_message), response.error_message
        assert not rest


def test_half_an_hour(reloadable: TritonServer, checkpoint: Checkpoint) -> None:
    load = Load(reloadable, checkpoint)
    clients = [threading.Thread(target=load.run, args=(i,)) for i in range(N_CLIENTS)]
    for thread in clients:
        thread.start()
    memory: list[int] = []
    reloads = [int(part * N_SAMPLES) for part in RELOADS]
    for i in range(N_SAMPLES):
        if i in reloads:
            Path(reloadable.state.repository, "gpt", "config.pbtxt").touch()  # or nothing is done
            url = f"http://{reloadable.state.http}/v2/repository/models/gpt/load"
            requests.post(url, json={}, timeout=60).raise_for_status()
        memory.append(resident(reloadable.state.shared_memory))
        time.sleep(SECONDS / N_SAMPLES)
    for thread in clients:
        thread.join(60)
    print(dict(load.done), memory[:: N_SAMPLES // 20])
    assert load.failures == []
    assert not any(thread.is_alive() for thread in clients)
    assert load.done.total() > 2 * SECONDS
    half = N_SAMPLES // 2
    before, after = memory[half : half + half // 2], memory[half + half // 2 :]
    assert np.median(after) < 1.05 * np.median(before)


def resident(word: str) -> int:
    """KiB of all the server's processes, what they share counted once."""
    total = 0
    for pid in processes(word):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # the stub of before a reload
        total += int(re.search(r"Pss: +(\d+)", rollup)[1])  # type: ignore[index]
    return total
