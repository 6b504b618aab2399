r"""A neighbour's first token while strangers load the server: each endpoint, each kind of load.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/neighbours.py [--threads 1] \
        [--requests 15] [--rounds 3]

One server with its gateway, GPT-2 124M shape, INT8, random weights, 16 slots. The strangers are a
process of their own and have one key, limited to 8 requests at a time. The neighbour streams 32
tokens with another key, from the same endpoint (from chats, if the strangers tokenize). Its
requests with and without the strangers take turns by rounds; times are medians. `step` is its time
between two tokens meanwhile: while a step runs, a new request can only wait. A first token that
takes at most twice its time on the idle server and one step is not held up.

Loads: `burst`, 16 short requests at one instant, five times a second; `long prompt`, 4 clients
whose prompts fill the context; `cannot fit`, 8 clients with 480 kB of text; `n=8`, one client.
"""

import argparse
import json
import os
import random
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from urllib.parse import urlsplit

if TYPE_CHECKING:  # Lathe is imported where it is used: the strangers start without
    from lathe_serving.server import TritonServer

RUNNING, NEW = 16, 32
STRANGER, NEIGHBOUR = "strangers-key", "neighbours-key"
LIMITS = "keys: {strangers: {concurrent_requests: 8}}\n"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "v2": "/v2/models/gpt/generate_stream",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
LETTER = {"65": 100}  # of ASCII: a stream then has an event for each token
CLIENTS = {"burst": 16, "long prompt": 4, "cannot fit": 8, "n=8": 1}
CELLS = [
    (path, kind)
    for path in PATHS
    for kind in CLIENTS
    if path in ("completions", "chat", "v2") or kind in ("burst", "cannot fit")
]


