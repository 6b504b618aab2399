"""Digests of each component's code, for Pipelines' cache key if the image is referenced by a tag,
which may stay the same when the image changes."""

import json
from collections.abc import Collection

from lathe_base.config.recipe import shipped_recipes
from lathe_base.storage import digest, sha256
from pipelines.compiler.reach import REPOSITORY, Sources
from pipelines.local.cache import settings_digests
from pipelines.steps.stages import NAMES

LOCKS = REPOSITORY / "images"


def code_digests() -> dict[str, str]:
    """Digest of what each component depends on: its code, the images' lock files, and the settings
    that it reads from the shipped recipes, which are passed by name."""
    sources = Sources()
    locks = [sha256(path) for path in sorted(LOCKS.glob("*/*.lock"))]
    digests: dict[str, str] = {}
    for name in NAMES:
        reached = sources.reached(name)
        digests[name] = digest(json.dumps([reached.digest, locks, _recipes(reached.groups)]))
    return digests


def _recipes(groups: Collection[str]) -> list[list[str]]:
    """Digests of these groups in every shipped recipe, resolved."""
    resolved = [settings_digests(name) for name in shipped_recipes()]
    return [[recipes[group] for group in sorted(groups)] for recipes in resolved]
