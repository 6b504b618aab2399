"""Tries recipes at their own scale on this machine: memory, collectives and seconds.

    python benchmarks/trial.py [--only gpt-6.7b ...]

Prints a row per recipe: peak memory of the largest process, measured and planned, its collectives
per step, and the bytes that they exchange, measured and planned (`lathe.train.speed.volume`).
"""

import argparse

from lathe.plan.trial import TrainingTrial, try_training
from lathe_base.config.recipe import load_recipe

RECIPES = {
    "gpt-345m": 1,
    "gpt-345m-auto-dp8": 8,
    "megatron-345m": 8,
    "gpt-1.3b": 1,
    "gpt-1.3b-dp8": 8,
    "megatron-1.3b": 8,
    "gpt-6.7b": 16,
    "gpt-175b-mp8-pp16": 128,
    "qat-345m-mp8": 8,
    "prune-6.7b-sharding16": 16,
}
COLUMNS = (
    *("recipe", "GPUs", "GB tried", "GB planned", "", "collectives", "GB exchanged", "planned"),
    *("FLOPs / MFU's", "order", "tried", "s"),
)


def row(name: str, trial: TrainingTrial) -> str:
    fullest, layout = trial.fullest, trial.layout
    tried, planned = fullest.peak / 1e9, trial.estimate.total / 1e9
    calls = sum(one.calls for one in fullest.traffic)
    moved = sum(fullest.volume.get(dim, 0.0) for dim in trial.volume) / 1e9
    volume = sum(trial.volume.values()) / 1e9
    cells = (
        name,
        f"{layout.gpus}",
        f"{tried:.1f}",
        f"{planned:.1f}",
        f"{planned / tried - 1:+.1%}",
        f"{calls:,.0f}",
        f"{moved:,.2f}",
        f"{volume:,.2f}",
        f"{trial.flops / trial.model_flops:.2f}",
        trial.mismatch or "same",
        f"{len(trial.ranks)}",
        f"{trial.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    names = parser.parse_args().only
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for name in names:
        print(row(name, try_training(load_recipe(name), RECIPES[name])), flush=True)


if __name__ == "__main__":
    main()
