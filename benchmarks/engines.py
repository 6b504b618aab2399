"""The torch and Paddle engines compared, from one dense checkpoint.

    python benchmarks/engines.py run/NAME/.../pretrain/model --data run/NAME/.../prepare/data \\
        --output run/engines

Each engine prunes and finetunes it (`tiny-prune-paddle`, which both support), analyzes, quantizes
and exports the result. All models are evaluated with torch, and additionally with Paddle; latencies
of the exported graphs are measured in turns at the end. Finished parts are reused.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lathe import backends
from lathe.evaluate.evaluation_folder import read_metrics
from lathe.evaluate.latency import measure
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe

ENGINES = ("torch", "paddle")


def make(engine: str, settings: argparse.Namespace) -> None:
    """Make all folders of an engine, and record how long each took."""
    data, folder = settings.data, settings.output / engine
    pruned, int8, ranking = folder / "pruned", folder / "int8", folder / "sensitivity"
    pruning = recipe("tiny-prune-paddle", engine, settings)
    training = recipe("tiny-qat", engine, settings)
    backend = backends.of(training)
    once(pruned, lambda: backend.prune(pruning, settings.model, data, pruned))
    once(ranking, lambda: backend.analyze(training, pruned, data, ranking))
    once(int8, lambda: backend.quantize(training, pruned, data, int8, ranking))
    for model in (settings.model, pruned, int8):
        measure_up(engine, model, folder, settings)


def measure_up(engine: str, model: Path, folder: Path, settings: argparse.Namespace) -> None:
    by_torch, own = (recipe("tiny", e, settings) for e in ("torch", engine))
    data, of = settings.data, backends.of
    for name, wanted in (("onnx", own), ("eval", by_torch), ("own-eval", own)):
        output = folder / f"{model.name}-{name}"
        if name == "onnx":
            once(output, partial(of(own).export, own, model, data, output))
        else:
            once(output, partial(of(wanted).evaluate, wanted, model, output, data))


def once(output: Path, stage: Callable[[], Any]) -> None:
    took = output.with_name(f"{output.name}.seconds")
    if not took.exists():
        logging.info("--- %s", output)
        started = time.perf_counter()
        stage()
        took.write_text(f"{time.perf_counter() - started:.1f}")


def recipe(name: str, engine: str, settings: argparse.Namespace) -> Recipe:
    return load_recipe(name, [*settings.override, f"Compress.engine={engine}"])


def table(settings: argparse.Namespace) -> Table:
    """Table with a column per model, and latencies measured now."""
    models = {"dense": ("torch", settings.model.name)}
    for model in ("pruned", "int8"):
        models |= {f"{model}, {engine}": (engine, model) for engine in ENGINES}
    places = {name: (settings.output / engine, model) for name, (engine, model) in models.items()}
    speeds = measure({name: folder / f"{m}-onnx" for name, (folder, m) in places.items()})
    out = Table("", *models)

    def row(title: str, cell: Callable[[str, Path, str], str]) -> None:
        out.add_row(title, *(cell(name, folder, m) for name, (folder, m) in places.items()))

    def score(folder: Path, key: str, value: str) -> tuple[float, float]:
        """Return a metric and its standard error."""
        found = read_metrics(folder)[key]
        return found[value], found[f"{value}_stderr"]

    def perplexity(_: str, folder: Path, model: str) -> str:
        return "{:.2f} ± {:.2f}".format(*score(folder / f"{model}-eval", "text", "perplexity"))

    def own_perplexity(_: str, folder: Path, model: str) -> str:
        return f"{score(folder / f'{model}-own-eval', 'text', 'perplexity')[0]:.2f}"

    def cloze(_: str, folder: Path, model: str) -> str:
        return "{:.2%} ± {:.2%}".format(*score(folder / f"{model}-eval", "cloze", "accuracy"))

    def seconds(folder: Path, what: str) -> str:
        path = folder / f"{what}.seconds"
        return f"{float(path.read_text()):.0f} s" if path.exists() else ""

    row("perplexity", perplexity)
    row("by the engine", own_perplexity)
    row("cloze", cloze)
    row("ONNX file", lambda n, _, __: f"{speeds[n]['bytes'] / 1e6:.2f} MB")
    row("prefill, 64 tokens", lambda n, _, __: f"{speeds[n]['prefill_ms']:.2f} ms")
    row("decode, a token", lambda n, _, __: f"{speeds[n]['decode_ms']:.3f} ms")
    row("training", lambda _, f, m: seconds(f, m))
    row("evaluation", lambda _, f, m: seconds(f, f"{m}-own-eval"))
    row("skipped linears", lambda _, f, m: skips(f) if m == "int8" else "")
    return out


def skips(folder: Path) -> str:
    return str(len(json.loads((folder / "sensitivity" / "sensitivity.json").read_text())["skip"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="dense checkpoint of the recipe tiny")
    parser.add_argument(
        "--data", type=Path, required=True, help="token data set that it was trained on"
    )
    parser.add_argument("--output", type=Path, required=True, help="output folder")
    parser.add_argument(
        "-o", "--override", action="append", default=[], help="override, Group.key=value"
    )
    settings = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for engine in ENGINES:
        make(engine, settings)
    Console(width=140).print(table(settings))


if __name__ == "__main__":
    main()
