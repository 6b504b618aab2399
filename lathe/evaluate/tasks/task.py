"""The interface of an evaluation task, used by evaluation, the gate and the report."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe.data.chat_template import model_template
from lathe.evaluate.comparison import Measure
from lathe.evaluate.scoring import ScoreLimits, Scorer
from lathe_base.config.settings.quality import AnswerSettings
from lathe_base.errors import Code, UserError
from lathe_base.inputs import require_file

if TYPE_CHECKING:
    from lathe_serving.gateway.template import ChatTokenizer

Examples = TypeVar("Examples")
Unit = TypeVar("Unit")


@dataclass(frozen=True)
class Reader:
    """What a task needs of a model to encode a file for it.

    Attributes:
        folder: the model's, with its chat template.
        n_positions: length of its context.
        answers: settings of a generative task.
    """

    tokenizer: Tokenizer
    folder: Path = Path()
    n_positions: int = 1024
    answers: AnswerSettings = field(default_factory=AnswerSettings)

    @cached_property
    def chat(self) -> "ChatTokenizer":
        """The model's chat template.

        Raises:
            UserError: it has none, or an invalid one.
        """
        from lathe_serving.gateway.template import ChatTemplate, ChatTokenizer, PromptError

        source = model_template(self.folder)
        if source is None:
            raise UserError(
                f"{self.folder}: no chat template, which messages need",
                "put the model's chat_template.jinja there, or evaluate on rows with a prompt",
                Code.NOT_FOUND,
            )
        try:
            return ChatTokenizer(ChatTemplate(source), self.tokenizer, self.n_positions)
        except PromptError as error:
            raise UserError(
                f"{self.folder}: {error}", "correct the template", Code.MALFORMED
            ) from None


class Task(ABC, Generic[Examples, Unit]):
    """A measurement of a language model on the examples of one file.

    To add one, subclass this in a file of this package and list it in `TASKS`.

    Attributes:
        name: of the task, in `--task NAME=FILE` and in `metrics.json`.
        unit: what figures are averaged over; also the key of the number of units among the figures.
        loss: key of the figure that is non-finite if training diverged; None: there is none.
        generates: whether it needs a model that generates answers.
        measures: the figures by which models are compared.
        is_stream: whether the units are consecutive parts of one text, and so not independent.
        extra: keys of other figures that belong to a run's metrics.
    """

    name: ClassVar[str]
    unit: ClassVar[str] = "examples"
    loss: ClassVar[str | None] = "log_likelihood"
    generates: ClassVar[bool] = False
    measures: ClassVar[tuple[Measure, ...]]
    is_stream: ClassVar[bool] = False
    extra: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def read(self, path: Path, reader: Reader) -> Examples:
        """The examples of a file, encoded for a model.

        Raises:
            UserError: no such file, or a broken one; the message names the line.
        """

    def check(self, path: Path) -> None:
        """Check a file before a run, as far as that is possible without a model; raises as `read`
        does."""
        require_file(path)

    @abstractmethod
    def score(self, scorer: Scorer, examples: Examples, limits: ScoreLimits) -> Sequence[Unit]:
        """The score of every unit, a dataclass or a dictionary: a line of the evaluation's JSONL
        file.

        Raises:
            UserError: an example that is too long for the model.
        """

    @abstractmethod
    def tokens(self, units: Sequence[Unit], examples: Examples) -> Iterable[NDArray[np.int64]]:
        """The text of every unit, (tokens,) ids, to look up in the training text."""

    @abstractmethod
    def summarize(self, units: Sequence[Unit], examples: Examples) -> Any:
        """The figures with their standard errors, a dataclass or a dictionary: the task's part of
        `metrics.json`."""
