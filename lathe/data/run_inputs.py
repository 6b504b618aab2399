"""External inputs of a pipeline run, and the identity of their bytes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lathe.data.contents import Contents, content
from lathe.data.newest import resolve
from lathe.data.tokenizer import PAIRS
from lathe_base.config.settings import Recipe


@dataclass(frozen=True)
class RunInputs:
    """External inputs of a run's steps, in addition to each other's outputs.

    Attributes:
        corpus: where the text is; of `newest:PLACE`, what is the newest one now.
        text: contents of the corpus and of the tokenizer, which a model may bring.
        weights: contents of the model that the run starts from, and of a teacher.
        scored: contents of that model, a teacher, and what models are measured on.
    """

    corpus: str
    text: Contents = field(default_factory=dict)
    weights: Contents = field(default_factory=dict)
    scored: Contents = field(default_factory=dict)


def look_up(
    recipes: Sequence[Recipe],
    corpus: str = "",
    tokenizer: str = "",
    model: str = "",
    init: str = "",
    cloze: str = "",
) -> RunInputs:
    """Find a run's inputs and identify what is there.

    Args:
        recipes: of the run; the first one's text and tokenizer are taken where none are given.
        model: whose tokenizer is taken where none is given.
        init: weights that training starts from; only its weights are taken.

    Raises:
        UserError: something is missing, or a store does not answer.
    """
    prepare = recipes[0].Prepare
    corpus = resolve(corpus or prepare.source)
    tokenizer_source = "" if model or prepare.tokenizer == "train" else prepare.tokenizer
    teachers = [recipe.Compress.Distill.teacher for recipe in recipes]
    weights = _contents([model, init, *(t for t in teachers if t and t != "parent")])
    measured = [cloze, *(recipe.Offline_Eval.eval_path or "" for recipe in recipes)]
    measured += [task.partition("=")[2] for recipe in recipes for task in recipe.Offline_Eval.tasks]
    return RunInputs(
        corpus,
        text=_contents([corpus, *_tokenizer(tokenizer or tokenizer_source), model]),
        weights=weights,
        scored=weights | _contents(measured),
    )


def _tokenizer(location: str) -> Iterator[str]:
    """Files that a tokenizer is read from."""
    path = Path(location)
    for pair in PAIRS:
        if path.name in pair and path.is_file():
            yield from (str(p) for name in pair if (p := path.with_name(name)).is_file())
            return
    yield location


def _contents(places: Iterable[str]) -> Contents:
    return {location: content(location) for location in dict.fromkeys(places) if location}
