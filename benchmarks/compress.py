"""A table of the quality loss from pruning, distillation, INT8 and INT4 of a trained model.

    lathe prepare -r small --source novels.jsonl.xz --output run/novels
    lathe pretrain -r small --data run/novels --output run/dense
    python benchmarks/compress.py run/dense --data run/novels --output run/table \\
        --cloze lambada_test.jsonl --text wiki.test.raw

All rows except the first and the untrained ones are trained for the same number of tokens from the
same weights, and all are evaluated on the same text; latencies are measured in turns in one run at
the end. Finished rows are reused: the same command resumes after a kill, or prints the table. With
--rows, only rows whose names start with one of the given prefixes are made.
"""

import argparse
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.compress.sensitivity.analyze import analyze
from lathe.compress.sensitivity.result import RESULT
from lathe.evaluate.evaluate import evaluate
from lathe.evaluate.evaluation_folder import read_metrics
from lathe.evaluate.latency import measure
from lathe.export.export import export
from lathe.model.folder import checkpoint_digest
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe

CRITERIA = ("l1_norm", "l2_norm", "fpgm", "activation", "taylor")
DISTILL = "Compress.Distill.teacher=parent"
PRUNE_RATE = ("Optimizer.lr.max_lr=2e-4", "Optimizer.lr.min_lr=1e-5")
INT8_RATE = ("Optimizer.lr.max_lr=1e-4", "Optimizer.lr.min_lr=1e-5")
EVERYTHING = ("Compress.Quantization.quantize_embedding=True",)
INT4 = ("Compress.Quantization.weight_bits=4", "Compress.Quantization.group_size=64")
INT8 = ", int8"
FEW = 3


@dataclass(frozen=True)
class Row:
    """How a model is made: pruned, then quantized, unless these settings are None.

    Attributes:
        skips: number of the most sensitive linears that stay in float.
    """

    name: str
    pruning: tuple[str, ...] | None = None
    int8: tuple[str, ...] | None = None
    skips: int = 0


def pruned(ratio: float, criterion: str, scope: str, distill: bool) -> Row:
    name = f"{ratio:.0%} {criterion} {scope}" + (" distilled" if distill else "")
    of = "Compress.Prune"
    settings = (f"{of}.ratio={ratio}", f"{of}.criterion={criterion}", f"{of}.scope={scope}")
    return Row(name, (*settings, *([DISTILL] if distill else [])))


def rows(linears: int) -> Iterator[Row]:
    """Yield the rows: those that support claims first, then the rest of the grid."""
    yield Row("dense")
    yield Row("dense, trained on", ("Compress.Prune.ratio=0",))
    ratios = (0.25, 0.5)
    for ratio in ratios:
        yield pruned(ratio, "l1_norm", "uniform", False)
        yield pruned(ratio, "taylor", "global", True)
        yield pruned(ratio, "activation", "global", True)
    yield Row("int8, no skips", int8=())
    yield Row(f"int8, {FEW} skips", int8=(), skips=FEW)
    yield Row(f"int8, all but {FEW} skipped", int8=(), skips=linears - FEW)
    yield Row("int8 distilled, no skips", int8=(DISTILL,))
    yield Row("int4 distilled, groups of 64", int8=(DISTILL, *INT4))
    for rounding in ("nearest", "gptq"):
        untrained = "Engine.max_steps=0", f"Compress.Quantization.rounding={rounding}"
        yield Row(f"int4 untrained, {rounding}", int8=(*untrained, *INT4))
    for ratio in (0.25, 0.375, 0.5):
        best = pruned(ratio, "taylor", "global", True)
        yield Row(best.name + INT8, best.pruning, (DISTILL,))
    for distill, scope, criterion, ratio in product(
        (False, True), ("uniform", "global"), CRITERIA[::-1], ratios
    ):
        yield pruned(ratio, criterion, scope, distill)


def make(row: Row, settings: argparse.Namespace) -> None:
    """Train, export and evaluate a row, reusing finished parts."""
    model, folder, data = settings.model, settings.output / row.name, settings.data
    if row.pruning is not None:
        recipe = tuned(settings, *PRUNE_RATE, *row.pruning)
        float_row = settings.output / row.name.removesuffix(INT8)
        model = prune(recipe, model, data, float_row / "pruned").folder
    if row.int8 is not None:
        recipe = tuned(settings, *INT8_RATE, *EVERYTHING, *row.int8)
        ranked = ranking(recipe, row.skips, settings, model, folder) if row.skips else None
        model = quantize(recipe, model, data, folder / "int8", ranked).folder
    if not (folder / "onnx" / "export.json").is_file():
        export(tuned(settings), model, data, folder / "onnx")
    measure_up(model, folder, settings)


