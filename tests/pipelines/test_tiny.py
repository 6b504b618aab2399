"""`make run` with its defaults, checked against the claims in the README."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


def test_the_default_run_learns_and_compresses(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipelines.local.run", "full", "--name", "tiny"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "run" / "tiny"
    (trace,) = folder.glob("*/pretrain/model/train.jsonl")
    validation = [
        line["eval_perplexity"]
        for line in map(json.loads, trace.read_text().splitlines())
        if "eval_perplexity" in line
    ]
    assert validation[-1] * 5 <= validation[0]
    (figures,) = folder.glob("*/report*/metrics")
    table = json.loads(figures.read_text())
    for name in ("pruned", "INT8"):
        assert table[f"{name}.perplexity"] <= 1.1 * table["dense.perplexity"]
    assert table["INT8.n_bytes"] <= 0.35 * table["dense.n_bytes"]
    assert re.search(r"tritonserver is ready", done.stdout)
    assert re.search(r"^gate +passed$", done.stdout, re.M), done.stdout
