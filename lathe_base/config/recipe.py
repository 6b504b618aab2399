"""Read a YAML recipe: `_base_` inheritance, `-o A.B.c=v` overrides, typed and validated.

A recipe is given as a path, as the name of a built-in recipe in `lathe_base/recipes/`, or, if the
string has a line break, as the recipe's text, which runs on a cluster carry with them. A text may
be an excerpt of a recipe, see `excerpt`.

A recipe becomes settings in this order: the layers (its bases, the file, every override) are parsed
and PaddleFleetX's keys rewritten, one layer at a time; the layers are merged; references are
replaced by values; pydantic checks the result.
"""

import difflib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lathe_base.config import fleetx
from lathe_base.config.settings import Recipe
from lathe_base.config.text import MAX_RECIPE_BYTES, MAX_VALUES, Mistake, parse, write
from lathe_base.errors import Code, UserError, explain_os_error, printable

log = logging.getLogger("lathe")

SHIPPED = Path(os.path.realpath(str(files("lathe_base") / "recipes")))
FORM = "write -o Group.key=value, for example -o Engine.max_steps=100"

EXCERPT = "_excerpt_"
"""The key of a recipe's text that lists the groups, or `Group.key`, that it contains."""

MAX_CHARACTERS = 4096  # of a text with a reference, and of what it becomes
MAX_STEPS = 16  # from a reference to a value

KeyPath = tuple[str, ...]

# Backslashes, and a whole reference: dots that count groups upwards, and a key. Without the key it
# is none, unless an odd number of backslashes makes it text.
_REFERENCE = re.compile(r"(\\*)\$\{(?: *(\.*)([\w-]+(?:\.[\w-]+|\[[\w-]+\])*) *\})?")
_RESOLVER = re.compile(r"\$\{ *([\w.]*) *:")


@dataclass
class _Layer:
    """The merged settings, where each dotted key was set, and the ignored keys."""

    values: dict[str, Any]
    origins: dict[str, str]
    ignored: list[fleetx.IgnoredKey]

    def over(self, base: "_Layer") -> "_Layer":
        fleetx.enable_precision(self.values, base.values)
        return _Layer(
            _merge(base.values, self.values),
            base.origins | self.origins,
            base.ignored + self.ignored,
        )


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Merge a recipe with its bases and `overrides` (`"Engine.max_steps=100"`) and check it.

    `${Group.key}` is the value of another key; nothing else is looked up or run.

    Raises:
        UserError: no such recipe, an unknown key (names the nearest known one), a value of the
            wrong type or out of range; each names the file and line, or the override, it is from.
            For a file that is not a recipe, messages quote at most its keys.
    """
    layer, shown = _read(name)
    # Overrides may set keys that an excerpt has not; the excerpt is cut out of the result again.
    keys = layer.values.pop(EXCERPT, None)
    for override in overrides:
        layer = _read_override(override).over(layer)
    if layer.ignored and "RANK" not in os.environ:  # workers repeat what their parent read
        ignored = fleetx.listed(layer.ignored)
        log.warning("ignoring keys of PaddleFleetX that change no result: %s", ignored)
    try:
        recipe = Recipe.model_validate(
            resolve_references(layer.values, layer.origins, shown),
        )
    except ValidationError as error:
        raise _explain(error.errors(), layer.origins, shown) from None
    if keys is None:
        return recipe
    known = set(_known_keys(Recipe))
    if not isinstance(keys, list) or not all(isinstance(k, str) and k in known for k in keys):
        raise UserError(
            f"{shown}: {EXCERPT} is not a list of settings", "remove it", Code.MALFORMED
        )
    return excerpt(recipe, keys)


def recipe_text(path: Path) -> str:
    """A recipe file merged with its bases, as text that `load_recipe` accepts.

    Raises:
        UserError: as `load_recipe`, if the files cannot be read.
    """
    recipe_path = _find(path)
    layer = _read_file(recipe_path, recipe_path.parent, ())
    return f"# {printable(path.name)}\n{write(layer.values)}"


def shipped_recipes() -> list[str]:
    """The names of the recipes that come with Lathe."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


# --- layers ---


def _read(name: str | Path) -> tuple[_Layer, str]:
    """A recipe merged with its bases, and its name for messages."""
    if "\n" in str(name) and not os.path.isfile(name):
        layer = _read_text(str(name).encode(), "the recipe's text")
        if "_base_" in layer.values:
            raise UserError(
                "the recipe's text has a _base_",
                "merge it with its bases first",
                Code.INVALID_VALUE,
            )
        return layer.over(_Layer({}, {}, [])), "the recipe's text"
    path = _find(name)
    return _read_file(path, path.parent, ()), _shown(path)