def body(path: str, text: str, n: int, max_tokens: int, stream: bool) -> dict[str, Any]:
    """A request for one of PATHS."""
    if path == "v2":
        return {
            "text_input": text,
            "num_return_sequences": n,
            "decode_strategy": "sampling",
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "logit_bias": json.dumps(LETTER),
            "stream": stream,
        }
    if path == "tokenize":
        return {"model": "gpt", "prompt": text}
    if path == "detokenize":
        return {"model": "gpt", "tokens": list(text.encode())}
    given = (
        {"messages": [{"role": "user", "content": text}]} if path == "chat" else {"prompt": text}
    )
    options = {"n": n, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    return {"model": "gpt", "logit_bias": LETTER, **given, **options}


def load(address: str, path: str, kind: str, n_positions: int) -> None:
    """Send requests of one kind until this process is ended; prints a line when it has begun."""
    sizes = {"burst": 24, "long prompt": n_positions - 40, "cannot fit": 480_000, "n=8": 24}
    os.nice(19)  # the strangers must not take the server's processor
    together = threading.Barrier(CLIENTS[kind])

    def work(number: int) -> None:
        rng = random.Random(number)
        connection = HTTPConnection(address)
        for count in range(sys.maxsize):
            text = "".join(rng.choices(string.ascii_letters, k=sizes[kind]))
            asked = body(path, text, 8 if kind == "n=8" else 1, 16, False)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {STRANGER}"}
            content = json.dumps(asked)
            if kind == "burst":
                time.sleep(0.2)
                together.wait()
            connection.request("POST", PATHS[path], content, headers)
            reply = connection.getresponse()
            reply.read()
            expected = {400} if kind == "cannot fit" else {200, 429, 503}
            # Triton answers a stream with 200 before it is refused.
            assert reply.status in expected | ({200} if path == "v2" else set()), reply.status
            if count == 0 and number == 0:
                print("loading", flush=True)
            if reply.status in (429, 503) and kind != "burst":
                time.sleep(int(reply.headers["Retry-After"]))

    for number in range(CLIENTS[kind]):
        threading.Thread(target=work, args=(number,)).start()


@contextmanager
def loaded(address: str, path: str, kind: str, n_positions: int) -> Iterator[None]:
    """Let the strangers load the server while the block runs."""
    command = [sys.executable, __file__, "--load", address, path, kind, str(n_positions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as strangers:
        try:
            assert strangers.stdout is not None
            assert strangers.stdout.readline() == b"loading\n"
            yield
            assert strangers.poll() is None, "the load has failed"
        finally:
            strangers.kill()


def stream(address: str, path: str) -> tuple[float, float]:
    """Seconds of a neighbour's request to its first token, and between two tokens."""
    connection = HTTPConnection(address, timeout=120)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {NEIGHBOUR}"}
    content = json.dumps(body(path, "Once upon a time", 1, NEW, True))
    started = time.perf_counter()
    connection.request("POST", PATHS[path], content, headers)
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    times = [time.perf_counter() for line in reply if line.startswith(b"data: {")]
    connection.close()
    assert len(times) > 1
    return times[0] - started, (times[-1] - times[0]) / (len(times) - 1)


@dataclass(frozen=True)
class Cell:
    """Medians, in seconds: the neighbour's first token on the idle server and beside strangers, and
    the time of a step beside them."""

    path: str
    kind: str
    idle: float
    busy: float
    step: float

    @property
    def share(self) -> float:
        """The neighbour's first token, relative to what it may take."""
        return self.busy / (2 * self.idle + self.step)


def measure(
    address: str, path: str, kind: str, n_positions: int, requests: int, rounds: int = 3
) -> Cell:
    """Measure one cell.

    Args:
        requests: of the neighbour in each round, with and without strangers.
    """
    asked = path if path in ("completions", "chat", "v2") else "chat"
    stream(address, asked)
    idle, busy = [], []
    for _ in range(rounds):
        idle += [stream(address, asked) for _ in range(requests)]
        with loaded(address, path, kind, n_positions):
            busy += [stream(address, asked) for _ in range(requests)]
        time.sleep(0.5)  # what the strangers have left ends
    first, steps = zip(*busy, strict=True)
    return Cell(path, kind, median(time for time, _ in idle), median(first), median(steps))


@contextmanager
def served(exported: Path, folder: Path, threads: int) -> "Iterator[TritonServer]":
    """A server of a model with a chat template, whose gateway has the keys of both sides."""
    from lathe_base.config.settings import GenerationSettings, ServingSettings
    from lathe_serving.gateway.admission import KEYS_VARIABLE
    from lathe_serving.repository import write_repository
    from lathe_serving.server import ANY_PORTS, start

    serving = ServingSettings(**ANY_PORTS, max_running=RUNNING, max_queue=64, threads=threads)
    repository = write_repository(exported, folder / "models", serving, GenerationSettings())
    model = repository / "gpt/1"
    config = json.loads((model / "config.json").read_text())
    config["lathe"] = config.get("lathe", {}) | {"chat_template": TEMPLATE}
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    # A token as long as those of large tokenizers: whether a text fits shows as it is tokenized.
    last = config["vocab_size"] - 1
    vocabulary = {token: i for token, i in tokenizer["model"]["vocab"].items() if i != last}
    tokenizer["model"]["vocab"] = vocabulary | {"a" * 600: last}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "keys").write_text(f"{STRANGER} strangers\n{NEIGHBOUR} neighbour\n")
    (folder / "limits.yaml").write_text(LIMITS)
    with (
        patch.dict(os.environ, {KEYS_VARIABLE: str(folder / "keys")}),
        start(repository, serving, folder / "server", with_gateway=True) as server,
    ):
        yield server


def main() -> None:
    if sys.argv[1:2] == ["--load"]:
        address, path, kind, n_positions = sys.argv[2:]
        load(address, path, kind, int(n_positions))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="number of threads")
    parser.add_argument("--requests", type=int, default=15, help="number of requests per round")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    given = parser.parse_args()
    from export import write
    from streams import complete

    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        exported = write(folder)["int8"]
        complete(exported)
        n_positions = json.loads((exported / "export.json").read_text())["n_positions"]
        with served(exported, folder, given.threads) as server:
            assert server.state.openai is not None
            address = urlsplit(server.state.openai).netloc
            print(f"GPT-2 124M shape, INT8, {given.threads} thread(s), {RUNNING} slots")
            print("strangers' requests         idle      busy      step  of the bound")
            for path, kind in CELLS:
                cell = measure(address, path, kind, n_positions, given.requests, given.rounds)
                times = "".join(f"{1e3 * t:7.1f} ms" for t in (cell.idle, cell.busy, cell.step))
                print(f"{path:12} {kind:12}{times}{cell.share:10.2f}", flush=True)


if __name__ == "__main__":
    main()
