r"""The same exports in every `Serving.runtime`.

    python benchmarks/runtimes.py [--rounds 5]

GPT-2 124M shape, random weights, INT8 and INT4 exports, one thread. Runtimes take turns in one
process, measured by its CPU time; an environment with OpenVINO is created in the output folder, and
it and the exports are reused. "Difference" is the mean difference of logits from onnxruntime's,
relative to the change by quantization.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from peers.entries import Entry
from peers.process import BENCHMARKS, convert, interpreter_path, make_environment, variables
from peers.subjects import SHAPES, random_shape

FLOAT = Entry("float32", "lathe", "saved", 32)
EXPORTS = [
    Entry("INT8", "lathe", "INT8", 8),
    Entry("INT4, groups of 64", "lathe", "INT4", 4),
    Entry("INT4, groups of 128", "lathe", "INT4g128", 4),
]
REQUIREMENTS = ("openvino==2026.4.1", "onnx==1.23.2", "onnxruntime==1.31.1", "tokenizers==0.23.3")
RUNTIMES = Entry("runtimes", "exported", "", 32, REQUIREMENTS)
CASES = {"prefill 128": 128, "prefill 512": 512, "decode 1": 1, "decode 8": 8}  # case: tokens
Found = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/runtimes"), help="output folder")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    settings = parser.parse_args()
    environments = settings.output / "environments"
    subject = random_shape(settings.output, SHAPES[0])
    make_environment(RUNTIMES, environments)
    folders = {entry: (settings.output / entry.key).resolve() for entry in (FLOAT, *EXPORTS)}
    for entry, folder in folders.items():
        convert(entry, environments, subject.model, subject.calibration, folder)
    found = {}
    for entry in EXPORTS:
        print(entry.title, file=sys.stderr)
        folder = folders[entry]
        task = [folder, folders[FLOAT], settings.rounds]
        command = [
            interpreter_path(RUNTIMES, environments),
            "-m",
            "peers.exported",
            *map(str, task),
        ]
        done = subprocess.run(
            command,
            cwd=BENCHMARKS,
            env=variables(1),
            stdout=subprocess.PIPE,
            check=True,
        )
        found[entry.title] = json.loads(done.stdout)
        (settings.output / "runtimes.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, Found]) -> str:
    """Format as Markdown; in brackets the speedup over onnxruntime in the same round, with
    quartiles."""
    head = ["", "", *CASES, "difference"]
    lines = [head, ["---"] * len(head)]
    for title, runtimes in found.items():
        first, *_ = runtimes.values()
        for name, own in runtimes.items():
            difference = f"{own['difference']:.2g}" if "difference" in own else ""
            speeds = [_speed(own, first, case) for case in CASES]
            lines.append([title, name, *speeds, difference])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _speed(own: dict[str, Any], first: dict[str, Any], case: str) -> str:
    seconds = np.array(own[case])
    middle = float(np.median(seconds))
    speed = f"{1e3 * middle:.0f} ms"
    if case.startswith("decode"):
        speed = f"{CASES[case] / middle:.1f} tok/s"
    if own is first:
        return speed
    low, ratio, high = np.quantile(np.array(first[case]) / seconds, [0.25, 0.5, 0.75])
    return f"{speed}, {ratio:.2f}x ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
