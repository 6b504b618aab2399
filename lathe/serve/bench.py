"""`lathe bench-serve`: a load on a live endpoint, its figures and its page."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lathe.errors import UserError
from lathe.report.load import load_page
from lathe.serve.client import Client, connect
from lathe.serve.deploy import OPENINGS
from lathe.serve.load import Load, Objective, Summary, run_load, summarize
from lathe.storage import atomic_folder

FIGURES, PAGE = "load.json", "load.html"


def bench(
    tokens: tuple[int, int],
    shape: dict[str, Any],
    objective: tuple[float, float],
    prompts: Path | None,
    url: str | None,
    model_name: str,
    output: Path,
) -> Summary:
    """Run it; write `load.json` (all requests too) and `load.html` into `output`.

    Args:
        tokens: fewest and most new tokens of a request.
        shape: `clients`, `rate`, `requests` and `seed` of a `Load`.
        objective: seconds to the first token, and between tokens.

    Raises:
        UserError: no server, no prompts, or not one answer.
    """
    lines = list(OPENINGS) if prompts is None else _lines(prompts)
    generator = np.random.default_rng(shape["seed"])
    lengths = generator.integers(tokens[0], tokens[1] + 1, shape["requests"]).tolist()
    load, goal = Load(lines, lengths, **shape), Objective(*objective)
    with Client(url, model_name) if url else connect() as client:
        requests = run_load(client, load)
    summary = summarize(requests, goal)
    arrivals = f"{load.rate:g} requests/s" if load.rate else f"{load.clients} clients"
    what = f"{arrivals}, {load.requests} requests of {tokens[0]} to {tokens[1]} new tokens"
    record = {
        "load": what,
        "summary": summary.to_json(),
        "requests": [vars(request) for request in requests],
    }
    with atomic_folder(output, FIGURES) as work:
        (work / FIGURES).write_text(json.dumps(record, indent=1) + "\n")
        (work / PAGE).write_text(load_page(what, summary, requests, goal), encoding="utf-8")
    return summary


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "give a text file, a prompt a line") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise UserError(f"{path}: no prompts", "give a text file, a prompt a line")
    return found
