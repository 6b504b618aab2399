"""Open small exports on the CPU that this process sees: python -m tests.support.kernels FOLDER

`tests/serve/runtime/test_cpu_levels.py` starts it under an emulator, or with fewer of oneDNN's
instructions. It prints JSON: for every export and runtime why it may not serve, or an empty string;
as `drift`, how far onnxruntime's logits are from the stored ones. It does not import torch, which
takes a minute under an emulator.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from lathe.errors import UserError
from lathe.serve.runtime import open_session
from lathe.serve.runtime.open_model import open_model

RUNTIMES = ("onnxruntime_single_stream", "openvino")
CPU_FLAGS = "LATHE_TEST_CPU_FLAGS"
LOGITS = "logits.npy"


class WithoutBFloat16(openvino.Core):
    """OpenVINO asks the CPU for bfloat16, which the kernels of a lower level do not have."""

    def get_property(self, *names: Any) -> Any:
        found = super().get_property(*names)
        return [name for name in found if name != "BF16"] if isinstance(found, list) else found


def refusal(folder: Path, runtime: Any) -> str:
    """Why the runtime may not serve the export here; empty if it may."""
    try:
        open_model(folder, 1, runtime)
    except UserError as error:
        return error.what
    return ""


def look(folder: Path) -> dict[str, Any]:
    own = open_model(folder, 1).model
    prompt = np.array(own.metadata["samples"][:1])
    drift = float(np.abs(own.logits(prompt) - np.load(folder / LOGITS)).mean())
    return {"drift": drift} | {runtime: refusal(folder, runtime) for runtime in RUNTIMES}


if __name__ == "__main__":
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        openvino.Core = WithoutBFloat16
    if flags := os.environ.get(CPU_FLAGS):  # an emulator shows the real /proc/cpuinfo
        open_session.CPUINFO = Path(sys.argv[1]) / "cpuinfo"
        open_session.CPUINFO.write_text(f"flags : {flags}\n")
    exports = sorted(path.parent for path in Path(sys.argv[1]).glob("*/export.json"))
    print(json.dumps({export.name: look(export) for export in exports}))
