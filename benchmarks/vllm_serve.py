r"""The gateway's cost in front of vLLM: `Serving.runtime: vllm` beside plain `vllm serve`.

    python benchmarks/vllm_serve.py CHECKPOINT [--streams 1 16 64] [--rounds 3] [--requests 48]

Both load the same export with the same settings, get the same requests over OpenAI's completions
(24 to 55 prompt tokens, 16 to 80 new ones, sampled), and take turns: ratios are what counts. On a
machine with a GPU, the same command measures there.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import urllib3
from gateway import COLUMNS, OpenAIClient
from streams import load

from lathe.export.export import write
from lathe.export.formats import write_formats
from lathe.model.checkpoint import load_checkpoint
from lathe_base.artifacts.kinds import EXPORT
from lathe_base.config.settings import ExportSettings, GenerationSettings, ServingSettings
from lathe_base.ports import free_port
from lathe_base.storage import atomic_folder
from lathe_serving.client.load import Summary
from lathe_serving.environment import vllm_python
from lathe_serving.repository import write_repository
from lathe_serving.runtime.protocol import VLLM_FORMAT
from lathe_serving.runtime.vllm_engine import ENVIRONMENT
from lathe_serving.server import ANY_PORTS, start


@contextmanager
def vllm_serve(model: Path, streams: int, log: Path) -> Iterator[str]:
    """Run `vllm serve`; yields the address of its API."""
    port = free_port()
    # What `vllm serve` runs: the command itself does not find its version in the build for CPUs.
    command = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "gpt"]
    command += ["--port", str(port), "--max-num-seqs", str(streams), "--generation-config", "vllm"]
    if not torch.cuda.is_available():
        command += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(2**30)]
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        while True:
            with suppress(urllib3.exceptions.HTTPError):
                urllib3.request("GET", f"http://127.0.0.1:{port}/health", retries=False)
                break
            assert server.poll() is None, log.read_text()
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--requests", type=int, default=48, help="number of requests")
    arguments = parser.parse_args()
    most = max(arguments.streams)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        exported = folder / "export"
        with atomic_folder(exported, EXPORT) as work:
            checkpoint = load_checkpoint(arguments.checkpoint)
            settings = ExportSettings.model_validate({"formats": [VLLM_FORMAT]})
            metadata = write(checkpoint, work, settings)
            files = write_formats(checkpoint, work, settings)[VLLM_FORMAT]
            metadata["formats"] = {VLLM_FORMAT: {"files": files}}
            (work / EXPORT.metadata_file).write_text(json.dumps(metadata))
        serving = ServingSettings(
            **ANY_PORTS, max_running=most, max_queue=most, runtime="vllm", prefix_cache_mib=256
        )
        repository = write_repository(exported, folder / "models", serving, GenerationSettings())
        with (
            start(repository, serving, folder / "server", with_gateway=True) as server,
            vllm_serve(exported / VLLM_FORMAT, most, folder / "vllm.log") as plain,
        ):
            assert server.state.openai is not None
            ways = {"Lathe": OpenAIClient(server.state.openai), "vllm serve": OpenAIClient(plain)}
            print(f"{'':24}{'tok/s':>9}{'first p50':>13}{'between p50':>13}{'between p99':>13}")
            for streams in arguments.streams:
                found: dict[str, list[Summary]] = {way: [] for way in ways}
                for turn in range(arguments.rounds + 1):
                    for way in ways if turn % 2 else reversed(ways):
                        summary = load(ways[way], streams, arguments.requests)
                        if turn:  # the first round warms up
                            found[way].append(summary)
                report(found, streams)


def report(found: dict[str, list[Summary]], streams: int) -> None:
    for way, summaries in found.items():
        row = f"{way}, {streams} streams".ljust(24)
        row += f"{np.median([summary.tokens_per_second for summary in summaries]):9.1f}"
        for part, percentile in COLUMNS:
            values = [getattr(summary, part)[percentile] for summary in summaries]
            row += f"{1e3 * float(np.median(values)):10.1f} ms"
        print(row)
    ratios = [
        ours.tokens_per_second / theirs.tokens_per_second
        for ours, theirs in zip(*found.values(), strict=True)
    ]
    print(f"tokens/s of vllm serve's: {min(ratios):.1%} to {max(ratios):.1%}")


if __name__ == "__main__":
    main()
