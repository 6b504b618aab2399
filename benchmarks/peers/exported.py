"""Measures one export in every runtime, in turns in one process.

python -m peers.exported EXPORT FLOAT_EXPORT ROUNDS
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lathe_base.errors import UserError
from lathe_serving.runtime.exported_model import METADATA
from lathe_serving.runtime.open_model import mean_difference
from lathe_serving.runtime.session import OnnxModel
from peers.lathe import Lathe
from peers.lathe_openvino import LatheOpenVINO
from peers.lathe_single_stream import LatheSingleStream
from peers.worker import Measured

COMPARED = (2, 128)  # shape of the tokens whose logits are compared
CASES: tuple[tuple[str, int], ...] = (
    ("prefill", 128),
    ("prefill", 512),
    ("decode", 1),
    ("decode", 8),
)


def measure(folder: Path, float_folder: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure all runtimes; returns the results by runtime.

    They contain `version`, the seconds of every case in each round but the first, and for runtimes
    other than onnxruntime `difference`: the mean difference of logits from onnxruntime's, relative
    to the change by quantization.
    """
    made: dict[str, Lathe] = {"onnxruntime": Lathe(folder)}
    with suppress(UserError):  # not INT8
        made["single stream"] = LatheSingleStream(folder)
    made["OpenVINO"] = LatheOpenVINO(folder)
    vocabulary = json.loads((folder / METADATA).read_text())["vocab_size"]
    tokens = np.random.default_rng(0).integers(1, vocabulary, COMPARED).tolist()
    reference = made["onnxruntime"].model
    change = mean_difference(reference, OnnxModel(float_folder, 1), tokens)
    found: dict[str, dict[str, Any]] = {n: {"version": e.version} for n, e in made.items()}
    for name, engine in made.items():
        if engine.model is not reference:
            other = getattr(engine.model, "single_stream", engine.model)
            found[name]["difference"] = mean_difference(reference, other, tokens) / change
    measured = {name: Measured(engine, vocabulary) for name, engine in made.items()}
    for turn in range(rounds + 1):
        for method, argument in CASES:
            for name, one in measured.items():
                seconds = float(np.median(getattr(one, method)(argument)))
                if turn:
                    found[name].setdefault(f"{method} {argument}", []).append(seconds)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
