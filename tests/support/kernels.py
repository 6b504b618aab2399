"""Opens small exports on the emulated or real CPU: `python -m tests.support.kernels FOLDER`.

`tests/serve/runtime/test_cpu_levels.py` runs it under an emulator, or with oneDNN restricted to
older instruction sets. It prints JSON: for every export and runtime, the reason why the runtime may
not serve the export, or an empty string; and as `drift`, the mean absolute difference of
onnxruntime's logits from the stored ones. It does not import torch, which takes a minute under an
emulator.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from lathe_base.errors import UserError
from lathe_serving.runtime import session
from lathe_serving.runtime.open_model import open_model

RUNTIMES = ("onnxruntime_single_stream", "openvino")
CPU_FLAGS = "LATHE_TEST_CPU_FLAGS"
LOGITS = "logits.npy"


class WithoutBFloat16(openvino.Core):
    """OpenVINO without bfloat16, which the CPU has but the restricted kernels do not."""

    def get_property(self, *names: Any) -> Any:
        found = super().get_property(*names)
        return [name for name in found if name != "BF16"] if isinstance(found, list) else found


def refusal(folder: Path, runtime: Any) -> str:
    """Reason why the runtime may not serve the export on this CPU; empty if it may."""
    try:
        open_model(folder, 1, runtime)
    except UserError as error:
        return error.what
    return ""


def inspect_export(folder: Path) -> dict[str, Any]:
    own = open_model(folder, 1).model
    prompt = np.array(own.metadata["samples"][:1])
    drift = float(np.abs(own.logits(prompt) - np.load(folder / LOGITS)).mean())
    return {"drift": drift} | {runtime: refusal(folder, runtime) for runtime in RUNTIMES}


if __name__ == "__main__":
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        openvino.Core = WithoutBFloat16
    if flags := os.environ.get(CPU_FLAGS):  # an emulator shows the real /proc/cpuinfo
        session.CPUINFO = Path(sys.argv[1]) / "cpuinfo"
        session.CPUINFO.write_text(f"flags : {flags}\n")
    exports = sorted(path.parent for path in Path(sys.argv[1]).glob("*/export.json"))
    print(json.dumps({export.name: inspect_export(export) for export in exports}))
