"""Difference between two correct computations of a quantized model: float32 and float64.

    python benchmarks/rounding.py run/smollm2 --text wiki.test.raw [--tokens 1024]

Weights, integers and scales are the same; only the last bits of sums differ. In a float model, the
differences stay that small. If activations are quantized at run time, a sum on the other side of a
rounding boundary is off by a whole step, and all later layers quantize different values. Correct
engines can therefore not agree on more tokens than in the second row of this table.
"""

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor

from lathe.compress.plan import make_plan
from lathe.model import fake_quant
from lathe.model.checkpoint import load_checkpoint
from lathe.model.gpt import GPT
from lathe.model.quantization import QuantizationPlan
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings.types import Format

ROW = 256  # tokens per row
FORMATS: tuple[Format, ...] = "dynamic_int8", "weight_only_int8", "int4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="float checkpoint")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024, help="number of tokens")
    given = parser.parse_args()
    checkpoint = load_checkpoint(given.model)
    single = checkpoint.model.eval()
    double = copy.deepcopy(single).double()
    ids = checkpoint.tokenizer.encode(given.text.read_text()).ids[: given.tokens // ROW * ROW]
    tokens = torch.tensor(ids).view(-1, ROW)
    exact = logits(double, tokens)
    print("| | same token, float32 and float64 | KL | same token as float | KL |")
    print("|---|---|---|---|---|")
    print("| float |", compare(logits(single, tokens), exact), "| | |")
    settings = load_recipe("smollm2").Compress.Quantization
    for form in FORMATS:
        names = single.config.linear_names()
        plan = make_plan(single.config, settings, dict.fromkeys(names, form))
        found = quantized(single, plan, tokens)
        apart = compare(found, quantized(double, plan, tokens))
        print(f"| {form} | {apart} | {compare(found, exact)} |", flush=True)


@torch.no_grad()
def logits(model: GPT, tokens: Tensor) -> Tensor:
    """Logits (rows, ROW, V) of tokens (rows, ROW) in float64."""
    found: Tensor = model(tokens)
    return found.double()


def quantized(model: GPT, plan: QuantizationPlan, tokens: Tensor) -> Tensor:
    with fake_quant.inserted(model, plan):
        return logits(model, tokens)


def compare(found: Tensor, expected: Tensor) -> str:
    """Format the share of positions with the same top token, and KL(expected || found)."""
    same = (found.argmax(-1) == expected.argmax(-1)).double().mean()
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    return f"{same:.1%} | {(p.exp() * (p - q)).sum(-1).mean():.2g}"


if __name__ == "__main__":
    main()
