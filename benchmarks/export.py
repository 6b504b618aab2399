"""Size and speed of the exported GPT-2 124M shape, float32, INT8 and INT4, on random weights.

    python benchmarks/export.py [--threads 1] [--rounds 5]

All run in turns in one process, so that ratios are reliable even if absolute figures are not.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from lathe.evaluate.latency import measure
from lathe.export.model_graph import build
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import HFTensors
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.model.quantization import LinearFormat, QuantizationPlan, WeightFormat
from lathe_serving.runtime.exported_model import METADATA, MODEL

SHAPE = GPTConfig(50257, 1024, 768, 64, (12,) * 12, (3072,) * 12)
PROMPT, NEW = 128, 32
GROUP_SIZE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="number of threads")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folders = write(Path(scratch))
        table = {
            batch: measure(folders, PROMPT, NEW, batch, arguments.rounds, arguments.threads)
            for batch in (1, 8)
        }
    print(f"GPT-2 124M shape, threads {arguments.threads}, medians of {arguments.rounds} rounds")
    print(f"{'':6}{'MB':>10}{f'prefill {PROMPT}':>16}{'decode b1':>16}{'decode b8':>16}")
    for name, b1 in table[1].items():
        b8 = table[8][name]
        print(
            f"{name:6}{b1['bytes'] / 1e6:10.0f}{b1['prefill_ms']:13.1f} ms"
            f"{b1['tokens_per_second']:10.1f} tok/s{b8['tokens_per_second']:10.1f} tok/s"
        )
        if name != "fp32":
            print(
                f"{'ratio':6}{b1['bytes_ratio']:10.3f}{b1['prefill_speedup']:15.2f}x"
                f"{b1['decode_speedup']:15.2f}x{b8['decode_speedup']:15.2f}x"
            )


def write(folder: Path) -> dict[str, Path]:
    """Write exports of random weights in float32, INT8 and INT4."""
    model = GPT(SHAPE)
    model.initialize(0.02, seed=0)
    weights = {name: tensor.numpy() for name, tensor in HFTensors(model).items()}
    linears = [*SHAPE.linear_names(), HEAD]
    int4 = LinearFormat(WeightFormat.int4(GROUP_SIZE), "dynamic_int8")
    plans = {
        "fp32": None,
        "int8": QuantizationPlan.w8a8(dict.fromkeys(linears, 0.03)),
        "int4": QuantizationPlan(dict.fromkeys(linears, int4)),
    }
    metadata = {
        "n_head": SHAPE.n_head,
        "head_dim": SHAPE.head_dim,
        "n_positions": SHAPE.n_positions,
        "vocab_size": SHAPE.vocab_size,
        "eos_id": SHAPE.vocab_size - 1,
    }
    folders = {name: folder / name for name in plans}
    for name, out in folders.items():
        out.mkdir()
        build(SHAPE, weights, plans[name]).save(out / MODEL)
        (out / METADATA).write_text(json.dumps(metadata))
    return folders


if __name__ == "__main__":
    main()
