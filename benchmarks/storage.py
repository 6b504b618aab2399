"""Uploading and downloading a gigabyte, compared to the bare minio client.

    python benchmarks/storage.py [--megabytes 1000] [--rounds 5] [--scratch /dev/shm]

The store is `rclone serve s3` on loopback, on the same CPUs. Lathe transfers a folder with its
manifest and verifies all digests; the client uses `fput_object` and `fget_object` for the same
file. They take turns; ratios are what counts.
"""

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lathe_base.ports import free_port
from lathe_base.storage import fetch, remove, sha256, upload
from lathe_base.storage.s3 import s3_client

BUCKET = "benchmark"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the file in MB")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--scratch", help="working folder; default: the system's temporary folder")
    arguments = parser.parse_args()
    with TemporaryDirectory(dir=arguments.scratch) as scratch, store(Path(scratch) / "store"):
        folder = Path(scratch)
        source = folder / "source" / "file"
        source.parent.mkdir()
        with source.open("wb") as file:
            for _ in range(arguments.megabytes):
                file.write(os.urandom(10**6))
        times = measure(source, folder, arguments.rounds)
    report(times, arguments.megabytes)


def measure(source: Path, folder: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each case in every round."""
    client = s3_client()
    client.make_bucket(BUCKET)
    expected = sha256(source)

    def fetched() -> Path:
        shutil.rmtree(folder / "fetched", ignore_errors=True)
        return folder / "fetched"

    cases: dict[str, Callable[[], object]] = {
        "up, minio": lambda: client.fput_object(BUCKET, "bare", str(source)),
        "up, Lathe": lambda: upload(source.parent, f"s3://{BUCKET}/lathe/"),
        "down, minio": lambda: client.fget_object(BUCKET, "bare", str(folder / "fetched/file")),
        "down, Lathe": lambda: fetch(f"s3://{BUCKET}/lathe/", folder / "fetched"),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for number in range(rounds):
        remove(f"s3://{BUCKET}/lathe/")
        remove(f"s3://{BUCKET}/bare")
        names = list(cases) if number % 2 == 0 else [*list(cases)[1::-1], *list(cases)[:1:-1]]
        for name in names:
            target = fetched()
            os.sync()
            started, busy = time.perf_counter(), time.process_time()
            cases[name]()
            times[name].append((time.perf_counter() - started, time.process_time() - busy))
            if name.startswith("down"):
                assert sha256(target / "file") == expected, name
    return times


def report(times: dict[str, list[tuple[float, float]]], megabytes: int) -> None:
    print("| | minio | Lathe | Lathe is, median of rounds | client's CPU, minio and Lathe |")
    print("|---|---|---|---|---|")
    for way in ("up", "down"):
        cases = [times[f"{way}, minio"], times[f"{way}, Lathe"]]
        ratios = sorted(bare[0] / ours[0] for bare, ours in zip(*cases, strict=True))
        seconds, busy = ([statistics.median(t[i] for t in case) for case in cases] for i in (0, 1))
        speeds = " | ".join(f"{megabytes / s:.0f} MB/s" for s in seconds)
        ratio = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {way} | {speeds} | {ratio} | {busy[0]:.1f} and {busy[1]:.1f} s |")


@contextmanager
def store(folder: Path) -> Iterator[None]:
    """Run `rclone serve s3` on `folder`, and set the environment for it."""
    folder.mkdir()
    address = f"127.0.0.1:{free_port()}"
    rclone = Path(sys.executable).with_name("rclone")
    server = subprocess.Popen(
        [
            *(str(rclone) if rclone.is_file() else "rclone", "serve", "s3", str(folder)),
            *("--addr", address, "--auth-key", "lathe-key,lathe-secret"),
            *("--config", os.devnull, "--log-level", "CRITICAL"),
        ]
    )
    os.environ["AWS_ENDPOINT_URL"] = f"http://{address}"
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = (
        "lathe-key",
        "lathe-secret",
    )
    try:
        host, _, port = address.partition(":")
        for _ in range(100):
            with socket.socket() as s:
                if s.connect_ex((host, int(port))) == 0:
                    break
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    main()
