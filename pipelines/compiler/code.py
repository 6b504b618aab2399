"""Digests of each component's code, for Pipelines' cache key if the image is referenced by a tag,
which may stay the same when the image changes."""

import json
from functools import lru_cache

from lathe_base.config.recipe import load_recipe, shipped_recipes
from lathe_base.config.settings import Recipe
from lathe_base.storage import digest, sha256
from pipelines.compiler.reach import REPOSITORY, Sources
from pipelines.steps.stages import NAMES

LOCKS = REPOSITORY / "images"


def code_digests() -> dict[str, str]:
    """Digest of what each component depends on: its code, the images' lock files, and the settings
    that it reads from the shipped recipes, which are passed by name."""
    sources = Sources()
    locks = [sha256(path) for path in sorted(LOCKS.glob("*/*.lock"))]
    recipes = [settings_digests(name) for name in shipped_recipes()]
    digests: dict[str, str] = {}
    for name in NAMES:
        reached = sources.reached(name)
        settings = [[groups[group] for group in sorted(reached.groups)] for groups in recipes]
        digests[name] = digest(json.dumps([reached.digest, locks, settings]))
    return digests


@lru_cache(maxsize=64)
def settings_digests(recipe: str, overrides: tuple[str, ...] = ()) -> dict[str, str]:
    """Digest of each group of a resolved recipe; of the defaults if `recipe` is empty."""
    settings = load_recipe(recipe, overrides) if recipe else Recipe()
    values = settings.model_dump(mode="json")
    return {group: digest(json.dumps(value, sort_keys=True)) for group, value in values.items()}
