"""Load test of a live endpoint, with the latencies that clients see.

Closed loop: a fixed number of clients, each of which sends its next request as soon as it is
answered. Open loop: requests arrive at a given rate (a Poisson process) whether or not the server
keeps up, like those of real users.

The latencies are those of vLLM's `benchmark_serving`: of each request the time to first token
(TTFT), the mean time per output token after the first (TPOT) and the end-to-end latency (E2E), and
of each chunk of a stream the time since the one before it (inter-token latency, ITL). Several
tokens may arrive in one chunk, for instance the tokens of one character.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError
from lathe_base.progress import bar
from lathe_serving.client import Client

PERCENTILES = (50, 90, 99)

OPENINGS = (
    "The function returns",
    "In the beginning there was",
    "A list of all",
    "It is not possible to",
    "When the user",
    "This class is used to",
    "There are many ways to",
    "For example, if you",
)
"""The default prompts."""


@dataclass(frozen=True)
class Load:
    """The requests to send.

    Attributes:
        prompts: taken in turn.
        lengths: number of new tokens of each request, taken in turn.
        requests: total number of requests.
        clients: number of clients of a closed loop.
        rate: requests per second of an open loop; None for a closed loop.
        seed: random seed of arrival times and sampling.
        seconds: time after which a closed loop sends no new requests.
    """

    prompts: Sequence[str]
    lengths: Sequence[int]
    requests: int
    clients: int = 8
    rate: float | None = None
    seed: int = 0
    seconds: float = math.inf


@dataclass(frozen=True)
class Objective:
    """Latency objective in seconds: time to first token, and time per output token."""

    first_token: float
    per_output_token: float


@dataclass(frozen=True)
class RequestTimes:
    """One request as its client saw it.

    Attributes:
        sent: when it was sent, in seconds since the load began.
        tokens: when each token arrived, in seconds since the load began.
        error: the first line of the error that ended it.
    """

    sent: float
    tokens: tuple[float, ...]
    error: str | None = None

    @property
    def answered(self) -> bool:
        """Whether the request got an answer."""
        return bool(self.tokens) and not self.error

    @property
    def first_token(self) -> float:
        """Seconds to the first token (TTFT)."""
        return self.tokens[0] - self.sent

    @property
    def per_output_token(self) -> float | None:
        """Mean seconds per token after the first (TPOT); None if there is only one."""
        further = len(self.tokens) - 1
        return (self.tokens[-1] - self.tokens[0]) / further if further else None

    @property
    def between_tokens(self) -> NDArray[np.float64]:
        """(n - 1,) seconds from each of the n chunks to the next (ITL)."""
        return np.diff(np.unique(self.tokens))  # tokens of one chunk have the same time

    @property
    def end_to_end(self) -> float:
        """Seconds to the last token (E2E)."""
        return self.tokens[-1] - self.sent

    def meets(self, objective: Objective) -> bool:
        """Whether the request was answered within the objective."""
        return (
            self.answered
            and self.first_token <= objective.first_token
            and (self.per_output_token or 0.0) <= objective.per_output_token
        )


@dataclass(frozen=True)
class Summary:
    """Figures of a load; `goodput`: requests/s that met the objective.

    The latencies, by the names of `RequestTimes`, are in seconds: mean and percentiles.
    """

    seconds: float
    requests: int
    failed: int
    tokens_per_second: float
    requests_per_second: float
    goodput: float
    first_token: dict[str, float]
    per_output_token: dict[str, float]
    between_tokens: dict[str, float]
    end_to_end: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The figures for `load.json`."""
        return asdict(self)


def run_load(client: Client, load: Load) -> list[RequestTimes]:
    """Send the load to the server and wait for the last answer.

    Raises:
        UserError: the server cannot be reached.
    """
    client.generate(load.prompts[0], max_tokens=1)  # also warms up onnxruntime
    started = time.perf_counter()
    done: list[RequestTimes] = []
    lock = threading.Lock()
    total = load.requests if load.seconds == math.inf else None  # unknown: time may end it first
    with bar("requests", total) as progress:

        def ask(number: int) -> None:
            prompt = load.prompts[number % len(load.prompts)]
            length = load.lengths[number % len(load.lengths)]
            # `min_tokens` too: the load is to be the same whatever the model would like to say.
            options = {"max_tokens": length, "min_tokens": length, "seed": load.seed + number}
            sent, times, failure = time.perf_counter() - started, list[float](), None
            try:
                for chunk in client.stream(prompt, **options):
                    times += [time.perf_counter() - started] * len(chunk.tokens)
            except Exception as error:  # one request fails, and the load goes on
                failure = str(error).splitlines()[0]
            request = RequestTimes(sent, tuple(times), failure)
            with lock:
                done.append(request)
                progress.advance()

        drive = _closed if load.rate is None else _open
        drive(ask, load)
    return sorted(done, key=lambda request: request.sent)


def summarize(requests: Sequence[RequestTimes], objective: Objective) -> Summary:
    """Compute the figures of a load.

    Raises:
        UserError: no request was answered.
    """
    answered = [request for request in requests if request.answered]
    if not answered:
        first = next((request.error for request in requests if request.error), "no tokens")
        raise UserError(
            f"none of {len(requests)} requests was answered: {first}",
            "check the server's log",
            Code.SERVER_ERROR,
        )
    # From the first request sent, also a failed one, to the last token: rates are of all that time.
    ends = max(request.tokens[-1] for request in answered)
    seconds = ends - min(request.sent for request in requests)
    good = sum(request.meets(objective) for request in requests)  # failed ones meet none
    return Summary(
        seconds=seconds,
        requests=len(requests),
        failed=len(requests) - len(answered),
        tokens_per_second=sum(len(request.tokens) for request in answered) / seconds,
        requests_per_second=len(answered) / seconds,
        goodput=good / seconds,
        first_token=_statistics([request.first_token for request in answered]),
        per_output_token=_statistics(
            [r.per_output_token for r in answered if r.per_output_token is not None]
        ),
        between_tokens=_statistics(np.concatenate([r.between_tokens for r in answered])),
        end_to_end=_statistics([request.end_to_end for request in answered]),
    )


def _statistics(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """`mean`, and the percentiles `p50`, `p90` and `p99`; empty without values."""
    if not len(values):  # no request had a second token
        return {}
    values_at = np.percentile(np.asarray(values), PERCENTILES)
    percentiles = {f"p{p}": float(value) for p, value in zip(PERCENTILES, values_at, strict=True)}
    return {"mean": float(np.mean(values)), **percentiles}


def _closed(ask: Callable[[int], None], load: Load) -> None:
    numbers = iter(range(load.requests))  # shared by all clients: who is free takes the next
    end = time.perf_counter() + load.seconds

    def ask_on(_: int) -> None:
        while time.perf_counter() < end and (number := next(numbers, None)) is not None:
            ask(number)

    with ThreadPoolExecutor(load.clients) as pool:
        list(pool.map(ask_on, range(load.clients)))


def _open(ask: Callable[[int], None], load: Load) -> None:
    assert load.rate is not None
    # Pauses of a Poisson process. Arrivals are their sums, not one after another: a thread that
    # wakes up late must not make all later requests late, too.
    pauses = np.random.default_rng(load.seed).exponential(1 / load.rate, load.requests)
    started = time.perf_counter()
    with ThreadPoolExecutor(load.requests) as pool:  # a thread for each: none waits for another
        for number, arrival in enumerate(np.cumsum(pauses)):
            time.sleep(max(0.0, started + arrival - time.perf_counter()))
            pool.submit(ask, number)