def ranking(
    recipe: Recipe, skips: int, settings: argparse.Namespace, model: Path, folder: Path
) -> Path:
    """Write an analysis that makes `quantize` skip the dense model's worst linears in `model`."""
    analysis = settings.output / "ranking" / RESULT
    if not analysis.is_file():
        analyze(recipe, settings.model, settings.data, analysis.parent)
    values = json.loads(analysis.read_text())
    values["skip"] = [linear["name"] for linear in values["linears"][:skips]]
    values["model"] = checkpoint_digest(model)
    own = folder / "sensitivity"
    own.mkdir(parents=True, exist_ok=True)
    (own / RESULT).write_text(json.dumps(values))
    return own


def measure_up(model: Path, folder: Path, settings: argparse.Namespace) -> None:
    """Evaluate a checkpoint or an export, unless that is done already."""
    if not (folder / "novels" / "metrics.json").is_file():
        evaluate(tuned(settings), model, folder / "novels", settings.data, settings.cloze)
    if not (folder / "text" / "metrics.json").is_file():
        text_alone = tuned(settings, "Offline_Eval.cloze_eval=False")
        evaluate(text_alone, model, folder / "text", text=settings.text)


def tuned(settings: argparse.Namespace, *overrides: str) -> Recipe:
    steps = f"Engine.max_steps={settings.steps}", f"Engine.eval_freq={settings.steps}"
    unseen = f"Global.seed={settings.seed}"
    quick = "Export.prompts=4", "Offline_Eval.overlapping_eval=128"
    return load_recipe(settings.recipe, [*steps, unseen, *quick, *overrides])


def table(output: Path, threads: int) -> Table:
    """Table of finished rows in the order of their creation, with latencies measured now."""
    finished = sorted(output.glob("*/text/metrics.json"), key=lambda path: path.stat().st_mtime)
    folders = {path.parents[1].name: path.parents[1] for path in finished}
    exported = {name: folder / "onnx" for name, folder in folders.items()}
    speeds = measure(exported, prompt_tokens=128, threads=threads)
    titles = "parameters", "bytes", "novels", "text", "cloze", "last token", "prefill", "decode"
    out = Table("", *titles)
    first = None
    for name, folder in folders.items():
        novels, text = read_metrics(folder / "novels"), read_metrics(folder / "text")
        first = first or novels["model"]["n_params"]
        speed, cloze = speeds[name], novels["cloze"]
        out.add_row(
            name,
            f"{novels['model']['n_params'] / first:.3f}",
            f"{speed['bytes_ratio']:.3f}",
            f"{novels['text']['perplexity']:.2f}",
            f"{text['text']['perplexity']:.1f}",
            share(cloze, "accuracy"),
            share(cloze, "last_token_accuracy"),
            f"{speed['prefill_ms']:.2f} ms",
            f"{speed['decode_ms']:.3f} ms",
        )
    return out


def share(metrics: dict[str, float], name: str) -> str:
    """Format a metric with its 95 % interval."""
    return f"{metrics[name]:.2%} ± {1.96 * metrics[f'{name}_stderr']:.2%}"


def arguments(description: str) -> argparse.ArgumentParser:
    """Parser of the arguments shared with `compress_peers.py`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="checkpoint of --recipe")
    parser.add_argument(
        "--data", type=Path, required=True, help="token data set that it was trained on"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the rows")
    parser.add_argument("--cloze", type=Path, required=True, help="LAMBADA-format JSONL")
    parser.add_argument(
        "--text", type=Path, required=True, help="text from another domain, e.g. WikiText"
    )
    parser.add_argument("--recipe", "-r", default="small", help="name or path of the recipe")
    parser.add_argument("--steps", type=int, default=200, help="training steps of every row")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the training order")
    parser.add_argument(
        "--threads", type=int, default=1, help="onnxruntime's threads for latencies"
    )
    return parser


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", nargs="+", default=[""], help="make only rows whose names start with these"
    )
    settings = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    blocks = load_recipe(settings.recipe).Model.num_layers
    for row in rows(linears=4 * blocks + 1):
        if row.name.startswith(tuple(settings.rows)):
            logging.info("--- %s", row.name)
            make(row, settings)
    Console(width=140).print(table(settings.output, settings.threads))


if __name__ == "__main__":
    main()
