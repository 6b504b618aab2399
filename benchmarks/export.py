"""Size and speed of the exported GPT-2 124M shape, float32 beside INT8, on random weights.

    python benchmarks/export.py [--threads 1] [--rounds 5]

Both run in turns in one process, so the ratios hold even where the absolute figures do not.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from lathe.evaluate.latency import measure
from lathe.export.graph import build
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import HFTensors
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.model.quantization import QuantizationPlan
from lathe.runtime.session import METADATA, MODEL

SHAPE = GPTConfig(50257, 1024, 768, 64, (12,) * 12, (3072,) * 12)
PROMPT, NEW = 128, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folders = write(Path(scratch))
        table = {
            batch: measure(folders, PROMPT, NEW, batch, arguments.rounds, arguments.threads)
            for batch in (1, 8)
        }
    one, eight = (list(table[batch].items()) for batch in (1, 8))
    print(f"GPT-2 124M shape, threads {arguments.threads}, medians of {arguments.rounds} rounds")
    print(f"{'':6}{'MB':>10}{f'prefill {PROMPT}':>16}{'decode b1':>16}{'decode b8':>16}")
    for (name, b1), (_, b8) in zip(one, eight, strict=True):
        print(
            f"{name:6}{b1['bytes'] / 1e6:10.0f}{b1['prefill_ms']:13.1f} ms"
            f"{b1['tokens_per_second']:10.1f} tok/s{b8['tokens_per_second']:10.1f} tok/s"
        )
    (_, b1), (_, b8) = one[-1], eight[-1]
    print(
        f"{'ratio':6}{b1['bytes_ratio']:10.3f}{b1['prefill_speedup']:15.2f}x"
        f"{b1['decode_speedup']:15.2f}x{b8['decode_speedup']:15.2f}x"
    )


def write(folder: Path) -> dict[str, Path]:
    """Exports of random weights, float32 and INT8."""
    model = GPT(SHAPE)
    model.initialize(0.02, seed=0)
    weights = {name: tensor.numpy() for name, tensor in HFTensors(model).items()}
    scales = dict.fromkeys([*SHAPE.linear_names(), HEAD], 0.03)
    plan = QuantizationPlan.w8a8(scales)
    metadata = {
        "n_head": SHAPE.n_head,
        "head_dim": SHAPE.head_dim,
        "n_positions": SHAPE.n_positions,
        "vocab_size": SHAPE.vocab_size,
        "eos_id": SHAPE.vocab_size - 1,
    }
    folders = {"fp32": folder / "fp32", "int8": folder / "int8"}
    for quantization, out in zip((None, plan), folders.values(), strict=True):
        out.mkdir()
        build(SHAPE, weights, quantization).save(out / MODEL)
        (out / METADATA).write_text(json.dumps(metadata))
    return folders


if __name__ == "__main__":
    main()
