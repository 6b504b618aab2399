"""The benchmarks start; what they measure is not asserted."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_all_can_be_imported() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=BENCHMARKS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_gpus_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu"]
    parts = ["--only", "345M", "--only", "exact resume"]
    done = subprocess.run(
        [*command, *parts, "--output", str(output)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())["parts"]
    assert found["345M"]["tokens_per_second"] > 0
    assert found["exact resume"]["same_weights"] and "exact resume" in done.stdout
