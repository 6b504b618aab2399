r"""Concurrent streams: the server's loop in this process, and a real Triton server.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/streams.py [--threads 1] [--rounds 3] \
        [--requests 48]

GPT-2 124M shape, INT8, random weights; requests with 24 to 55 prompt tokens and 16 to 80 new
tokens, sampled. The cases take turns; ratios are what counts. Servers use onnxruntime unless
another `Serving.runtime` is named.
"""

import argparse
import json
import queue
import string
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from export import SHAPE, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lathe.export.proof import QUANTIZATION_SHARE
from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_base.parameters import Params
from lathe_base.storage import sha256
from lathe_serving.client import Client
from lathe_serving.client.load import Load, Objective, Summary, run_load, summarize
from lathe_serving.repository import write_repository
from lathe_serving.runtime.contract import Receiver
from lathe_serving.runtime.open_model import mean_difference
from lathe_serving.runtime.protocol import Chunk, parse
from lathe_serving.runtime.session import OnnxModel
from lathe_serving.runtime.text_generator import TextGenerator
from lathe_serving.server import ANY_PORTS, start

STREAMS = 16
ONNX, SINGLE, OPENVINO = "onnxruntime", "onnxruntime_single_stream", "openvino"


class InProcess:
    """The engine with the interface of Lathe's client."""

    def __init__(self, engine: TextGenerator) -> None:
        self.engine = engine

    def generate(self, prompt: str, **parameters: Any) -> None:
        list(self.stream(prompt, **parameters))

    def stream(self, prompt: str, **parameters: Any) -> Iterator[Chunk]:
        chunks: queue.Queue[Any] = queue.Queue()
        receiver = Receiver(chunks.put, lambda: False)
        assert self.engine.submit(prompt, parse(parameters, Params()), receiver)
        while True:
            chunk = chunks.get()
            yield chunk
            if chunk.finish_reason:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="number of threads")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--requests", type=int, default=48, help="number of requests")
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        written = write(folder)
        exported = written["int8"]
        complete(exported)
        prove(exported, written["fp32"])
        served = {
            (width, runtime): stack.enter_context(
                serve(exported, folder / f"{runtime}-{width}", width, runtime, arguments)
            )
            for width, runtime in ((STREAMS, ONNX), (1, ONNX), (1, SINGLE), (STREAMS, OPENVINO))
        }
        engine = TextGenerator(exported, 200, arguments.threads, STREAMS)
        stack.callback(engine.close)
        here = InProcess(engine)
        cases: dict[str, tuple[Any, int]] = {
            "in process, 1 stream": (here, 1),
            "Triton, 1 stream": (served[STREAMS, ONNX], 1),
            f"in process, {STREAMS} streams": (here, STREAMS),
            f"Triton, {STREAMS} streams": (served[STREAMS, ONNX], STREAMS),
            f"Triton, {STREAMS} clients, one at a time": (served[1, ONNX], STREAMS),
            f"1 stream, {SINGLE}": (served[1, SINGLE], 1),
            f"{STREAMS} streams, {OPENVINO}": (served[STREAMS, OPENVINO], STREAMS),
        }
        found: dict[str, list[Summary]] = {case: [] for case in cases}
        for turn in range(arguments.rounds + 1):
            for case, (client, clients) in cases.items():
                summary = load(client, clients, arguments.requests)
                if turn:  # the first round faults in the KV cache's memory
                    found[case].append(summary)
    report(found, arguments)


def complete(exported: Path) -> None:
    """Add tokenizer, config and metadata to an export, so that a server can use it."""
    words = map("".join, product(string.ascii_lowercase, repeat=4))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *islice(words, SHAPE.vocab_size - len(letters))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(exported / "tokenizer.json"))
    (exported / "config.json").write_text(json.dumps(SHAPE.to_json()))
    metadata = json.loads((exported / "export.json").read_text())
    graph = exported / "model.onnx"
    metadata |= {"flavour": "int8", "bytes": graph.stat().st_size, "sha256": sha256(graph)}
    metadata["source"] = metadata["sha256"]
    (exported / "export.json").write_text(json.dumps(metadata))


def prove(exported: Path, in_float: Path) -> None:
    """Add the samples and limits with which other runtimes are verified at startup."""
    samples = np.random.default_rng(0).integers(0, SHAPE.vocab_size, (2, 64)).tolist()
    change = mean_difference(OnnxModel(in_float, 1), OnnxModel(exported, 1), samples)
    metadata = json.loads((exported / "export.json").read_text())
    proof = {"max_error": 0.0, "tolerance": 1e-3, "mean_limit": QUANTIZATION_SHARE * change}
    metadata |= {"samples": samples, "proof": proof}
    (exported / "export.json").write_text(json.dumps(metadata))


@contextmanager
def serve(
    exported: Path, folder: Path, width: int, runtime: str, arguments: argparse.Namespace
) -> Iterator[Client]:
    limits = {"max_running": width, "max_queue": STREAMS, "threads": arguments.threads}
    serving = ServingSettings.model_validate({**ANY_PORTS, **limits, "runtime": runtime})
    repository = write_repository(exported, folder / "models", serving, GenerationSettings())
    with (
        start(repository, serving, folder / "server") as server,
        Client(server.state.grpc, server.state.model_name) as client,
    ):
        yield client


def load(client: Any, clients: int, requests: int) -> Summary:
    generator = np.random.default_rng(0)
    letters = string.ascii_uppercase
    prompts = ["".join(generator.choice(list(letters), 24 + i)) for i in range(32)]
    lengths = generator.integers(16, 81, requests).tolist()
    asked = run_load(client, Load(prompts, lengths, requests, clients))
    assert sorted(len(request.tokens) for request in asked) == sorted(lengths)
    return summarize(asked, Objective(1.0, 0.1))


def report(found: dict[str, list[Summary]], arguments: argparse.Namespace) -> None:
    print(f"GPT-2 124M shape, INT8, {arguments.threads} thread(s), {arguments.requests} requests")
    columns = ("tok/s", "first p50", "first p99", "between p50", "between p99")
    print(f"{'':36}" + "".join(f"{column:>13}" for column in columns))
    speeds = {}
    for case, summaries in found.items():
        speeds[case] = float(np.median([summary.tokens_per_second for summary in summaries]))
        row = f"{case:36}{speeds[case]:13.1f}"
        for part in ("first_token", "between_tokens"):
            for percentile in ("p50", "p99"):
                values = [getattr(summary, part)[percentile] for summary in summaries]
                row += f"{1e3 * float(np.median(values)):10.1f} ms"
        print(row)
    one, triton, many, triton_many, in_turn, single, openvino = speeds.values()
    print(f"Triton's share of the time of 1 stream: {1 - triton / one:.1%}")
    print(f"Triton's share of the time of {STREAMS}: {1 - triton_many / many:.1%}")
    print(
        f"{STREAMS} streams: {triton_many / triton:.2f}x one, {triton_many / in_turn:.2f}x in turn"
    )
    print(f"Triton with {SINGLE}, 1 stream: {single / triton:.2f}x")
    print(f"Triton with {OPENVINO}, {STREAMS} streams: {openvino / triton_many:.2f}x")


if __name__ == "__main__":
    main()
