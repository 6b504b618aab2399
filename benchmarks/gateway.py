r"""Overhead of the gateway: 16 streams through its two APIs, and through Triton's gRPC and HTTP.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/gateway.py [--threads 1] [--rounds 5] \
        [--requests 48]

One server, GPT-2 124M shape, INT8, random weights; requests with 24 to 55 prompt tokens and 16 to
80 new tokens, sampled. The variants take turns; ratios are what counts. HTTP clients use urllib3
and json, so that neither side pays for a heavy client. Besides throughput it prints the CPU time of
the gateway and of Triton with its backends, which other work on the machine hardly affects.
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import urllib3
from export import write
from streams import STREAMS, complete, load

from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_serving.client import Client
from lathe_serving.client.load import Summary
from lathe_serving.repository import write_repository
from lathe_serving.runtime.protocol import Chunk
from lathe_serving.server import ANY_PORTS, start
from lathe_serving.state import HOST, ServerState

COLUMNS = (("first_token", "p50"), ("between_tokens", "p50"), ("between_tokens", "p99"))


class OpenAIClient:
    """The gateway's OpenAI API with the interface of Lathe's client."""

    def __init__(self, url: str) -> None:
        self.url, self.pool = f"{url}/completions", urllib3.PoolManager(maxsize=STREAMS)

    def generate(self, prompt: str, **parameters: Any) -> None:
        list(self.stream(prompt, **parameters))

    def stream(self, prompt: str, max_tokens: int, **parameters: Any) -> Iterator[Chunk]:
        body = {
            "model": "gpt",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": "min_tokens" in parameters,
            "seed": parameters.get("seed"),
            "top_k": 50,
            "top_p": 0.75,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply = self.pool.request("POST", self.url, json=body, preload_content=False)
        pieces = 0
        for line in lines(reply):
            if line == b"data: [DONE]":
                return
            piece = json.loads(line.removeprefix(b"data: "))
            if piece["choices"]:
                choice = piece["choices"][0]
                # The last piece may have text that was held back, and no token.
                tokens = [0] if choice["text"] and not choice["finish_reason"] else []
                pieces += len(tokens)
                yield Chunk(choice["text"], tokens, "")
            else:  # usage: a piece of several tokens was counted as one
                yield Chunk("", [0] * (piece["usage"]["completion_tokens"] - pieces), "")


class GenerateClient:
    """`generate_stream` with the interface of Lathe's client."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}/v2/models/gpt/generate_stream"
        self.pool = urllib3.PoolManager(maxsize=STREAMS)

    def generate(self, prompt: str, **parameters: Any) -> None:
        list(self.stream(prompt, **parameters))

    def stream(self, prompt: str, **parameters: Any) -> Iterator[Chunk]:
        body = {"text_input": prompt, "stream": True, **parameters}
        reply = self.pool.request("POST", self.url, json=body, preload_content=False)
        for line in lines(reply):
            piece = json.loads(line.removeprefix(b"data: "))
            yield Chunk(piece["text_output"], [0] * piece["token_count"], piece["finish_reason"])


def lines(reply: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a stream as they arrive, but for empty ones and comments, which keep the
    connection alive."""
    held = b""
    for part in reply.read_chunked():
        *whole, held = (held + part).split(b"\n")
        yield from (line for line in whole if line and not line.startswith(b":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="number of threads")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--requests", type=int, default=48, help="number of requests")
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        exported = write(folder)["int8"]
        complete(exported)
        limits = {"max_running": STREAMS, "max_queue": STREAMS, "threads": arguments.threads}
        serving = ServingSettings(**ANY_PORTS, **limits)
        repository = write_repository(exported, folder / "models", serving, GenerationSettings())
        with (
            start(repository, serving, folder / "server", with_gateway=True) as server,
            Client(server.state.grpc, "gpt") as grpc,
        ):
            state = server.state
            assert state.openai is not None
            ways: dict[str, Any] = {
                "gRPC": grpc,
                "OpenAI": OpenAIClient(state.openai),
                "Triton": GenerateClient(f"{HOST}:{state.triton_port}"),
                "KServe": GenerateClient(state.http),
            }
            found: dict[str, list[Summary]] = {way: [] for way in ways}
            spent: dict[str, list[np.ndarray]] = {way: [] for way in ways}
            for turn in range(arguments.rounds + 1):
                for way in ways if turn % 2 else reversed(ways):
                    before = processor_seconds(state)
                    summary = load(ways[way], STREAMS, arguments.requests)
                    if turn:  # the first round faults in the KV cache's memory
                        found[way].append(summary)
                        spent[way].append(processor_seconds(state) - before)
    report(found, arguments)
    for way in ("OpenAI", "KServe"):
        shares = sorted(gateway / triton for gateway, triton in spent[way])
        print(
            f"{way}: the gateway's processor time is {np.median(shares):.1%} of Triton's "
            f"(rounds: {shares[0]:.1%} to {shares[-1]:.1%})"
        )
    for way, other in (("OpenAI", "gRPC"), ("KServe", "Triton")):
        pairs = zip(spent[way], spent[other], strict=True)
        ratios = sorted(ours.sum() / theirs.sum() for ours, theirs in pairs)
        print(
            f"{way}: all of the server's processor time is {np.median(ratios):.1%} of {other}'s "
            f"(rounds: {ratios[0]:.1%} to {ratios[-1]:.1%})"
        )


def processor_seconds(state: ServerState) -> np.ndarray:
    """CPU seconds of the gateway, and of Triton with its backends, since their start."""
    ticks = np.zeros(2)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has exited
            command = (folder / "cmdline").read_text(encoding="utf-8", errors="replace")
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if "lathe_serving.guard" in command:
                continue
            if f"--port={state.gateway_port}\0" in command:
                ticks[0] += int(fields[11]) + int(fields[12])
            elif state.shared_memory in command:
                ticks[1] += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def report(found: dict[str, list[Summary]], arguments: argparse.Namespace) -> None:
    print(f"GPT-2 124M shape, INT8, {arguments.threads} thread(s), {arguments.requests} requests")
    print(f"{'':8}{'tok/s':>9}{'first p50':>13}{'between p50':>13}{'between p99':>13}")
    for way, summaries in found.items():
        row = f"{way:8}{np.median([s.tokens_per_second for s in summaries]):9.1f}"
        for part, percentile in COLUMNS:
            values = [getattr(summary, part)[percentile] for summary in summaries]
            row += f"{1e3 * float(np.median(values)):10.1f} ms"
        print(row)
    compare("the OpenAI API", found["OpenAI"], "gRPC's", found["gRPC"])
    compare("KServe's interface", found["KServe"], "plain HTTP's", found["Triton"])


def compare(name: str, ours: list[Summary], other: str, theirs: list[Summary]) -> None:
    pairs = zip(ours, theirs, strict=True)
    ratios = sorted(our.tokens_per_second / their.tokens_per_second for our, their in pairs)
    print(
        f"{name} has {np.median(ratios):.1%} of {other} throughput "
        f"(rounds: {ratios[0]:.1%} to {ratios[-1]:.1%})"
    )


if __name__ == "__main__":
    main()
