r"""Time to first token under load: random arrivals, and prompts with a shared prefix.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/arrivals.py [--rounds 4] \
        [--requests 400] [--rates 0.5 0.7 0.9]

GPT-2 124M shape, INT8, random weights, one thread, the server's loop without Triton. Requests with
24 to 55 prompt tokens and 16 to 80 new tokens arrive as a Poisson process, at fractions of the
throughput of 16 clients in a closed loop. "Alternating" prefills a chunk of 128 tokens, then
decodes, in turns, as Lathe did before mixed steps. All variants take turns; figures are medians of
rounds.

Time is measured as CPU time of the loop's thread, which waits only for arrivals: other work on the
machine or its host does not affect the latencies.
"""

import argparse
import string
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
from export import write
from streams import STREAMS, complete

from lathe_base.parameters import Params
from lathe_serving.client.load import Objective, RequestTimes, Summary, summarize
from lathe_serving.runtime import text_generator
from lathe_serving.runtime.batcher import PREFILL_CHUNK, Batcher
from lathe_serving.runtime.contract import Receiver
from lathe_serving.runtime.protocol import Chunk
from lathe_serving.runtime.text_generator import TextGenerator

SHARED, OWN = 200, 24
MORE = 24  # slots, for arrivals that would wait with only STREAMS
COLUMNS = ("tok/s", "first p50", "first p99", "between p50", "between p99")


class Mixed(Batcher):
    """The server's loop without a thread; the caller runs every step."""

    def _work(self) -> None:
        """Do nothing: there is no thread."""

    def step(self) -> bool:
        """Run one step; returns False if there was nothing to do."""
        if is_busy := bool(self._waiting or self._reading or self._rows):
            self._step()
        return is_busy


class Alternating(Mixed):
    """A loop that alternates between prefilling and decoding."""

    def _step(self) -> None:
        self._drop_cancelled()
        for group, size in self._plan(PREFILL_CHUNK):
            self._read(group, self._chunk(group, size))
        self._decode()


KINDS = {
    f"alternating, {STREAMS} slots": (Alternating, STREAMS),
    f"mixed, {STREAMS} slots": (Mixed, STREAMS),
    f"mixed, {MORE} slots": (Mixed, MORE),
}


@dataclass
class TimedRequest:
    """A request, with its time of arrival and the times of its tokens."""

    prompt: str
    length: int
    arrival: float
    tokens: list[float] = field(default_factory=list)


class Run:
    """Runs requests through a loop, with a clock that advances only by its steps."""

    def __init__(
        self, kind: type[Mixed], exported: Path, slots: int, prefix_bytes: int = 0
    ) -> None:
        with patch.object(text_generator, "Batcher", kind):
            self.generator = TextGenerator(exported, 200, 1, slots, 10**6, prefix_bytes)
        self.clock, self._begun, self._inside = 0.0, 0.0, 0

    def play(self, requests: list[TimedRequest], clients: int | None = None) -> list[RequestTimes]:
        """Run requests at their times of arrival, or in a closed loop of `clients` clients."""
        coming, batcher, self.clock = deque(requests), self.generator._batcher, 0.0
        assert isinstance(batcher, Mixed)
        while coming or self._inside:
            while coming and (self._inside < clients if clients else self._is_there(coming[0])):
                self._submit(coming.popleft(), clients is not None)
            self._begun = time.thread_time()
            if batcher.step():
                self.clock = self._now()
            else:
                self.clock = coming[0].arrival
        assert all(len(request.tokens) == request.length for request in requests)
        return [RequestTimes(request.arrival, tuple(request.tokens)) for request in requests]

    def _is_there(self, request: TimedRequest) -> bool:
        return request.arrival <= self.clock

    def _now(self) -> float:
        return self.clock + time.thread_time() - self._begun

    def _submit(self, request: TimedRequest, is_now: bool) -> None:
        def deliver(chunk: Chunk | Exception) -> None:
            assert isinstance(chunk, Chunk), chunk
            request.tokens += [self._now()] * len(chunk.tokens)
            self._inside -= bool(chunk.finish_reason)

        request.arrival = self.clock if is_now else request.arrival
        limits = Params(max_tokens=request.length, min_tokens=request.length, seed=request.length)
        assert self.generator.submit(request.prompt, limits, Receiver(deliver, lambda: False))
        self._inside += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="number of rounds")
    parser.add_argument("--requests", type=int, default=400, help="number of requests")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[0.5, 0.7, 0.9],
        help="request rates as fractions of capacity",
    )
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        exported = write(Path(scratch))["int8"]
        complete(exported)
        prefixes(exported)
        arrivals(exported, arguments)


