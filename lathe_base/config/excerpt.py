"""The part of a recipe that one step reads, so that other settings are not part of its cache key.

The settings that are declared for a step, and no others, reach it: as a recipe's text, resolved
and sorted, with the list of what it contains. Reading any other setting raises `UndeclaredSetting`,
in this process and in all that it starts with that text. So a result cannot depend on a setting
that its cache key does not have.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lathe_base.config.settings import Recipe
from lathe_base.config.text import write

EXCERPT = "_excerpt_"
"""The key of a recipe's text that lists the groups, or `Group.key`, that it contains."""


def excerpt(recipe: Recipe, keys: Iterable[str]) -> Recipe:
    """A copy of a recipe with these settings only.

    Args:
        keys: groups, or `Group.key` for single keys of a group.
    """
    inner: dict[str, set[str]] = {}
    for key in keys:
        group, _, rest = key.partition(".")
        inner.setdefault(group, set()).add(rest)
    part: Recipe = _only(recipe, inner.keys())
    for group, names in inner.items():
        if "" not in names:
            part.__dict__[group] = _only(getattr(recipe, group), names)
    return part


def excerpt_text(recipe: Recipe, keys: Iterable[str]) -> str:
    """The excerpt as a recipe's text, the same for all ways to write the same settings."""
    return recipe_as_text(excerpt(recipe, keys))


def recipe_as_text(recipe: Recipe) -> str:
    """A recipe, or an excerpt of one, as text that `load_recipe` accepts."""
    groups = recipe.model_dump(mode="json", exclude_unset=True).items()
    # A group of which other keys were set is empty here.
    values = _sorted({name: group for name, group in groups if group})
    keys = sorted(_contained(recipe))
    is_whole = set(keys) == Recipe.model_fields.keys()
    return str(write(values if is_whole else {EXCERPT: keys} | values))


def _contained(recipe: Recipe) -> Iterator[str]:
    """The groups of a recipe, and the single keys of groups that it has in part."""
    for name in recipe.__dict__:
        group = getattr(recipe, name)
        is_whole = group.__dict__.keys() == type(group).model_fields.keys()
        yield from [name] if is_whole else (f"{name}.{key}" for key in group.__dict__)


def _only(settings: Any, names: Iterable[str]) -> Any:
    copy = settings.model_copy()
    for name in type(settings).model_fields.keys() - set(names):
        del copy.__dict__[name]
        copy.model_fields_set.discard(name)
    return copy


def _sorted(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _sorted(values[key]) for key in sorted(values)}
    return values