def _find(name: str | Path) -> Path:
    file_name = str(name)
    wrong = "" if file_name else ": an empty name"
    # A file wins over a built-in recipe of the same name.
    try:
        path = _real(file_name)
        if file_name and path.is_file():
            return path
        if file_name and path.exists():
            wrong = ": not a regular file"
    except UserError as error:
        wrong = f": {error.what}"
    if file_name in shipped_recipes():
        return SHIPPED / f"{file_name}.yaml"
    near = difflib.get_close_matches(file_name[:80], shipped_recipes(), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"no recipe '{printable(file_name)}'{wrong}",
        f"{hint}give a YAML file, or one of {', '.join(shipped_recipes())}",
        Code.NOT_FOUND,
    )


def _real(path: str) -> Path:
    """Resolve symlinks.

    Raises:
        UserError: an invalid file name, or a path below a folder without search permission.
    """
    try:
        real = Path(os.path.realpath(path))
        real.exists()
        return real
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a valid file name"
        raise UserError(f"{printable(path)}: {reason}", "give a YAML file", Code.BAD_PATH) from None


def _read_file(path: Path, root: Path, chain: tuple[Path, ...]) -> _Layer:
    """A file merged over its `_base_`.

    Args:
        root: the folder of the recipe that was asked for: bases are below it, or ship with Lathe.
        chain: the files whose base it is.
    """
    if path in chain:
        circle = " -> ".join(_shown(p) for p in (*chain, path))
        raise UserError(
            f"circular _base_: {circle}", "remove one of these _base_ lines", Code.CIRCULAR
        )
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"{_shown(path)}: {error.strerror}",
            "give a file that can be read",
            explain_os_error(error, path).code,
        ) from None
    layer = _read_text(content, _shown(path))
    base = layer.values.pop("_base_", None)
    if base is None:
        return layer.over(_Layer({}, {}, []))
    # The base: a path relative to this file, or the name of a built-in recipe.
    file, hint = _shown(path), "give a path relative to the file that names it"
    if not isinstance(base, str) or not base:
        raise UserError(f"{file}: _base_ is not a file name", hint, Code.INVALID_VALUE)
    base_path = _real(str(path.parent / base))
    # Symbolic links are resolved, so that none leads out of the folder.
    if base_path.parent != SHIPPED and not base_path.is_relative_to(root):
        raise UserError(
            f"{file}: _base_ {printable(base)} is not below {root}",
            "copy it beside the recipe, or name a built-in recipe",
            Code.UNSAFE,
        )
    if not base_path.is_file():
        if base not in shipped_recipes():
            wrong = "is not a regular file" if base_path.exists() else "does not exist"
            what = f"{file}: _base_ is {_shown(base_path)}, which {wrong}"
            raise UserError(what, hint, Code.NOT_FOUND)
        base_path = SHIPPED / f"{base}.yaml"
    return layer.over(_read_file(base_path, root, (*chain, path)))


def _read_text(content: bytes, file: str) -> _Layer:
    try:
        values, lines = parse(content)
    except Mistake as mistake:
        at = f" at line {mistake.line}" if mistake.line else ""
        raise UserError(
            f"{file}: not YAML{at}: {mistake.reason}", "fix the YAML", Code.MALFORMED
        ) from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise UserError(
            f"{file}: not a mapping of groups", "write Group: {key: value}", Code.MALFORMED
        )
    origins = {key: f"{file}:{line}" for key, line in lines.items()}
    check_references(values, origins, file)
    return _Layer(values, origins, fleetx.translate(values, origins))


