"""Opens an exported model with one of three runtimes, or with the fastest one on this machine.

Exports are verified with onnxruntime. Other runtimes must agree with it on this machine, because
kernels differ between CPUs.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lathe_base.errors import Code, UserError
from lathe_serving.runtime.batcher import PREFILL_CHUNK
from lathe_serving.runtime.exported_model import MODEL, ExportedModel
from lathe_serving.runtime.session import OnnxModel

REFERENCE_RUNTIME = "onnxruntime"
"""The runtime with which exports are verified, and with which others are compared."""

ROUNDS = 5
STEPS = 4  # decoded tokens in a round


@dataclass(frozen=True)
class OpenedModel:
    """A model, and why its runtime was chosen."""

    model: ExportedModel
    reason: str


def open_model(
    folder: Path, threads: int = 0, runtime: str = REFERENCE_RUNTIME, rows: int = 8
) -> OpenedModel:
    """Open an export.

    Args:
        threads: number of compute threads; 0 means one per core.
        runtime: `onnxruntime` or one of `OPENERS`; `auto` picks the fastest one that agrees, by the
            geometric mean over reading a prompt, decoding one row, and decoding many.
        rows: number of rows to decode.

    Raises:
        UserError: the folder is not an export; or the requested runtime is not installed, cannot
            load the graph, or computes different logits.
    """
    reference = OnnxModel(folder, threads)
    if runtime == REFERENCE_RUNTIME:
        return OpenedModel(reference, "requested")
    if runtime == "onnxruntime_single_stream":
        from lathe_serving.runtime.single_stream import reads_single_stream

        if reads_single_stream(reference.folder / MODEL):
            what = "the export's own graph already has the single-stream layout"
            return OpenedModel(reference, what)
    if runtime != "auto":
        return OpenedModel(OPENERS[runtime](reference, threads), "requested")
    best, most, reasons = OpenedModel(reference, ""), 1.0, list[str]()
    for name, opened in OPENERS.items():
        try:
            other = opened(reference, threads)
        except UserError as error:
            reasons.append(error.what)
            continue
        # Medians of the ratios of alternating rounds: what else the machine does in the meantime
        # slows down both of a round. The first round warms up.
        pair = (reference, other)
        seconds = [[_seconds(model, rows) for model in pair] for _ in range(ROUNDS + 1)]
        timings, others = np.array(seconds[1:]).swapaxes(0, 1)  # (rounds, cases) each
        medians = np.median(timings / others, axis=0).tolist()
        speedups = dict(zip(("prompt", "one row", f"{rows} rows"), medians, strict=True))
        mean = float(np.exp(np.mean(np.log(list(speedups.values())))))
        each = ", ".join(f"{case} {speedup:.2f}" for case, speedup in speedups.items())
        reasons.append(f"{name} is {mean:.2f} times as fast as onnxruntime ({each})")
        if mean > most:
            best, most = OpenedModel(other, ""), mean
    return OpenedModel(best.model, "; ".join(reasons))


def _open_single_stream(reference: OnnxModel, threads: int) -> ExportedModel:
    """The same export with a second copy of its INT8 weights, for steps of one token."""
    from lathe_serving.runtime.single_stream import SingleStreamModel

    model = SingleStreamModel(reference.folder, threads, reference.session)
    _require_agreement(reference, model.single_stream, "the single-stream graph")
    return model


def _open_openvino(reference: OnnxModel, threads: int) -> ExportedModel:
    """The same export in OpenVINO."""
    if reference.cache_dtype == np.int8:
        raise UserError(
            f"{reference.folder}: its KV cache is INT8, which Lathe does not support in OpenVINO",
            "set Serving.runtime=onnxruntime",
            Code.UNSUPPORTED,
        )
    # Where that package is installed, `import openvino` reports itself to Google Analytics.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        from lathe_serving.runtime.openvino_model import OpenVINOModel
    except ImportError as error:
        raise UserError(
            f"OpenVINO cannot be imported: {error}",
            "pip install openvino onnx, or set Serving.runtime=onnxruntime",
            Code.NOT_INSTALLED,
        ) from None
    model = OpenVINOModel(reference.folder, threads)
    _require_agreement(reference, model, "OpenVINO")
    return model


OPENERS = {"onnxruntime_single_stream": _open_single_stream, "openvino": _open_openvino}
"""The other runtimes, by their names in `Serving.runtime`."""


def _require_agreement(reference: OnnxModel, model: ExportedModel, name: str) -> None:
    """Check that a model's logits match the reference's within the limit of the export's
    verification."""
    samples = reference.metadata.get("samples")
    limit = reference.metadata.get("proof", {}).get("mean_limit")
    if not samples or limit is None:
        raise UserError(
            f"{reference.folder}: the export has no data to check {name}",
            "export the model again, or set Serving.runtime=onnxruntime",
            Code.INCOMPLETE,
        )
    difference = mean_difference(reference, model, samples)
    if not difference <= limit:
        raise UserError(
            f"{reference.folder}: on this machine, the logits of {name} differ from onnxruntime's "
            f"by {difference:.3g} on average (limit {limit:.3g})",
            "set Serving.runtime=onnxruntime",
            Code.NOT_PROVED,
        )


def mean_difference(
    first: ExportedModel, second: ExportedModel, prompts: Sequence[Sequence[int]]
) -> float:
    """The mean absolute difference of two models' logits, over all positions of the prompts."""
    error, n = 0.0, 0
    for prompt in prompts:
        tokens = np.array([prompt], np.int64)
        difference = np.abs(first.logits(tokens) - second.logits(tokens))
        error, n = error + float(difference.sum(dtype=np.float64)), n + difference.size
    return error / n


def _seconds(model: ExportedModel, rows: int) -> list[float]:
    """Times of reading a chunk of a prompt, and of decoding one row and many rows after such
    chunks."""
    # As in service: chunks of the size that the batcher reads, and steps after such a chunk.
    length = min(PREFILL_CHUNK, model.n_positions // 2)
    steps = min(STEPS, model.n_positions - length)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (rows, length))
    cache = model.start(rows, length + steps)
    timings = []
    started = time.perf_counter()
    model.step(model.rows(cache, 0, 1), tokens[:1])
    timings.append(time.perf_counter() - started)
    for row in range(1, rows):
        cache.permute([row], [0])
    for n in (1, rows):
        part = model.rows(cache, 0, n)
        part.lengths[:] = length
        started = time.perf_counter()
        for step in range(steps):
            model.step(part, tokens[:n, step : step + 1])
        timings.append(time.perf_counter() - started)
    return timings
