r"""`${Group.key}` in a recipe: the value of another key, and nothing else.

The syntax is OmegaConf's: `${.key}` counts from the group that the text is in, `${Group[key]}` is
`${Group.key}`, and `\${` stands for the characters themselves. Its resolvers are refused: what
`${oc.env:NAME}` finds may be a secret, and a recipe is printed and written into artifacts.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lathe_base.config.text import MAX_VALUES
from lathe_base.errors import Code, UserError, printable

MAX_CHARACTERS = 4096  # of a text with a reference, and of what it becomes
MAX_STEPS = 16  # from a reference to a value

Path = tuple[str, ...]

# Backslashes, and a whole reference: dots that count groups upwards, and a key. Without the key it
# is none, unless an odd number of backslashes makes it text.
_REFERENCE = re.compile(r"(\\*)\$\{(?: *(\.*)([\w-]+(?:\.[\w-]+|\[[\w-]+\])*) *\})?")
_RESOLVER = re.compile(r"\$\{ *([\w.]*) *:")


def check_references(values: Mapping[str, Any], origins: Mapping[str, str], source: str) -> None:
    """Reject `${...}` that is not a plain reference, without looking anything up.

    Args:
        origins: dotted key -> where it was set; `source` for keys that are missing there.

    Raises:
        UserError: a resolver, at any depth, or a malformed reference.
    """
    for path, text in _texts(values):
        where = f"{place(path, origins, source)}: {'.'.join(path)}"
        if len(text) > MAX_CHARACTERS:
            raise UserError(
                f"{where}: a text of more than {MAX_CHARACTERS} characters with ${{...}}",
                "write the value itself",
                Code.TOO_LARGE,
            )
        for match in _REFERENCE.finditer(text):
            if match[3] is None and len(match[1]) % 2 == 0:
                raise _unreadable(text[match.start() :], where)


def _unreadable(text: str, where: str) -> UserError:
    if resolver := _RESOLVER.search(text):
        return UserError(
            f"{where}: resolvers such as ${{{printable(resolver[1])}:...}} are not supported",
            "write the value itself; ${Group.key} refers to another key of the recipe",
            Code.UNSUPPORTED,
        )
    return UserError(
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

    def resolved(self, value: Any, path: Path, chain: tuple[Path, ...]) -> Any:
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

    def _text(self, value: str, path: Path, chain: tuple[Path, ...]) -> Any:
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
            return self._value_at((*path[: max(0, len(path) - dots)], *key) if dots else key, chain)

        def substitute(match: re.Match[str]) -> str:
            backslashes, is_escaped = divmod(len(match[1]), 2)
            reference = match[0][len(match[1]) :]
            return "\\" * backslashes + (reference if is_escaped else str(look_up(match)))

        whole = _REFERENCE.fullmatch(value)
        if whole and not whole[1]:
            return look_up(whole)
        text = _REFERENCE.sub(substitute, value)
        if len(text) > MAX_CHARACTERS:
            raise self._mistake(
                chain,
                f"its references expand to more than {MAX_CHARACTERS} characters",
                Code.TOO_LARGE,
            )
        return text

    def _value_at(self, path: Path, chain: tuple[Path, ...]) -> Any:
        node: Any = self.values
        for step, part in enumerate(path):
            if _has_reference(node):
                node = self.resolved(node, path[:step], chain)
            try:
                node = node[int(part)] if isinstance(node, list) else node[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise self._mistake(
                    chain, f"unknown key {printable('.'.join(path))} in ${{...}}", Code.UNKNOWN_KEY
                ) from None
        return self.resolved(node, path, chain)

    def _mistake(self, chain: tuple[Path, ...], what: str, code: Code) -> UserError:
        first = chain[0] if chain else ()
        return UserError(
            f"{place(first, self.origins, self.source)}: {'.'.join(first)}: {what}",
            "fix the ${...}: it must name another key of the recipe",
            code,
        )


def place(path: Path, origins: Mapping[str, str], source: str) -> str:
    """Where a key, or the nearest enclosing group, was set."""
    prefixes = (".".join(path[:n]) for n in range(len(path), 0, -1))
    return next((origins[prefix] for prefix in prefixes if prefix in origins), source)


def _texts(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, dict | list):
            yield from _texts(inner, (*path, str(key)))
        elif _has_reference(inner):
            yield (*path, str(key)), inner


def _has_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value
