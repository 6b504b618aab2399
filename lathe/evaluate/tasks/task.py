"""The interface of an evaluation task, used by evaluation, the gate and the report."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe.evaluate.comparison import Measure
from lathe.evaluate.score_requests import ScoreLimits, Scorer

Examples = TypeVar("Examples")
Unit = TypeVar("Unit")


class Task(ABC, Generic[Examples, Unit]):
    """A measurement of a language model on the examples of one file.

    To add one, subclass this in a file of this package and list it in `TASKS`.

    Attributes:
        name: of the task, in `--task NAME=FILE` and in `metrics.json`.
        unit: what figures are averaged over; also the key of the number of units among the figures.
        loss: key of the figure that is non-finite if training diverged.
        measures: the figures by which models are compared.
        is_stream: whether the units are consecutive parts of one text, and so not independent.
        extra: keys of other figures that belong to a run's metrics.
    """

    name: ClassVar[str]
    unit: ClassVar[str] = "examples"
    loss: ClassVar[str] = "log_likelihood"
    measures: ClassVar[tuple[Measure, ...]]
    is_stream: ClassVar[bool] = False
    extra: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def read(self, path: Path, tokenizer: Tokenizer) -> Examples:
        """The encoded examples of a file.

        Raises:
            UserError: no such file, or a broken one; the message names the line.
        """

    @abstractmethod
    def score(self, scorer: Scorer, examples: Examples, limits: ScoreLimits) -> Sequence[Unit]:
        """The score of every unit, a dataclass: a line of the evaluation's JSONL file.

        Raises:
            UserError: an example that is too long for the model.
        """

    @abstractmethod
    def tokens(self, units: Sequence[Unit], examples: Examples) -> Iterable[NDArray[np.int64]]:
        """The text of every unit, (tokens,) ids, to look up in the training text."""

    @abstractmethod
    def summarize(self, units: Sequence[Unit], examples: Examples) -> Any:
        """The figures with their standard errors, a dataclass: the task's part of
        `metrics.json`."""
