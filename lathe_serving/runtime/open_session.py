"""Opens an ONNX graph with the onnxruntime settings that Lathe's graphs need."""

import os
from pathlib import Path

import onnxruntime as ort  # type: ignore[import-untyped]

from lathe_base.errors import Code, UserError

CPUINFO = Path("/proc/cpuinfo")
ROUNDED_INPUT = 4  # `accuracy_level` of `MatMulNBits` with inputs in 8 bits
PLAIN_ATTENTION = "ORT_GQA_DISABLE_FLASH_ATTENTION"


def open_session(
    model: Path | bytes, threads: int = 0, optimized: Path | None = None
) -> ort.InferenceSession:
    """Load a graph on the CPU, from a file or serialized; the optimized graph that runs is written
    to `optimized`, if given.

    Raises:
        UserError: the file is missing or corrupt.
    """
    # Read by onnxruntime when it makes a session. Its tiled attention (1.31) takes twice as long as
    # the plain one on the prompts that a GPT of this size can have.
    os.environ.setdefault(PLAIN_ATTENTION, "1")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Idle threads spin within a run, where it pays off, but not between runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # A float input of an int8 weight stays float32; by default it would be rounded to int8 too.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if saturates(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""):
        # Exact, but several times slower on other CPUs: it disables the fast kernels.
        options.add_session_config_entry("session.x64quantprecision", "1")
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    try:
        source = model if isinstance(model, bytes) else str(model)
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        first = str(error).splitlines()[0]
        what = "graph" if isinstance(model, bytes) else model
        raise UserError(
            f"{what}: onnxruntime cannot load it: {first}", "export again", Code.CORRUPT
        ) from error


def saturates(cpuinfo: str) -> bool:
    """Whether the CPU in `/proc/cpuinfo` is an x86 without VNNI, where onnxruntime's uint8 x int8
    kernel adds pairs of products in 16 bits, which overflow."""
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    return bool(flags) and "vnni" not in flags
