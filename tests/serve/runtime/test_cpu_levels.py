"""The runtimes on CPUs with fewer instructions, emulated or by restricting this CPU."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from lathe.export.proof import QUANTIZATION_SHARE
from lathe_serving.runtime.exported_model import METADATA
from tests.serve.runtime.test_openvino import SHAPES, STATIC_INT8
from tests.support.kernels import CPU_FLAGS, LOGITS
from tests.support.small_export import PROMPTS, make_model, quantization_change, write_unproven

HOST = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
EMULATOR = shutil.which("qemu-x86_64")


@dataclass(frozen=True)
class Level:
    """An instruction set level.

    Attributes:
        adds_in_16_bits: whether pairs of 8-bit products are added in 16 bits, which can overflow.
        needs: CPU flags required to simulate the level with `variables`; if empty, it is emulated.
        variables: environment that restricts the kernels to this level.
    """

    adds_in_16_bits: bool
    needs: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        if self.needs:
            if not set(self.needs) <= set(HOST):
                pytest.skip(f"this CPU lacks one of {', '.join(self.needs)}")
            return [sys.executable]
        if EMULATOR is None or "avx2" not in HOST:
            pytest.skip("needs an x86 CPU, and qemu-x86_64 (apt-get install qemu-user)")
        return [EMULATOR, "-cpu", "Haswell", sys.executable]


def onednn(isa: str) -> dict[str, str]:
    return {"ONEDNN_MAX_CPU_ISA": isa}


LEVELS = {
    "AVX2": Level(True, variables={CPU_FLAGS: "avx2 fma"}),
    "AVX-VNNI": Level(False, ("avx_vnni",), onednn("AVX2_VNNI")),
    "AVX-512": Level(True, ("avx512bw",), onednn("AVX512_CORE")),
    "AVX-512 VNNI": Level(False, ("avx512_vnni",), onednn("AVX512_CORE_VNNI")),
}
"""oneDNN provides OpenVINO's kernels; onnxruntime detects the CPU, which only an emulator can
change. For AVX2, the variable alone fails: OpenVINO itself would still detect AVX-512."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """Exports of all shapes, with the error limit of verification and onnxruntime's logits."""
    at = tmp_path_factory.mktemp("exports")
    for case, (shape, options) in SHAPES.items():
        model, folder = make_model(shape, **options), at / case
        own = write_unproven(model, byte_tokenizer, folder)
        change = quantization_change(model, own, PROMPTS, byte_tokenizer, folder / "float")
        metadata = json.loads((folder / METADATA).read_text()) | {"samples": PROMPTS}
        metadata["proof"] = {"mean_limit": QUANTIZATION_SHARE * change}
        (folder / METADATA).write_text(json.dumps(metadata))
        np.save(folder / LOGITS, own.logits(np.array(PROMPTS[:1])))
    return at


@pytest.mark.slow
@pytest.mark.parametrize("name", LEVELS)
def test_overflowing_models_are_rejected_and_all_others_served(name: str, exports: Path) -> None:
    level = LEVELS[name]
    found = run(level, exports)
    assert found.keys() == SHAPES.keys()
    for case, told in found.items():
        limit = json.loads((exports / case / METADATA).read_text())["proof"]["mean_limit"]
        assert told["drift"] < limit / 10  # onnxruntime is configured to be exact
        overflows = level.adds_in_16_bits and case in STATIC_INT8
        assert ("the logits of OpenVINO differ" in told["openvino"]) == overflows, (case, told)
        assert overflows or told["openvino"] == ""
        rounds_inputs = "weights alone" not in case
        refusal = "has no linears in static INT8"
        assert (refusal in told["onnxruntime_single_stream"]) != rounds_inputs
        assert told["onnxruntime_single_stream"] == "" or not rounds_inputs


def run(level: Level, exports: Path) -> dict[str, Any]:
    command = [*level.command(), "-m", "tests.support.kernels", str(exports)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | level.variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found
