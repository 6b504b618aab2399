r"""First tokens under load: requests that arrive at random, and prompts that begin alike.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/arrivals.py [--threads 1] \
        [--requests 300] [--rates 0.5 0.7 0.9]

GPT-2 124M shape, INT8, random weights, the server's loop without Triton. Requests of 24 to 55
prompt tokens and 16 to 80 new ones arrive as a Poisson process, at shares of what 16 clients get
that ask again at once. "Alternating" reads one prompt's chunk of 128 tokens, then decodes, in
turns, which is what Lathe did before mixed steps. The cases take turns within every rate.
"""

import argparse
import string
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from export import write
from streams import STREAMS, InProcess, complete

from lathe.runtime import text_generator
from lathe.runtime.batcher import ENDED, PREFILL_CHUNK, Batcher
from lathe.runtime.text_generator import TextGenerator
from lathe.serve.load import Load, Objective, Summary, run_load, summarize

SHARED, OWN = 200, 24
COLUMNS = ("tok/s", "first p50", "first p99", "between p50", "between p99")


class Alternating(Batcher):
    """Reads, then decodes."""

    def _step(self) -> None:
        if (chunk := self._next_chunk(PREFILL_CHUNK)) is not None:
            self._read(chunk)
        for group in list(self._rows):
            if not group.is_wanted():
                self._go_on(group, ENDED)
        self._decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.5, 0.7, 0.9])
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        exported = write(Path(scratch))["int8"]
        complete(exported)
        print(f"GPT-2 124M shape, INT8, {arguments.threads} thread(s)")
        arrivals(exported, arguments)
        prefixes(exported, arguments)


def arrivals(exported: Path, arguments: argparse.Namespace) -> None:
    """Print the latencies of both loops at several rates."""
    cases = {
        f"alternating, {STREAMS} slots": (Alternating, STREAMS),
        f"mixed, {STREAMS} slots": (Batcher, STREAMS),
        f"alternating, {STREAMS * 3 // 2} slots": (Alternating, STREAMS * 3 // 2),
        f"mixed, {STREAMS * 3 // 2} slots": (Batcher, STREAMS * 3 // 2),
    }
    engines = {
        name: InProcess(engine(exported, kind, slots, 0, arguments))
        for name, (kind, slots) in cases.items()
    }
    header("clients that ask again at once")
    closed = {}
    for name, here in engines.items():
        ask(here, arguments.requests // 4, None)  # touches the memory of keys and values
        closed[name] = show(name, ask(here, arguments.requests, None))
    capacity = next(iter(closed.values())).requests_per_second
    for share in arguments.rates:
        header(f"{share:.0%} of {capacity:.2f} requests/s")
        for name, here in engines.items():
            show(name, ask(here, arguments.requests, share * capacity))
    for here in engines.values():
        here.engine.close()


def prefixes(exported: Path, arguments: argparse.Namespace) -> None:
    """Print the latencies of prompts that begin alike, with and without the cache of beginnings."""
    letters = list(string.ascii_uppercase)
    generator = np.random.default_rng(1)
    shared, own = ("".join(generator.choice(letters, n)) for n in (SHARED, 64 * OWN))
    prompts = [shared + own[i * OWN : (i + 1) * OWN] for i in range(64)]
    header(f"prompts of {SHARED} shared tokens and {OWN} of their own, one client")
    for name, n_bytes in (("each read whole", 0), ("beginning read once", 2**28)):
        here = InProcess(engine(exported, Batcher, STREAMS, n_bytes, arguments))
        with closing(here.engine):
            for prompt in prompts[:2]:
                here.generate(prompt, max_tokens=1)
            load = Load(prompts[2:], [8], 62, clients=1)
            show(name, summarize(run_load(here, load), Objective(1.0, 0.1)))


def engine(
    exported: Path, kind: type[Batcher], slots: int, n_bytes: int, arguments: argparse.Namespace
) -> TextGenerator:
    text_generator.Batcher = kind  # type: ignore[misc]
    return TextGenerator(exported, 200, arguments.threads, slots, 10**6, n_bytes)


def ask(here: InProcess, requests: int, rate: float | None) -> Summary:
    generator = np.random.default_rng(0)
    letters = list(string.ascii_uppercase)
    prompts = ["".join(generator.choice(letters, n)) for n in generator.integers(24, 56, requests)]
    lengths = generator.integers(16, 81, requests).tolist()
    load = Load(prompts, lengths, requests, STREAMS, rate)
    return summarize(run_load(here, load), Objective(1.0, 0.1))


def header(what: str) -> None:
    print(f"{what:44}" + "".join(f"{column:>13}" for column in COLUMNS), flush=True)


def show(name: str, summary: Summary) -> Summary:
    row = f"  {name:42}{summary.tokens_per_second:13.1f}"
    for part in (summary.first_token, summary.between_tokens):
        row += "".join(f"{1e3 * part[p]:10.1f} ms" for p in ("p50", "p99"))
    print(row, flush=True)
    return summary


if __name__ == "__main__":
    main()