def arrivals(exported: Path, arguments: argparse.Namespace) -> None:
    """Print the latencies of all loops at several request rates."""
    runs = {name: Run(kind, exported, slots) for name, (kind, slots) in KINDS.items()}
    n, rounds = arguments.requests, arguments.rounds
    found: dict[tuple[float, str], list[Summary]] = {}
    capacities = []
    for turn in range(rounds + 1):
        for name, run in runs.items():
            full = run.play(random_requests(n // 4, 1.0, turn), STREAMS)
            if turn:  # the first round faults in the KV cache's memory
                found.setdefault((1.0, name), []).append(figures(full))
            if name == next(iter(runs)):
                capacities.append(steady(full))
        for share, (name, run) in product(arguments.rates, runs.items()):
            if turn:
                requests = random_requests(n, share * capacities[-1], turn)
                found.setdefault((share, name), []).append(figures(run.play(requests)))
    for share in (1.0, *arguments.rates):
        rate = f"{share:.0%} of capacity, which is {np.median(capacities):.2f} requests/s"
        header(rate if share < 1 else f"{STREAMS} clients that ask again at once")
        for name in runs:
            show(name, found[share, name])


def prefixes(exported: Path) -> None:
    """Print the latencies of prompts with a shared prefix, with and without the prefix cache."""
    letters = list(string.ascii_uppercase)
    generator = np.random.default_rng(1)
    shared, *own = ("".join(generator.choice(letters, n)) for n in (SHARED, *[OWN] * 64))
    header(f"prompts of {SHARED} shared tokens and {OWN} of their own, one client")
    for name, n_bytes in (("each read whole", 0), ("their beginning read once", 2**28)):
        run = Run(Mixed, exported, STREAMS, n_bytes)
        run.play([TimedRequest(shared + end, 1, 0.0) for end in own[:2]], 1)
        show(name, [figures(run.play([TimedRequest(shared + end, 8, 0.0) for end in own[2:]], 1))])


def random_requests(n: int, rate: float, seed: int) -> list[TimedRequest]:
    """Random requests, which differ between rates only in their times of arrival."""
    generator = np.random.default_rng(seed)
    letters = list(string.ascii_uppercase)
    lengths = generator.integers([24, 16], [56, 81], (n, 2)).tolist()
    prompts = ["".join(generator.choice(letters, length)) for length, _ in lengths]
    times = np.cumsum(generator.exponential(1 / rate, n)).tolist()
    return [
        TimedRequest(*each)
        for each in zip(prompts, [new for _, new in lengths], times, strict=True)
    ]


def header(what: str) -> None:
    print(f"{what:68}" + "".join(f"{column:>13}" for column in COLUMNS), flush=True)


def figures(requests: list[RequestTimes]) -> Summary:
    return summarize(requests, Objective(1.0, 0.1))


def steady(requests: list[RequestTimes]) -> float:
    """Requests per second of a closed loop, without its first and last quarter."""
    ends = sorted(request.tokens[-1] for request in requests)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first])


def show(name: str, rounds: list[Summary]) -> None:
    """Print the medians of the rounds."""
    row = f"  {name:66}{np.median([summary.tokens_per_second for summary in rounds]):13.1f}"
    for part in ("first_token", "between_tokens"):
        for percentile in ("p50", "p99"):
            values = [getattr(summary, part)[percentile] for summary in rounds]
            row += f"{1e3 * float(np.median(values)):10.1f} ms"
    print(row, flush=True)


if __name__ == "__main__":
    main()
