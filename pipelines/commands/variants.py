"""The machines of a submitted run, and what its pipeline is compiled with."""

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer

from components.machines import Pool, requests, trainjob_overrides
from components.plan import run_sizes
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import LaunchSettings, Placements
from lathe_base.errors import UserError
from lathe_base.storage import uri_scheme
from pipelines.commands.arguments import recipe_names
from pipelines.commands.inputs import STORE_SECONDS, within
from pipelines.compiler.compile import MACHINES
from pipelines.steps.resources import Variant

LAUNCH = {
    **{"gpus": "gpus_per_node", "nodes": "nodes", "cpus": "cpus_per_node"},
    **{"memory": "memory_per_node", "node_pool": "node_pool", "queue": "queue"},
    "notify": "notify",
}
"""Parameter of a run -> key of the recipe's group Launch with its value."""


def takes_machines(function: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each of `MACHINES` to a command `function(pipeline, arguments, **own)`,
    which gets those that were given among the arguments."""

    @functools.wraps(function)
    def command(pipeline: str, arguments: dict[str, Any], **options: Any) -> None:
        given = {key: options.pop(key) for key in MACHINES}
        given = {key: value for key, value in given.items() if value is not None}
        function(pipeline, arguments | given, **options)

    def parameter(name: str) -> inspect.Parameter:
        default, help = MACHINES[name]
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[type(default) | None, typer.Option(help=help)],
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


def with_machines(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a run with its machines among them: those that were given, else those of
    the group Launch of the pipeline's first recipe, else the pipeline's defaults.

    Overrides of these settings become arguments, so that a clone of the run can change them.

    Raises:
        UserError: that recipe is invalid.
    """
    launch = load_recipe(_first_recipe(name, arguments), arguments["overrides"]).Launch
    values = {key: getattr(launch, field) for key, field in LAUNCH.items()
              if field in launch.model_fields_set}  # fmt: skip
    known = tuple(f"Launch.{field}=" for field in LAUNCH.values())
    overrides = [o for o in arguments["overrides"] if not o.startswith(known)]
    found = {key: value for key, value in values.items() if value is not None}
    return found | arguments | {"overrides": overrides}


def run_pool(arguments: dict[str, Any]) -> Pool:
    """The machines among the arguments of a run."""
    return Pool(**{key: arguments[key] for key in asdict(Pool()) if key in arguments})


def choose_variant(name: str, arguments: dict[str, Any]) -> Variant:
    """What the pipeline of a run is compiled with, by its recipes.

    Raises:
        UserError: the first of them is invalid.
    """
    names = list(recipe_names(name, arguments).values())
    launch = load_recipe(names[0], arguments["overrides"]).Launch
    # Only the settings that were given: the others are those of the cluster.
    given = launch.model_dump(include=set(Placements.model_fields), exclude_unset=True)
    return Variant(
        placement=Placements.model_validate(given),
        engine=_recipe_engine(names, arguments["overrides"]),
        shared_memory=launch.shared_memory,
        shards=launch.shards,
        has_chats=bool(arguments.get("chat")),
    )


def launch_settings(name: str, arguments: dict[str, Any]) -> tuple[LaunchSettings, dict[str, Any]]:
    """The group Launch of a run's first recipe, as for its TrainJobs, and what its pods request:
    the same that the run's first step finds."""
    recipe = _first_recipe(name, arguments)
    overrides = [*run_pool(arguments).overrides, *arguments["overrides"]]
    settings = load_recipe(recipe, overrides)
    sizes = None
    with suppress(UserError):  # the model's store does not answer in time
        model = arguments.get("model", "")
        sizes = within(STORE_SECONDS, model, run_sizes, settings, model)
    more = trainjob_overrides(settings.Launch, sizes)
    return load_recipe(recipe, [*overrides, *more]).Launch, requests(settings.Launch, sizes)


def _first_recipe(name: str, arguments: dict[str, Any]) -> str:
    return str(next(iter(recipe_names(name, arguments).values())))


def _recipe_engine(recipes: list[str], overrides: list[str]) -> str:
    """`paddle` if one of the recipes sets it."""
    for recipe in recipes:
        with suppress(UserError):  # reported by the check of the recipes
            if load_recipe(recipe, overrides).Compress.engine == "paddle":
                return "paddle"
    return Variant.engine
