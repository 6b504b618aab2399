"""Accuracy of `lathe compress`'s predictions of size and speed for unmeasured models.

    python benchmarks/prices.py run/dense [--designs 8] [-o Compress.Quantization.group_size=64]

Prices are fitted to a dozen exports; then random designs are exported and measured against the
dense model, in turns in one process. Weights may be random, since only sizes and times are
measured.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from lathe.compress.plan import formats
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.search.design import Design
from lathe.search.prices import measure_design, measure_prices, parts_of, write_sample
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings.types import Format

INT4 = ("Compress.Quantization.weight_bits=4", "Compress.Quantization.quantize_embedding=True")
TARGETS = ("bytes", "prefill", "latency")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="dense checkpoint")
    parser.add_argument("--designs", type=int, default=8, help="number of random designs")
    parser.add_argument(
        "-o", "--override", action="append", default=[], help="recipe override, Group.key=value"
    )
    given = parser.parse_args()
    recipe = load_recipe("tiny-qat", (*INT4, *given.override))
    settings, checkpoint = recipe.Compress.Quantization, load_checkpoint(given.model)
    config = checkpoint.model.config
    random = np.random.default_rng(0)
    forms = formats(settings)
    designs = [drawn(random, config, forms) for _ in range(given.designs)]
    with TemporaryDirectory() as scratch:
        dense = Path(scratch) / "dense"
        write_sample(checkpoint, checkpoint.model, dense, recipe.Export)
        prices = measure_prices(checkpoint, dense, forms, settings, recipe.Export)
        measured = [
            measure_design(checkpoint, dense, design, settings, recipe.Export) for design in designs
        ]
    table = Table("heads", "channels", *(f"{t} {w}" for t in TARGETS for w in ("said", "is")))
    errors: dict[str, list[float]] = {target: [] for target in TARGETS}
    for design, found in zip(designs, measured, strict=True):
        line = [f"{np.mean(design.heads):.1f}", f"{np.mean(design.channels):.0f}"]
        for target in TARGETS:
            said = prices[target].total(parts_of(config, design, settings.group_size))
            errors[target].append(abs(said / found[target] - 1))
            line += [f"{said:.3f}", f"{found[target]:.3f}"]
        table.add_row(*line)
    Console(width=110).print(table)
    for target, values in errors.items():
        print(f"{target}: off by {np.median(values):.1%} (median), {max(values):.1%} (most)")


def drawn(random: np.random.Generator, config: GPTConfig, forms: list[Format]) -> Design:
    """Draw a random design: widths, and a format for each linear."""
    names = [*config.linear_names(), HEAD]
    return Design(
        tuple(int(random.integers(1, n + 1)) for n in config.n_head),
        tuple(int(random.integers(n // 8, n + 1)) for n in config.n_inner),
        {name: forms[random.integers(len(forms))] for name in names},
    )


if __name__ == "__main__":
    main()
