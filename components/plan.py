"""What the first step of a run decides for all others: the settings that each reads, and the
machines that their pods request.

A step is given the settings of `SETTINGS` and no others, as an excerpt of its recipe, and reading
another is an error: what is not here does not invalidate its result. They are in a table, not in
the components' declarations, because the first step reads them in its pod, where KFP cannot import
components.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from components.machines import (
    Pool,
    Sizes,
    estimate_sizes,
    placement_overrides,
    requests,
    trainjob_overrides,
)
from lathe.data.run_inputs import RunInputs
from lathe.model.config import read_config
from lathe.train.shape import model_config
from lathe_base.config.recipe import excerpt_text, load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, StageError, UserError
from lathe_base.storage import fetch
from lathe_launch.shape import require_whole_gpus

log = logging.getLogger("lathe")

RESTARTS = "Launch.restarts"
"""A setting that every step reads: `components.stage`."""

TRAINING = (
    *("Global", "Engine", "Data", "Model", "Distributed", "Launch", "Optimizer"),
    *("Compress.engine", "Compress.Distill", "Compress.Quantization"),
)
ON_GPU = ("Global", "Launch.gpus_per_node", "Compress.engine")

SETTINGS: dict[str, Sequence[str]] = {
    "prepare": ("Prepare", "Data"),
    "pretrain": TRAINING,
    "finetune": (*TRAINING, "Finetune"),
    "prune": (*TRAINING, "Compress.Prune"),
    "analyze": (
        *(*ON_GPU, "Engine", "Data", "Model", "Distributed", "Compress.Quantization"),
        *("Sensitivity", "Gate.max_perplexity_increase"),
    ),
    "quantize": (*TRAINING, "Sensitivity.calibration_batches", "Gate.max_perplexity_increase"),
    "estimate": (
        *(*ON_GPU, "Engine", "Data", "Compress.Quantization", "Sensitivity"),
        "Gate.max_perplexity_increase",
    ),
    "evaluate": (*ON_GPU, "Offline_Eval", "Generation"),
    "export": ("Export", "Compress.engine", "Production.require"),
    "price": ("Export", "Compress.Quantization"),
    "choose": ("Gate",),
    "deploy": ("Serving", "Generation", "Export"),
    "gate": ("Gate",),
    "release": (
        *("Production", "Offline_Eval", "Gate", "Serving", "Global", "Generation"),
        "Compress.engine",
    ),
    "report": ("Gate",),
}
"""Component -> groups of the recipe, or `Group.key`."""

TRAINS = [name for name, settings in SETTINGS.items() if {*TRAINING} <= {*settings}]
"""The steps that train, with all GPUs of a node."""

SHARED = {"tokenizer": "prepare", "tokenize": "prepare", "join": "prepare"}
SHARED |= {"certify": "pretrain", "design": "export"}
"""Components that read the same settings as another."""

RECIPES = {"prune": "prune_recipe", "finetune": "finetune_recipe"}
RECIPES |= dict.fromkeys(("analyze", "quantize", "estimate"), "qat_recipe")
"""Component -> the argument of a pipeline with the recipe of its settings, if it is another than
`recipe`. A pipeline without that argument has one recipe."""

CHATS = ("Prepare.chat=True", "Data.reset_attention=True")
"""What a run on conversations sets in all recipes: several share a sample, and no token of one sees
another."""


def log_contents(inputs: RunInputs) -> None:
    """Log the content identifier of each of a run's external inputs."""
    for address, content in (inputs.text | inputs.scored).items():
        log.info("%s: %s", address, content)


def recipe_argument(name: str) -> str:
    """The argument of a pipeline with the recipe of a component's settings; empty if it has
    none."""
    shared = SHARED.get(name, name)
    return RECIPES.get(shared, "recipe") if shared in SETTINGS else ""


def plan(
    recipe: str,
    overrides: Sequence[str],
    prune_recipe: str = "",
    qat_recipe: str = "",
    finetune_recipe: str = "",
    model: str = "",
    pool: Pool | None = None,
    has_chats: bool = False,
) -> dict[str, Any]:
    """The settings of every component as a recipe's text, by its name, and what `requests` returns.

    Args:
        overrides: of all recipes; they also override `pool`.
        model: checkpoint folder that the run starts from, whose size the machines have to fit.
        pool: None for a run on this machine, whose pods request nothing.
        has_chats: whether the run's text is conversations.

    Raises:
        UserError: a recipe is invalid, divides conversations in other parts than the first, or
            requests several slices of GPUs for a pod.
    """
    names = {"recipe": recipe, "prune_recipe": prune_recipe, "qat_recipe": qat_recipe}
    names |= {"finetune_recipe": finetune_recipe}
    overrides = [*CHATS, *overrides] if has_chats else overrides
    decided: dict[str, Any] = {}
    if pool:
        # The pool comes first: the user's own overrides replace it.
        overrides = [*pool.overrides, *overrides]
        first = load_recipe(recipe, overrides)
        for name in TRAINS:
            require_whole_gpus(first.Launch.gpus_per_node, first.Launch.of_step(name))
        sizes = run_sizes(first, model)
        decided = requests(first.Launch, sizes)
        placement = placement_overrides(first.Launch)
        overrides = [*overrides, *placement, *trainjob_overrides(first.Launch, sizes)]
    recipes = {key: load_recipe(value or recipe, overrides) for key, value in names.items()}
    # All steps must hold out the same conversations.
    splits = {key: loaded.Data.Train.dataset.split for key, loaded in recipes.items()}
    if has_chats and (split := splits["finetune_recipe"]) != splits["recipe"]:
        raise UserError(
            f"the recipe that finetunes has Data.Train.dataset.split {split}, and the pipeline's "
            f"{splits['recipe']}: it would train on what the others hold out",
            "give both the same: -o Data.Train.dataset.split=[80,10,10]",
            Code.CONFLICTING_OPTIONS,
        )
    for name, settings in SETTINGS.items():
        decided[name] = excerpt_text(recipes[recipe_argument(name)], [*settings, RESTARTS])
    return decided


def run_sizes(recipe: Recipe, model: str) -> Sizes | None:
    """The sizes of a run's steps; None if the model or its parallel layout cannot be determined."""
    try:
        if not model:
            return estimate_sizes(model_config(recipe, recipe.Prepare.vocab_size), recipe)
        # Of a model, the configuration is enough.
        with TemporaryDirectory() as folder:
            fetch(f"{model.rstrip('/')}/config.json", Path(folder))
            return estimate_sizes(read_config(Path(folder)), recipe)
    except (UserError, StageError):  # the steps themselves report it, better
        return None
