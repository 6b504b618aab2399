"""Choose the variant of a pipeline to compile: the machines of a run and its steps' needs."""

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from lathe.model.config import GPTConfig, read_config
from lathe.train.shape import model_config
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Placements, Recipe
from lathe_base.errors import StageError, UserError
from lathe_base.storage import fetch, uri_scheme
from pipelines.commands.arguments import recipe_names
from pipelines.commands.inputs import STORE_SECONDS, within
from pipelines.steps.resources import Pool, Variant
from components.machines import Sizes, estimate_sizes

MACHINES: dict[str, tuple[Any, str, str]] = {
    "nodes": (int | None, "nodes", "Number of training nodes; default 1."),
    "gpus": (int | None, "gpus_per_node", "GPUs per node; 0 for none, default 1."),
    "node_pool": (str, "node_pool", "Value of the node label lathe/node-pool."),
    "queue": (str, "queue", "Kueue LocalQueue of training jobs."),
    "cpus": (int | None, "cpus_per_node", "CPU cores of every compute step."),
    "memory": (
        str,
        "memory_per_node",
        "Memory of every compute step, such as 32Gi. Default: estimated.",
    ),
    "notify": (
        bool | None,
        "notify",
        "Post the run's result to the URL in the Secret lathe-webhook.",
    ),
}
"""Options that set keys of the recipe's group Launch: type, key, help."""


def takes_machines(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `MACHINES` to a command `function(pipeline, arguments, **own)`, which gets
    them as overrides."""

    @functools.wraps(function)
    def command(pipeline: str, arguments: dict[str, Any], **options: Any) -> None:
        machines = {key: options.pop(option) for option, (_, key, _) in MACHINES.items()}
        added = [f"Launch.{k}={value}" for k, value in machines.items() if value not in (None, "")]
        arguments = arguments | {"overrides": [*arguments["overrides"], *added]}
        function(pipeline, arguments, **options)

    def parameter(name: str) -> inspect.Parameter:
        kind, _, help = MACHINES[name]
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default="" if kind is str else None,
            annotation=Annotated[kind, typer.Option(help=help)],
        )

    first, second, *extra = inspect.signature(function).parameters.values()
    extra = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in extra]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [first, second, *map(parameter, MACHINES), *extra]
    )
    return command


def with_store(arguments: dict[str, Any], root: str) -> tuple[dict[str, Any], str]:
    """Turn a pipeline root on a volume into the setting Launch.store; returns the arguments and
    Pipelines' root.

    Pipelines' launcher and driver (2.17) support only S3 and Google Cloud Storage.
    """
    if uri_scheme(root) != "file":
        return arguments, root
    return arguments | {"overrides": [*arguments["overrides"], f"Launch.store={root}"]}, ""


def choose_variant(name: str, arguments: dict[str, Any]) -> Variant:
    """Choose the variant from the group Launch of the pipeline's first recipe, with `Pool`'s
    defaults.

    Raises:
        UserError: that recipe is invalid.
    """
    names, overrides = list(recipe_names(name, arguments).values()), arguments["overrides"]
    recipe = load_recipe(names[0], overrides)
    launch, set_fields = recipe.Launch, recipe.Launch.model_fields_set
    pool = Pool(
        nodes=launch.nodes,
        gpus=launch.gpus_per_node if "gpus_per_node" in set_fields else Pool.gpus,
        node_pool=launch.node_pool or Pool.node_pool,
        queue=launch.queue,
        engine=_recipe_engine(names, overrides),
        cpus=launch.cpus_per_node if "cpus_per_node" in set_fields else None,
        memory=launch.memory_per_node if "memory_per_node" in set_fields else None,
        shared_memory=launch.shared_memory,
    )
    machines = load_recipe(names[0], [*overrides, *Variant(pool).overrides])
    # Only the settings that were given: the others are those of the cluster.
    given = launch.model_dump(include=set(Placements.model_fields), exclude_unset=True)
    return Variant(
        pool,
        placement=Placements.model_validate(given),
        sizes=_sizes(arguments, machines),
        shards=launch.shards,
        notify=launch.notify,
    )


def _sizes(arguments: dict[str, Any], recipe: Recipe) -> Sizes | None:
    """Estimate the steps' sizes; None if the model or its parallel layout cannot be determined on
    this machine."""
    try:
        if model := arguments.get("model"):
            config = within(STORE_SECONDS, model, _config_at, model)
        else:
            config = model_config(recipe, recipe.Prepare.vocab_size)
        return estimate_sizes(config, recipe)
    except (UserError, StageError):
        return None


def _config_at(model: str) -> GPTConfig:
    with TemporaryDirectory() as folder:
        fetch(f"{model.rstrip('/')}/config.json", Path(folder))
        return read_config(Path(folder))


def _recipe_engine(recipes: list[str], overrides: list[str]) -> str:
    """`paddle` if one of the recipes sets it."""
    for recipe in recipes:
        with suppress(UserError):  # reported by the check of the recipes
            if load_recipe(recipe, overrides).Compress.engine == "paddle":
                return "paddle"
    return Pool.engine
