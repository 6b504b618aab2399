"""One budget for widths and formats together, against formats alone and widths alone.

    lathe prepare
    lathe pretrain
    python benchmarks/budget.py run/dense --data run/data --output run/budgets

Every model is found by the same search (`lathe.search.compress`) for the same target, trained for
the same number of tokens from the same weights, and evaluated on the same text. Finished models are
reused: the same command resumes after a kill, or prints the table. "Formats alone" starts from the
dense model with the finetuning that the others get after pruning, since a design without pruning
has none.
"""

import argparse
import logging
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lathe.compress.prune import prune
from lathe.search.compress import compress
from lathe.search.design import Goal
from lathe.search.result import Trial
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import StageError

EVERYTHING = "Compress.Quantization.quantize_embedding=True"
WAYS = {
    "widths and formats": ("Compress.Quantization.weight_bits=4",),
    "formats alone": ("Compress.Quantization.weight_bits=4", "Compress.Prune.enable=False"),
    "widths, INT8": (),
}
ANY = 1e6  # increase of perplexity: no limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="dense checkpoint")
    parser.add_argument(
        "--data", type=Path, required=True, help="token data set that it was trained on"
    )
    parser.add_argument("--output", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--recipes",
        nargs=3,
        default=["tiny", "tiny-prune", "tiny-qat"],
        help="recipes for evaluation, pruning and quantization",
    )
    parser.add_argument(
        "--target", default="bytes", help="measure to reduce: latency, prefill, bytes or parameters"
    )
    parser.add_argument(
        "--share",
        type=float,
        action="append",
        help="target as a fraction of the dense model; repeatable",
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed of the training order")
    parser.add_argument(
        "-o", "--override", action="append", default=[], help="override for all recipes"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    finetuned = given.output / "finetuned"
    overrides = (*given.override, f"Global.seed={given.seed}")
    prune(
        load_recipe(given.recipes[1], (*overrides, "Compress.Prune.ratio=0")),
        *(given.model, given.data, finetuned),
    )
    table = Table("target", "way", "predicted", "reached", "predicted KL", "perplexity", "dense")
    for share in given.share or (0.15, 0.12, 0.1, 0.08):
        goal = Goal(given.target, share, "perplexity", ANY)
        for way, own in WAYS.items():
            base, pruning, quantization = (
                load_recipe(name, (*overrides, EVERYTHING, *own)) for name in given.recipes
            )
            model = finetuned if way == "formats alone" else given.model
            output = given.output / way.replace(" ", "-").replace(",", "")
            try:
                found = compress(goal, (base, pruning, quantization), model, given.data, output)
            except StageError as error:
                logging.info("%s", error)
                table.add_row(f"{share:g}", way, "none reaches it")
                continue
            nearest = found.best or min(found.trials, key=lambda trial: trial.reached(goal))
            table.add_row(f"{share:g}", way, *figures(nearest, goal, found.dense["perplexity"]))
    Console(width=110).print(table)


def figures(trial: Trial, goal: Goal, dense: float | None) -> list[str]:
    values = (trial.predicted, trial.reached(goal), trial.cost, trial.perplexity, dense)
    forms = (".3f", ".3f", ".4f", ".2f", ".2f")
    return ["-" if v is None else format(v, form) for v, form in zip(values, forms, strict=True)]


if __name__ == "__main__":
    main()
