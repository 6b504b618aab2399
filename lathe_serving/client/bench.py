"""`lathe bench-serve`: a load test of a live endpoint, with its figures and an HTML page."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from lathe_base.artifacts.kinds import LOAD
from lathe_base.errors import Code, UserError
from lathe_base.inputs import read_text
from lathe_base.pages.html import Picture, picture, render
from lathe_base.pages.style import Theme, draw
from lathe_base.storage import atomic_folder, claim_output_folder
from lathe_serving.client import Client, connect
from lathe_serving.client.load import (
    OPENINGS,
    Load,
    Objective,
    RequestTimes,
    Summary,
    run_load,
    summarize,
)

RECORD, PAGE = LOAD.metadata_file, "load.html"


def bench(
    tokens: tuple[int, int],
    shape: dict[str, Any],
    objective: tuple[float, float],
    prompts: Path | None,
    url: str | None,
    model_name: str,
    output: Path,
) -> Summary:
    """Run a load test; write `load.json` (with every request) and `load.html` into `output`.

    Args:
        tokens: minimum and maximum number of new tokens of a request.
        shape: `clients`, `rate`, `requests` and `seed` of a `Load`.
        objective: limits in seconds: time to first token, and time per output token.

    Raises:
        UserError: no server, no prompts, a time or rate that is not positive, or no response at
            all.
    """
    seconds = dict(zip(("--first-token", "--between-tokens"), objective, strict=True))
    for option, value in {**seconds, "--rate": shape["rate"]}.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(
                f"{option} {value}: not a positive number",
                "give a positive number, or omit the option",
                Code.INVALID_VALUE,
            )
    claim_output_folder(output, LOAD, prompts)  # before minutes of load, not after them
    lines = list(OPENINGS) if prompts is None else _lines(prompts)
    generator = np.random.default_rng(shape["seed"])
    # Lengths of answers are those that the load asks for, not those of the model: two servers with
    # different models get the same load.
    lengths = generator.integers(tokens[0], tokens[1] + 1, shape["requests"]).tolist()
    load, goal = Load(lines, lengths, **shape), Objective(*objective)
    with Client(url, model_name) if url is not None else connect() as client:
        requests = run_load(client, load)
    summary = summarize(requests, goal)
    arrivals = f"{load.rate:g} requests/s" if load.rate else f"{load.clients} clients"
    what = f"{arrivals}, {load.requests} requests of {tokens[0]} to {tokens[1]} new tokens"
    record = {
        "load": what,
        "summary": summary.to_json(),
        "requests": [vars(request) for request in requests],
    }
    with atomic_folder(output, LOAD) as work:
        (work / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (work / PAGE).write_text(load_page(what, summary, requests, goal), encoding="utf-8")
    return summary


def _lines(path: Path) -> list[str]:
    hint = "give a text file with one prompt per line"
    lines = [line for line in read_text(path, hint).splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{path}: no prompts", hint, Code.TOO_LITTLE_DATA)
    return lines


def load_page(
    what: str, summary: Summary, requests: Sequence[RequestTimes], objective: Objective
) -> str:
    """A self-contained HTML page.

    Args:
        what: description of the load.
    """
    answered = [request for request in requests if request.answered]
    first = np.array([request.first_token for request in answered])
    per_token = [request.per_output_token for request in answered]
    further = np.array([seconds for seconds in per_token if seconds is not None])
    pictures = [
        _distribution("Time to first token (TTFT)", first, objective.first_token),
        _distribution("Time per output token (TPOT)", further, objective.per_output_token),
    ]
    return render(
        "lathe_serving/client/load_page.html.j2",
        "Load test",
        what=what,
        summary=summary,
        objective=objective,
        pictures=pictures,
    )


def _distribution(title: str, seconds: NDArray[np.float64], limit: float) -> Picture:
    ordered = np.sort(1e3 * seconds)
    share = 100 * np.arange(1, len(ordered) + 1) / max(len(ordered), 1)

    def paint(axes: Axes, theme: Theme) -> None:
        axes.step(ordered, share, where="post", color=theme.color(0))
        axes.axvline(1e3 * limit, color=theme.accent, linewidth=1, linestyle=(0, (4, 2)))
        axes.set_xlabel("milliseconds")
        axes.set_ylabel("% of requests")
        axes.set_ylim(0, 101)
        axes.set_xlim(left=0)

    alt = f"{title}: cumulative distribution over {len(ordered)} requests"
    return picture(title, alt, lambda theme: draw(2.4, theme, paint))
