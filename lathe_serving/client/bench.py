"""`lathe bench-serve`: a load test of a live endpoint, with its figures and an HTML page."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from lathe_base.artifacts.kinds import LOAD
from lathe_base.errors import UserError
from lathe_base.inputs import read_text
from lathe_base.storage import atomic_folder, claim_output_folder
from lathe_serving.client import Client, connect
from lathe_serving.client.load import OPENINGS, Load, Objective, Summary, run_load, summarize
from lathe_serving.client.load_page import load_page

FIGURES, PAGE = LOAD.metadata_file, "load.html"


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
        objective: limits in seconds: time to first token, and time between tokens.

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
            )
    claim_output_folder(output, LOAD, prompts)
    lines = list(OPENINGS) if prompts is None else _lines(prompts)
    generator = np.random.default_rng(shape["seed"])
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
        (work / FIGURES).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (work / PAGE).write_text(load_page(what, summary, requests, goal), encoding="utf-8")
    return summary


def _lines(path: Path) -> list[str]:
    hint = "give a text file with one prompt per line"
    found = [line for line in read_text(path, hint).splitlines() if line.strip()]
    if not found:
        raise UserError(f"{path}: no prompts", hint)
    return found
