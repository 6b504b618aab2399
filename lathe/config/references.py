"""`${Group.key}` in a recipe: the value of another key, and nothing else.

OmegaConf's grammar reads it. OmegaConf's resolvers are refused: what `${oc.env:NAME}` finds may be
a secret, and a recipe is printed and written into artifacts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
from omegaconf.grammar_parser import parse
from omegaconf.grammar_visitor import GrammarVisitor

from lathe.config.text import MOST_VALUES
from lathe.errors import UserError, printable

MOST_CHARACTERS = 4096  # of a text with a reference, and of what it becomes
MOST_REFERENCES = 64  # in a text; the grammar takes seconds for hundreds
MOST_STEPS = 16  # from a reference to a value

Path = tuple[str, ...]


def check_references(values: Mapping[str, Any], origins: Mapping[str, str], source: str) -> None:
    """Refuse whatever is no plain reference, without looking anything up.

    Args:
        origins: dotted key -> where it was set; `source` for a key that is not there.

    Raises:
        UserError: a resolver, at any depth, or a reference that cannot be read.
    """
    for path, text in _texts(values):
        where = f"{place(path, origins, source)}: {_dotted(path)}"
        _parsed(text, where)


def resolve_references(
    values: dict[str, Any], origins: Mapping[str, str], source: str
) -> dict[str, Any]:
    """The same values with every reference replaced by what it names; see `check_references`.

    Raises:
        UserError: a reference to no key, to itself, or to more than a recipe can hold.
    """
    out: dict[str, Any] = _References(values, origins, source).resolved(values, (), ())
    return out


class _References:
    """Looks up the references of one recipe, within limits on how much they become.

    In its methods `path` is where a value stands, and `chain` are the places of the references
    that led to it.
    """

    def __init__(self, values: dict[str, Any], origins: Mapping[str, str], source: str) -> None:
        self.values, self.origins, self.source = values, origins, source
        self.spent = 0  # values made

    def resolved(self, value: Any, path: Path, chain: tuple[Path, ...]) -> Any:
        self.spent += 1
        if self.spent > MOST_VALUES:
            raise self._mistake(chain, f"become more than {MOST_VALUES} values")
        if isinstance(value, dict):
            return {key: self.resolved(inner, (*path, key), chain) for key, inner in value.items()}
        if isinstance(value, list):
            items = enumerate(value)
            return [self.resolved(inner, (*path, str(index)), chain) for index, inner in items]
        return self._text(value, path, chain) if _has_reference(value) else value

    def _text(self, value: str, path: Path, chain: tuple[Path, ...]) -> Any:
        """What a text with references becomes; the value itself where it is nothing else."""
        chain = (*chain, path)
        if path in chain[:-1]:
            raise self._mistake(chain, "go in a circle")
        if len(chain) > MOST_STEPS:
            raise self._mistake(chain, f"lead to others over more than {MOST_STEPS} steps")

        def look_up(key: Any, _: object) -> Any:
            outer = path[: max(0, len(path) - key.relative_dots)] if key.relative_dots else ()
            return self._value_at((*outer, *key.parts), chain)

        where = f"{place(chain[0], self.origins, self.source)}: {_dotted(chain[0])}"
        try:
            text = GrammarVisitor(look_up, None, None).visit(_parsed(value, where))
        except OmegaConfBaseException:
            raise self._mistake(chain, "name a key by something that is no name") from None
        if isinstance(text, str) and len(text) > MOST_CHARACTERS:
            raise self._mistake(chain, f"become more than {MOST_CHARACTERS} characters")
        return text

    def _value_at(self, path: Path, chain: tuple[Path, ...]) -> Any:
        found: Any = self.values
        for step, part in enumerate(path):
            if _has_reference(found):
                found = self.resolved(found, path[:step], chain)
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise self._mistake(
                    chain, f"name {printable(_dotted(path))}, which is not there"
                ) from None
        return self.resolved(found, path, chain)

    def _mistake(self, chain: tuple[Path, ...], what: str) -> UserError:
        first = chain[0] if chain else ()
        return UserError(
            f"{place(first, self.origins, self.source)}: {_dotted(first)}: its references ${{...}} "
            f"{what}",
            "mend the ${...}: it names another key of the recipe",
        )


def place(path: Path, origins: Mapping[str, str], source: str) -> str:
    """Where a key, or else the nearest group that it is in, was set."""
    prefixes = (_dotted(path[:n]) for n in range(len(path), 0, -1))
    return next((origins[prefix] for prefix in prefixes if prefix in origins), source)


def _texts(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*path, str(index)))
    elif _has_reference(value):
        yield path, value


def _has_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _parsed(text: str, where: str) -> Any:
    if len(text) > MOST_CHARACTERS or text.count("${") > MOST_REFERENCES:
        raise UserError(
            f"{where}: a text of more than {MOST_CHARACTERS} characters with ${{...}}, or of more "
            f"than {MOST_REFERENCES} of them",
            "write the value itself",
        )
    try:
        tree = parse(text)
        resolver = _resolver(tree)
    except (OmegaConfBaseException, RecursionError):
        raise UserError(
            f"{where}: a ${{...}} that cannot be read",
            r"write ${Group.key} for the value of another key, or \${ for these characters",
        ) from None
    if resolver is not None:
        raise UserError(
            f"{where}: ${{{printable(resolver)}:...}} is not looked up in a recipe",
            "write the value itself; ${Group.key} takes it from another key of the recipe",
        )
    return tree


def _resolver(tree: Any) -> str | None:
    """Name of the first resolver in a parsed text, at any depth."""
    if isinstance(tree, OmegaConfGrammarParser.InterpolationResolverContext):
        return str(tree.getChild(1).getText())
    children = (tree.getChild(n) for n in range(tree.getChildCount()))
    return next((name for name in map(_resolver, children) if name is not None), None)


def _dotted(path: Path) -> str:
    return ".".join(path)
