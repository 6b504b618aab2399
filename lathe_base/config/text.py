"""Parse a recipe's YAML: plain values and the line of every key, without YAML 1.1's surprises.

Numbers follow YAML 1.2: `1:30` is text, not 90, and `010` is ten, not eight. Malicious input (deep
nesting, exploding aliases) raises a `Mistake`, which quotes only keys of mappings, because the
file may be something other than a recipe.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from lathe_base.errors import printable

MAX_RECIPE_BYTES = 2**16
MAX_VALUES = 10_000  # every alias counted as what it stands for
MAX_YAML_DEPTH = 32

_TAG = "tag:yaml.org,2002:"
_TEXT, _MERGE = f"{_TAG}str", f"{_TAG}merge"
_PLAIN = {
    "bool": (r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF"),
    "int": r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)",
    "float": (
        r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)"
        r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
    "null": r"~|null|Null|NULL|",
    "merge": r"<<",
}


@dataclass
class Mistake(Exception):
    """An error in the YAML, and its line, counted from 1."""

    reason: str
    line: int | None = None


class _Loader(yaml.SafeLoader):
    """In Python, because libyaml's bindings overflow the stack on a text of brackets."""

    # None of YAML 1.1's; those of `_PLAIN` are added below.
    yaml_implicit_resolvers = {}  # noqa: RUF012 (a class's own, as yaml has it)
    level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.level += 1
        if self.level > MAX_YAML_DEPTH:
            raise Mistake("nested too deeply", self.line + 1)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.level -= 1
        return node


for _name, _pattern in _PLAIN.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})\\Z"), None)


def parse(content: bytes) -> tuple[Any, dict[str, int]]:
    """The values of a YAML text in UTF-8, and the line of every dotted key.

    Raises:
        Mistake: not YAML; larger, or nested deeper, than any recipe; a key that is given twice or
            is not text; a tag.
    """
    if len(content) > MAX_RECIPE_BYTES:
        raise Mistake(f"longer than {MAX_RECIPE_BYTES} bytes")
    values, lines = _parse(content)
    return _copy(values), dict(lines)


@functools.lru_cache(64)  # the same recipes, and the bases of all, are read repeatedly
def _parse(content: bytes) -> tuple[Any, dict[str, int]]:
    try:
        loader = _Loader(content.decode("utf-8-sig"))
        node = loader.get_single_node()
        if node is None:
            return None, {}
        # An alias shares its node, so a short text may stand for billions of values. They are
        # counted in the tree of nodes, before any of them is constructed.
        lines: dict[str, int] = {}
        for count, (key, line) in enumerate(_check(loader, node)):
            if count == MAX_VALUES:
                raise Mistake(f"more than {MAX_VALUES} values")
            lines.setdefault(key, line)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = mark.line + 1 if mark else None
        raise Mistake("unexpected character or indentation", at) from None
    except yaml.YAMLError:
        raise Mistake("invalid character") from None
    except RecursionError:
        raise Mistake("nested too deeply") from None
    except UnicodeDecodeError:
        raise Mistake("not in UTF-8") from None
    except ValueError:
        raise Mistake("a number with too many digits") from None


def write(values: Any) -> str:
    """Write values as YAML that `parse` reads back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Also quotes text that this module, unlike YAML 1.1, would read as another type, and Unicode
    line breaks, which would be read as spaces."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # or a list that occurs twice would be written as an anchor and an alias


def _represent(dumper: _Dumper, text: str) -> yaml.Node:
    is_plain = not any(re.fullmatch(pattern, text) for pattern in _PLAIN.values())
    is_plain &= not re.search("[\x85\u2028\u2029]", text)
    return dumper.represent_scalar(_TEXT, text, style=None if is_plain else '"')


_Dumper.add_representer(str, _represent)


def _check(
    loader: _Loader, node: yaml.Node, path: str = "", level: int = 0
) -> Iterator[tuple[str, int]]:
    """Yield the dotted key and line of everything below a node."""
    line = node.start_mark.line + 1
    if level > MAX_YAML_DEPTH:
        raise Mistake("nested too deeply", line)
    implicit = loader.resolve(type(node), node.value, (True, False))  # type: ignore[no-untyped-call]
    # The tag that the plain text has by itself, or text; any other was written, such as `!!python`.
    if node.tag not in (implicit, _TEXT):
        raise Mistake(f"a tag{_of_path(path)}", line)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield path, item.start_mark.line + 1
            yield from _check(loader, item, path, level + 1)
    elif isinstance(node, yaml.MappingNode):
        known: dict[str, yaml.Node] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag not in (_TEXT, _MERGE):
                raise Mistake(f"a key{_of_path(path)}: not text", line)
            if "." in key.value and "/" not in key.value:  # a label of Kubernetes has both
                raise Mistake(f"a dot in the key {printable(key.value)}: write nested groups", line)
            before = known.get(key.value)
            if before is not None and not (
                # The same plain value twice is harmless.
                isinstance(before, yaml.ScalarNode)
                and isinstance(value, yaml.ScalarNode)
                and (before.tag, before.value) == (value.tag, value.value)
            ):
                what = f"key {printable(key.value)}{_of_path(path)} with another value"
                there = before.start_mark.line + 1
                raise Mistake(f"duplicate {what} than in line {there}", line)
            known[key.value] = value
            # What `<<` merges has the keys of the group itself.
            inner = path if key.tag == _MERGE else f"{path}.{key.value}".lstrip(".")
            yield inner, line
            yield from _check(loader, value, inner, level + 1)


def _of_path(path: str) -> str:
    return f" of {printable(path)}" if path else ""


def _copy(value: Any) -> Any:
    """Copy values, so that nothing is shared by aliases: a recipe's values are changed in place."""
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value