def _read_override(override: str) -> _Layer:
    key, equals, text = override.partition("=")
    source = f"-o {printable(override)}"
    if not equals or not re.fullmatch(r"\w+(\.\w+){0,8}", key):
        raise UserError(f"{source}: not of the form Group.key=value", FORM, Code.MALFORMED)
    try:
        value, lines = parse(text.encode(errors="surrogatepass"))
    except Mistake as mistake:
        raise UserError(
            f"{source}: the value is not YAML: {mistake.reason}", FORM, Code.MALFORMED
        ) from None
    parts = key.split(".")
    origins = {".".join(parts[: n + 1]): source for n in range(len(parts))}
    origins |= {f"{key}.{inner}": source for inner in lines}
    for part in reversed(parts):
        value = {part: value}
    check_references(value, origins, source)
    return _Layer(value, origins, fleetx.translate(value, origins))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge recursively; a group of `over` with `_inherited_: False` replaces the inherited one."""
    out = {} if over.get("_inherited_") is False else dict(base)
    for key, value in over.items():
        inherited = out.get(key)
        if isinstance(value, dict):
            out[key] = _merge(inherited if isinstance(inherited, dict) else {}, value)
        elif isinstance(inherited, dict) and value is None:
            continue  # a group's heading with nothing under it
        elif key != "_inherited_" or not isinstance(value, bool):
            out[key] = value
    return out


# --- references ---


def check_references(values: Mapping[str, Any], origins: Mapping[str, str], source: str) -> None:
    """Reject `${...}` that is not a plain reference, without looking anything up.

    The syntax is OmegaConf's: `${.key}` counts from the group that the text is in, `${Group[key]}`
    is `${Group.key}`, and `\\${` stands for the characters themselves. Its resolvers are refused:
    what `${oc.env:NAME}` finds may be a secret, and a recipe is printed and written into artifacts.

    Args:
        origins: dotted key -> where it was set; `source` for keys that are missing there.

    Raises:
        UserError: a resolver, at any depth, or a malformed reference.
    """
    for path, text in _texts(values):
        where = f"{where_set(path, origins, source)}: {'.'.join(path)}"
        if len(text) > MAX_CHARACTERS:
            raise UserError(
                f"{where}: a text of more than {MAX_CHARACTERS} characters with ${{...}}",
                "write the value itself",
                Code.TOO_LARGE,
            )
        for match in _REFERENCE.finditer(text):
            if match[3] is not None or len(match[1]) % 2:
                continue
            if resolver := _RESOLVER.search(text[match.start() :]):
                raise UserError(
                    f"{where}: resolvers such as ${{{printable(resolver[1])}:...}} are not "
                    "supported",
                    "write the value itself; ${Group.key} refers to another key of the recipe",
                    Code.UNSUPPORTED,
                )
            raise UserError(
                f"{where}: malformed ${{...}}",
                "write ${Group.key} for the value of another key, or \\${ for a literal ${",
                Code.MALFORMED,
            )


def resolve_references(
    values: dict[str, Any], origins: Mapping[str, str], source: str
) -> dict[str, Any]:
    """Replace every reference by its value, after `check_references`.

    Raises:
        UserError: an unknown key, a circular reference, or too many references.
    """
    out: dict[str, Any] = _References(values, origins, source).resolved(values, (), ())
    return out


class _References:
    """Resolves the references of one recipe, within limits on the size of the result.

    In its methods `path` is the location of a value, and `chain` the locations of the references
    that led to it.
    """

    def __init__(self, values: dict[str, Any], origins: Mapping[str, str], source: str) -> None:
        self.values, self.origins, self.source = values, origins, source
        self.spent = 0  # values made

    def resolved(self, value: Any, path: KeyPath, chain: tuple[KeyPath, ...]) -> Any:
        self.spent += 1
        if self.spent > MAX_VALUES:
            raise self._mistake(
                chain, f"its references expand to more than {MAX_VALUES} values", Code.TOO_LARGE
            )
        if isinstance(value, dict):
            return {key: self.resolved(inner, (*path, key), chain) for key, inner in value.items()}
        if isinstance(value, list):
            items = enumerate(value)
            return [self.resolved(inner, (*path, str(index)), chain) for index, inner in items]
        return self._text(value, path, chain) if _has_reference(value) else value

    def _text(self, value: str, path: KeyPath, chain: tuple[KeyPath, ...]) -> Any:
        """Resolve the references in a text; a text that is a single reference becomes that value
        itself."""
        chain = (*chain, path)
        if path in chain[:-1]:
            raise self._mistake(
                chain, f"circular reference: {' -> '.join(map('.'.join, chain))}", Code.CIRCULAR
            )
        if len(chain) > MAX_STEPS:
            raise self._mistake(
                chain, f"its references take more than {MAX_STEPS} steps", Code.TOO_LARGE
            )

        def look_up(match: re.Match[str]) -> Any:
            dots, key = len(match[2]), tuple(re.findall(r"[\w-]+", match[3]))
            target = (*path[: max(0, len(path) - dots)], *key) if dots else key
            node: Any = self.values
            for step, part in enumerate(target):
                if _has_reference(node):  # a group on the way may itself be a reference
                    node = self.resolved(node, target[:step], chain)
                try:
                    node = node[int(part)] if isinstance(node, list) else node[part]
                except (KeyError, IndexError, ValueError, TypeError):
                    raise self._mistake(
                        chain,
                        f"unknown key {printable('.'.join(target))} in ${{...}}",
                        Code.UNKNOWN_KEY,
                    ) from None
            return self.resolved(node, target, chain)

        def substitute(match: re.Match[str]) -> str:
            backslashes, is_escaped = divmod(len(match[1]), 2)
            reference = match[0][len(match[1]) :]
            return "\\" * backslashes + (reference if is_escaped else str(look_up(match)))

        whole = _REFERENCE.fullmatch(value)
        if whole and not whole[1]:
            return look_up(whole)
        # Checked after every text, because references to texts of references double their length.
        text = _REFERENCE.sub(substitute, value)
        if len(text) > MAX_CHARACTERS:
            raise self._mistake(
                chain,
                f"its references expand to more than {MAX_CHARACTERS} characters",
                Code.TOO_LARGE,
            )
        return text

    def _mistake(self, chain: tuple[KeyPath, ...], what: str, code: Code) -> UserError:
        first = chain[0] if chain else ()
        return UserError(
            f"{where_set(first, self.origins, self.source)}: {'.'.join(first)}: {what}",
            "fix the ${...}: it must name another key of the recipe",
            code,
        )


def where_set(path: KeyPath, origins: Mapping[str, str], source: str) -> str:
    """Where a key, or the nearest enclosing group, was set."""
    prefixes = (".".join(path[:n]) for n in range(len(path), 0, -1))
    return next((origins[prefix] for prefix in prefixes if prefix in origins), source)


def _texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, dict | list):
            yield from _texts(inner, (*path, str(key)))
        elif _has_reference(inner):
            yield (*path, str(key)), inner


def _has_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


# --- validation errors ---


def _explain(errors: list[ErrorDetails], origins: dict[str, str], shown: str) -> UserError:
    """The first validation error, with the recipe's key names."""
    dotted = _setting(errors[0]["loc"])
    origin = where_set(tuple(dotted.split(".")), origins, shown)
    if errors[0]["type"] == "extra_forbidden" and dotted in _known_keys(Recipe):
        # Inside a list or a mapping, of which `dotted` is the setting.
        inner = ".".join(str(part) for part in errors[0]["loc"])
        hint = f"`lathe recipe --explain {dotted}` lists the known keys"
        return UserError(f"{origin}: unknown key {printable(inner)}", hint, Code.UNKNOWN_KEY)
    if errors[0]["type"] == "extra_forbidden":
        near = difflib.get_close_matches(dotted[:80], _known_keys(Recipe), 1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "`lathe recipe` prints every known key"
        return UserError(f"{origin}: unknown key {printable(dotted)}", hint, Code.UNKNOWN_KEY)
    # A union gives an error for each of its members.
    same = [e for e in errors if _setting(e["loc"]) == dotted]
    reasons = " or ".join(dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in same))
    is_group = errors[0]["type"] == "model_type" or isinstance(errors[0]["input"], dict)
    try:
        seen = "" if is_group else f" (found {printable(repr(errors[0]['input']), 60)})"
    except ValueError:  # a number of thousands of digits has no repr
        seen = " (found a number that is too large)"
    return UserError(
        f"{origin}: {printable(dotted)}: {reasons}{seen}",
        "give a value that fits",
        Code.INVALID_VALUE,
    )


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
    """Relative to the working directory if that is shorter."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory is gone
        return str(path)
    return str(path) if relative.startswith("..") else relative


# --- excerpts ---


def excerpt(recipe: Recipe, keys: Iterable[str]) -> Recipe:
    """A copy of a recipe with the settings that one step reads, and no others.

    Reading any other setting raises `UndeclaredSetting`, in this process and in all that get the
    excerpt as a text. So a result cannot depend on a setting that its cache key does not have.

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
    keys: list[str] = []  # groups, and the single keys of groups that the recipe has in part
    for name in recipe.__dict__:
        group = getattr(recipe, name)
        is_whole = group.__dict__.keys() == type(group).model_fields.keys()
        keys += [name] if is_whole else [f"{name}.{key}" for key in group.__dict__]
    keys.sort()
    is_whole = set(keys) == Recipe.model_fields.keys()
    return str(write(values if is_whole else {EXCERPT: keys} | values))


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
