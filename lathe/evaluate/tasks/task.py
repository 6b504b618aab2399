"""What an evaluation task is: all that measuring, the gate and the report need to know of one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from tokenizers import Tokenizer

from lathe.evaluate.measures import Measure
from lathe.evaluate.score import Limits, Scorer

Examples = TypeVar("Examples")
Unit = TypeVar("Unit")


class Task(ABC, Generic[Examples, Unit]):
    """A measurement of a language model on the examples of one file.

    To add one, subclass this in a file of this package and list it in `TASKS`.

    Attributes:
        name: of the task, in `--task NAME=FILE` and in `metrics.json`.
        unit: what the figures are means of, and the name of their number among the figures.
        loss: the figure that is not finite where training diverged.
        measures: the figures that models are compared by.
    """

    name: ClassVar[str]
    unit: ClassVar[str] = "examples"
    loss: ClassVar[str] = "log_likelihood"
    measures: ClassVar[tuple[Measure, ...]]

    @abstractmethod
    def read(self, path: Path, tokenizer: Tokenizer) -> Examples:
        """The encoded examples of a file.

        Raises:
            UserError: no such file, or a broken one; names the line.
        """

    @abstractmethod
    def score(self, scorer: Scorer, examples: Examples, limits: Limits) -> Sequence[Unit]:
        """The score of every unit, a dataclass: a line of the evaluation's JSONL file.

        Raises:
            UserError: an example that the model is too short for.
        """

    @abstractmethod
    def summarize(self, units: Sequence[Unit], examples: Examples) -> Any:
        """The figures with their standard errors, a dataclass: the task's part of
        `metrics.json`."""
