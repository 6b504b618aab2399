r"""Behaviour above capacity: random arrivals at up to three times the sustainable rate, through the
OpenAI API.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/overload.py [--threads 1] \
        [--rounds 3] [--seconds 20] [--running 8] [--max-wait SECONDS]

One server, GPT-2 124M shape, INT8, random weights; requests with 24 to 55 prompt tokens and 16 to
80 new tokens, sampled, as Poisson arrivals. `full` is a closed loop with as many clients as slots:
no request waits, and the throughput is the capacity, which the last column compares with. Rejected
requests are not retried. The rates take turns.
"""

import argparse
import json
import string
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import urllib3
from export import write
from streams import complete

from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_serving.repository import write_repository
from lathe_serving.server import ANY_PORTS, start

RATES = (0.5, 0.9, 1.5, 3.0)
THREADS = 256


@dataclass(frozen=True)
class Outcome:
    """A finished request: status, latency, and the Retry-After header of a rejection."""

    status: int
    seconds: float
    retry_after: str | None


class LoadClient:
    """Sends random requests."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/completions"
        self._pool = urllib3.PoolManager(maxsize=THREADS)
        self._generator = np.random.default_rng(0)

    def bodies(self) -> Iterator[bytes]:
        letters = list(string.ascii_uppercase)
        while True:
            prompt = "".join(self._generator.choice(letters, self._generator.integers(24, 56)))
            length = int(self._generator.integers(16, 81))
            body = {"model": "gpt", "prompt": prompt, "max_tokens": length, "ignore_eos": True}
            yield json.dumps(body).encode()

    def ask(self, body: bytes) -> Outcome:
        started = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        reply = self._pool.request(
            "POST", self._url, body=body, headers=headers, retries=False, timeout=300
        )
        seconds = time.perf_counter() - started
        return Outcome(reply.status, seconds, reply.headers.get("Retry-After"))

    def closed(self, clients: int, seconds: float) -> list[Outcome]:
        """Send requests in a closed loop of `clients` clients."""
        bodies, end = self.bodies(), time.perf_counter() + seconds
        shares = [[next(bodies) for _ in range(400)] for _ in range(clients)]

        def run(share: list[bytes]) -> list[Outcome]:
            done: list[Outcome] = []
            while time.perf_counter() < end:
                done.append(self.ask(share[len(done) % len(share)]))
            return done

        with ThreadPoolExecutor(clients) as pool:
            return [one for done in pool.map(run, shares) for one in done]

    def open(self, rate: float, seconds: float) -> list[Outcome]:
        """Send requests as Poisson arrivals."""
        bodies, at, futures = self.bodies(), time.perf_counter(), []
        with ThreadPoolExecutor(THREADS) as pool:
            end = at + seconds
            while (at := at + self._generator.exponential(1 / rate)) < end:
                time.sleep(max(0.0, at - time.perf_counter()))
                futures.append(pool.submit(self.ask, next(bodies)))
        return [future.result() for future in futures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="number of threads")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds per rate and round")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--running", type=int, default=8, help="number of slots")
    parser.add_argument("--max-wait", type=float, help="maximum waiting time in seconds")
    given = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        exported = write(folder)["int8"]
        complete(exported)
        serving = ServingSettings(
            **ANY_PORTS,
            max_running=given.running,
            threads=given.threads,
            max_wait_seconds=given.max_wait,
        )
        repository = write_repository(exported, folder / "models", serving, GenerationSettings())
        with start(repository, serving, folder / "server", with_gateway=True) as server:
            assert server.state.openai is not None
            client = LoadClient(server.state.openai)
            client.closed(given.running, 5)  # faults in the KV cache's memory
            found: dict[str, list[Outcome]] = {"full": [], **{f"{rate:g}x": [] for rate in RATES}}
            for _ in range(given.rounds):
                full = client.closed(given.running, given.seconds)
                found["full"] += full
                for rate in RATES:
                    capacity = len(full) / given.seconds
                    found[f"{rate:g}x"] += client.open(rate * capacity, given.seconds)
            print(f"GPT-2 124M shape, INT8, {given.threads} thread(s), {given.running} slots")
            report(found)


def report(found: dict[str, list[Outcome]]) -> None:
    columns = ("offered", "accepted", "refused", "p99 refusal", "Retry-After", "p50", "p99", "")
    print("".join(f"{column:>13}" for column in columns))
    usual = None
    for rate, outcomes in found.items():
        accepted = [one.seconds for one in outcomes if one.status == 200]
        refused = [one for one in outcomes if one.status == 503]
        assert len(accepted) + len(refused) == len(outcomes), {one.status for one in outcomes}
        row = f"{rate:>13}{len(accepted):13}{len(refused):13}"
        if refused:
            slowest = float(np.percentile([one.seconds for one in refused], 99))
            said = sorted(int(one.retry_after or -1) for one in refused)
            row += f"{1e3 * slowest:10.1f} ms{f'{said[0]} to {said[-1]}':>13}"
        else:
            row += f"{'-':>13}{'-':>13}"
        p50, p99 = (float(np.percentile(accepted, part)) for part in (50, 99))
        usual = usual or p99
        print(row + f"{p50:11.2f} s{p99:11.2f} s{p99 / usual:11.2f}x")


if __name__ == "__main__":
    main()
