r"""First tokens under load: requests that arrive at random, and prompts that begin alike.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/arrivals.py [--rounds 4] \
        [--requests 400] [--rates 0.5 0.7 0.9]

GPT-2 124M shape, INT8, random weights, one thread, the server's loop without Triton. Requests of 24
to 55 prompt tokens and 16 to 80 new ones arrive as a Poisson process, at shares of what 16 clients
get that ask again at once. "Alternating" reads one prompt's chunk of 128 tokens, then decodes, in
turns, which is what Lathe did before mixed steps. All take turns; figures are medians of rounds.

The clock is the processor time of the loop's thread, which waits for nothing but arrivals: whatever
else the machine does, even other guests of the same host, has no part in the latencies.
"""

import argparse
import string
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from export import write
from streams import STREAMS, complete

from lathe.serve.client.load import Objective, Request, Summary, summarize
from lathe.serve.runtime import text_generator
from lathe.serve.runtime.batcher import ENDED, PREFILL_CHUNK, Batcher
from lathe.serve.runtime.params import Params
from lathe.serve.runtime.protocol import Chunk
from lathe.serve.runtime.sequence_group import Receiver
from lathe.serve.runtime.text_generator import TextGenerator

SHARED, OWN = 200, 24
MORE = 24  # slots, for arrivals that would wait for one of STREAMS
COLUMNS = ("tok/s", "first p50", "first p99", "between p50", "between p99")


class Mixed(Batcher):
    """The server's loop, of which a caller takes every step."""

    def _work(self) -> None:
        """No thread."""

    def step(self) -> bool:
        """Whether there was anything to do."""
        if is_busy := bool(self._waiting or self._reading or self._rows):
            self._step()
        return is_busy


class Alternating(Mixed):
    """Reads, then decodes."""

    def _step(self) -> None:
        if (chunk := self._next_chunk(PREFILL_CHUNK)) is not None:
            self._read(chunk)
        for group in list(self._rows):
            if not group.keeps_running():
                self._go_on(group, ENDED)
        self._decode()


KINDS = {
    f"alternating, {STREAMS} slots": (Alternating, STREAMS),
    f"mixed, {STREAMS} slots": (Mixed, STREAMS),
    f"mixed, {MORE} slots": (Mixed, MORE),
}


@dataclass
class Asked:
    """A request, with when it arrives and when its tokens came."""

    prompt: str
    length: int
    arrival: float
    tokens: list[float] = field(default_factory=list)


class Run:
    """Requests that arrive at a loop, on a clock that only its steps move."""

    def __init__(
        self, kind: type[Mixed], exported: Path, slots: int, prefix_bytes: int = 0
    ) -> None:
        text_generator.Batcher = kind  # type: ignore[misc]
        self.generator = TextGenerator(exported, 200, 1, slots, 10**6, prefix_bytes)
        self.clock, self._begun, self._inside = 0.0, 0.0, 0

    def play(self, requests: list[Asked], clients: int | None = None) -> list[Request]:
        """Let requests arrive, or be sent by so many clients, each after its last answer."""
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
        assert all(len(asked.tokens) == asked.length for asked in requests)
        return [Request(asked.arrival, tuple(asked.tokens)) for asked in requests]

    def _is_there(self, asked: Asked) -> bool:
        return asked.arrival <= self.clock

    def _now(self) -> float:
        return self.clock + time.thread_time() - self._begun

    def _submit(self, asked: Asked, is_now: bool) -> None:
        def deliver(chunk: Chunk | Exception) -> None:
            assert isinstance(chunk, Chunk), chunk
            asked.tokens += [self._now()] * len(chunk.tokens)
            self._inside -= bool(chunk.finish_reason)

        asked.arrival = self.clock if is_now else asked.arrival
        limits = Params(max_tokens=asked.length, min_tokens=asked.length, seed=asked.length)
        assert self.generator.submit(asked.prompt, limits, Receiver(deliver, lambda: False))
        self._inside += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.5, 0.7, 0.9])
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        exported = write(Path(scratch))["int8"]
        complete(exported)
        prefixes(exported)
        arrivals(exported, arguments)


def arrivals(exported: Path, arguments: argparse.Namespace) -> None:
    """Print the latencies of all loops at several rates."""
    runs = {name: Run(kind, exported, slots) for name, (kind, slots) in KINDS.items()}
    n, rounds = arguments.requests, arguments.rounds
    found: dict[tuple[float, str], list[Summary]] = {}
    capacities = []
    for turn in range(rounds + 1):
        for name, run in runs.items():
            full = run.play(asked(n // 4, 1.0, turn), STREAMS)
            if turn:  # the first one touches the memory of keys and values
                found.setdefault((1.0, name), []).append(figures(full))
            if name == next(iter(runs)):
                capacities.append(steady(full))
        for share, (name, run) in product(arguments.rates, runs.items()):
            if turn:
                requests = asked(n, share * capacities[-1], turn)
                found.setdefault((share, name), []).append(figures(run.play(requests)))
    for share in (1.0, *arguments.rates):
        rate = f"{share:.0%} of capacity, which is {np.median(capacities):.2f} requests/s"
        header(rate if share < 1 else f"{STREAMS} clients that ask again at once")
        for name in runs:
            show(name, found[share, name])


def prefixes(exported: Path) -> None:
    """Print the latencies of prompts that begin alike, with and without the cache of beginnings."""
    letters = list(string.ascii_uppercase)
    generator = np.random.default_rng(1)
    shared, *own = ("".join(generator.choice(letters, n)) for n in (SHARED, *[OWN] * 64))
    header(f"prompts of {SHARED} shared tokens and {OWN} of their own, one client")
    for name, n_bytes in (("each read whole", 0), ("their beginning read once", 2**28)):
        run = Run(Mixed, exported, STREAMS, n_bytes)
        run.play([Asked(shared + end, 1, 0.0) for end in own[:2]], 1)
        show(name, [figures(run.play([Asked(shared + end, 8, 0.0) for end in own[2:]], 1))])


def asked(n: int, rate: float, seed: int) -> list[Asked]:
    """The requests, which are the same at every rate but for their times."""
    generator = np.random.default_rng(seed)
    letters = list(string.ascii_uppercase)
    lengths = generator.integers([24, 16], [56, 81], (n, 2)).tolist()
    prompts = ["".join(generator.choice(letters, length)) for length, _ in lengths]
    times = np.cumsum(generator.exponential(1 / rate, n)).tolist()
    return [Asked(*each) for each in zip(prompts, [new for _, new in lengths], times, strict=True)]


def header(what: str) -> None:
    print(f"{what:68}" + "".join(f"{column:>13}" for column in COLUMNS), flush=True)


def figures(requests: list[Request]) -> Summary:
    return summarize(requests, Objective(1.0, 0.1))


def steady(requests: list[Request]) -> float:
    """Requests/s of a closed loop between its first and its last quarter."""
    ends = sorted(request.tokens[-1] for request in requests)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first])


def show(name: str, rounds: list[Summary]) -> None:
    """Print the medians of some rounds."""
    row = f"  {name:66}{np.median([summary.tokens_per_second for summary in rounds]):13.1f}"
    for part in ("first_token", "between_tokens"):
        for percentile in ("p50", "p99"):
            values = [getattr(summary, part)[percentile] for summary in rounds]
            row += f"{1e3 * float(np.median(values)):10.1f} ms"
    print(row, flush=True)


if __name__ == "__main__":
    main()
