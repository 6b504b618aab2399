"""Writes stage outputs that reports read."""

import json
from pathlib import Path
from typing import Any

HOSTILE = "<script>alert('x')</script> & \"more\""


def write_json(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def sensitivity_analysis(n_linears: int = 2, **changes: Any) -> dict[str, Any]:
    """Content of `sensitivity.json`; the first linear stays in float."""
    spread: dict[str, float | None] = {
        "min": -2.0,
        "q1": -0.5,
        "median": 0.0,
        "q3": 0.5,
        "max": 1.0,
        "absmax": 2.0,
    }
    spread |= {"channel_spread": 3.0, "sqnr_db": None}
    linears = [
        {
            "name": f"h.{i}.mlp.c_fc",
            "score": 0.01 / (i + 1) - 0.006,
            "n_params": 9,
            "estimate": 0.02 / (i + 1),
            "stderr": 0.001 if i else None,
            "weights": spread,
            "inputs": spread,
        }
        for i in range(n_linears)
    ]
    values = {
        "mode": "ptq",
        "metric": "loss",
        "model": "m" * 64,
        "baseline": 3.7,
        "linears": linears,
        "skip": ["h.0.mlp.c_fc"],
        "rule": "the worst stay float",
        "budget": 0.02,
        "predicted": 0.015,
        "rank_correlation": 0.75,
    }
    return values | changes
