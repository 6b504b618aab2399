"""Read a YAML recipe: `_base_` inheritance, `-o A.B.c=v` overrides, typed and checked.

A recipe is named by a path, or by the bare name of one that ships in `lathe/recipes/`.
"""

import difflib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lathe import fleetx
from lathe.errors import UserError
from lathe.settings import Recipe

log = logging.getLogger("lathe")

SHIPPED = Path(str(files("lathe") / "recipes"))


@dataclass
class _Layer:
    """Settings so far, where each dotted key was set, and the keys ignored on the way."""

    values: dict[str, Any]
    origins: dict[str, str]
    ignored: list[str]

    def over(self, base: "_Layer") -> "_Layer":
        return _Layer(
            _merge(base.values, self.values),
            base.origins | self.origins,
            base.ignored + self.ignored,
        )


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Merge a recipe with its bases and `overrides` (`"Engine.max_steps=100"`) and check it.

    Raises:
        UserError: no such recipe, an unknown key (names the nearest known one), a value of the
            wrong type or out of range; each names the file and line, or the override, it is from.
    """
    path = _find(name)
    layer = _read_file(path, ())
    for override in overrides:
        layer = _read_override(override).over(layer)
    if layer.ignored:
        keys = fleetx.listed(layer.ignored)
        log.warning("%s: ignored, without a meaning here: %s", name, keys)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(layer.values), resolve=True)
        return Recipe.model_validate(resolved)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{_shown(path)}: {error}", "mend the ${...}: it names another key of the recipe"
        ) from None
    except ValidationError as error:
        raise _explain(error.errors(), layer.origins, path) from None


def shipped_recipes() -> list[str]:
    """The names of the recipes that come with Lathe."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def _find(name: str | Path) -> Path:
    for path in (Path(name), SHIPPED / f"{name}.yaml"):
        if path.is_file():
            return path
    near = difflib.get_close_matches(str(name), shipped_recipes(), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"no recipe {str(name)!r}",
        f"{hint}give a YAML file, or one of {', '.join(shipped_recipes())}",
    )


def _read_file(path: Path, chain: tuple[Path, ...]) -> _Layer:
    """A file merged over its `_base_`; `chain` is the files whose base it is."""
    path = path.resolve()
    if path in chain:
        circle = " -> ".join(_shown(p) for p in (*chain, path))
        raise UserError(f"_base_ goes in a circle: {circle}", "remove one of these _base_ lines")
    if not path.is_file():
        raise UserError(
            f"{_shown(chain[-1])}: _base_ is {_shown(path)}, which does not exist",
            "give a path relative to the file that names it",
        )
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"))
        values: Any = OmegaConf.to_container(OmegaConf.load(path)) if node else {}
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(f"{_shown(path)}: not YAML: {error}", "mend the file") from None
    if not isinstance(values, dict):
        raise UserError(f"{_shown(path)}: not a mapping of groups", "write Group: {key: value}")
    base = values.pop("_base_", None)
    origins = dict(_lines(node, _shown(path))) if node else {}
    layer = _Layer(values, origins, fleetx.translate(values, origins))
    return layer.over(_read_file(path.parent / str(base), (*chain, path))) if base else layer


def _read_override(override: str) -> _Layer:
    key, equals, _ = override.partition("=")
    form = "write -o Group.key=value, for example -o Engine.max_steps=100"
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise UserError(f"-o {override}: not of the form Group.key=value", form)
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except (yaml.YAMLError, OmegaConfBaseException):
        raise UserError(f"-o {override}: the value is not YAML", form) from None
    parts = key.split(".")
    origins = {".".join(parts[: n + 1]): f"-o {override}" for n in range(len(parts))}
    return _Layer(values, origins, fleetx.translate(values, origins))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Recursive; a group of `over` that says `_inherited_: False` replaces instead."""
    out = {} if over.get("_inherited_") is False else dict(base)
    for key, value in over.items():
        inherited = out.get(key)
        if isinstance(value, dict):
            out[key] = _merge(inherited if isinstance(inherited, dict) else {}, value)
        elif isinstance(inherited, dict) and value is None:
            continue  # a group's heading with nothing under it
        elif key != "_inherited_":
            out[key] = value
    return out


def _lines(node: yaml.Node, file: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            yield dotted, f"{file}:{key.start_mark.line + 1}"
            yield from _lines(value, file, f"{dotted}.")


def _explain(errors: list[ErrorDetails], origins: dict[str, str], path: Path) -> UserError:
    """The first mistake, in the recipe's words."""
    dotted = _setting(errors[0]["loc"])
    prefixes = [dotted.rsplit(".", n)[0] for n in range(dotted.count(".") + 1)]
    origin = next((origins[p] for p in prefixes if p in origins), _shown(path))
    if errors[0]["type"] == "extra_forbidden":
        near = difflib.get_close_matches(dotted, _known_keys(Recipe), 1, cutoff=0.6)
        cure = f"did you mean {near[0]}?" if near else "`lathe recipe` prints every known key"
        return UserError(f"{origin}: unknown key {dotted}", cure)
    same = [e for e in errors if _setting(e["loc"]) == dotted]
    reasons = " or ".join(dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in same))
    found = errors[0]["input"]
    seen = "" if isinstance(found, dict) else f" (found {found!r})"
    return UserError(f"{origin}: {dotted}: {reasons}{seen}", "give a value that fits")


def _setting(location: Sequence[str | int]) -> str:
    """The dotted key of a pydantic location, without list positions and union members."""
    names: list[str] = []
    model: Any = Recipe
    for part in location:
        names.append(str(part))
        field = model.model_fields.get(part)
        if field is None or not _is_group(field.annotation):
            break
        model = field.annotation
    return ".".join(names)


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if _is_group(field.annotation):
            yield from _known_keys(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _shown(path: Path) -> str:
    """Relative where that is shorter to read."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
