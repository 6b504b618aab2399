"""Multiple choice: whether the right answer is the most likely one; `lathe.evaluate.questions`
reads the files.

Both accuracies are lm-evaluation-harness's: `acc` takes the choice with the largest log-likelihood,
`acc_norm` the one with the largest log-likelihood per character.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lathe.errors import UserError
from lathe.evaluate.comparison import Accuracy
from lathe.evaluate.intervals import mean_stderr
from lathe.evaluate.questions import Question, read_questions
from lathe.evaluate.score_requests import Limits, Scorer, answer
from lathe.evaluate.tasks.task import Task


@dataclass(frozen=True)
class QuestionScore:
    """The score of one question.

    Attributes:
        index: question of the file, from 0.
        correct, correct_norm: whether `acc` and `acc_norm` count it.
        log_likelihoods: of every choice, nats.
        right: index of the right choice.
        truncated: most tokens that were cut from the left of a choice's prompt.
        document: what the question is about, if that is known.
    """

    index: int
    correct: bool
    correct_norm: bool
    log_likelihoods: list[float]
    right: int
    truncated: int
    document: int | str | None = None


@dataclass(frozen=True)
class ChoiceResult:
    """Means over the questions with their standard errors; `log_likelihood` is of the right choice,
    `truncated` counts the questions that were cut."""

    examples: int
    acc: float
    acc_stderr: float
    acc_norm: float
    acc_norm_stderr: float
    log_likelihood: float
    log_likelihood_stderr: float
    truncated: int


class MultipleChoice(Task[list[Question], QuestionScore]):
    """A JSONL file in HellaSwag's or ARC's form."""

    name = "multiple_choice"
    measures = (
        Accuracy(
            key="acc",
            title="acc",
            axis="% of questions right",
            column="correct",
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
        Accuracy(
            key="acc_norm",
            title="acc_norm",
            axis="% of questions right",
            column="correct_norm",
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
    )

    def read(self, path: Path, tokenizer: Tokenizer) -> list[Question]:
        return read_questions(path, tokenizer)

    def score(
        self, scorer: Scorer, examples: list[Question], limits: Limits
    ) -> list[QuestionScore]:
        for question in examples:
            longest = max(request.scored for request in question.requests)
            if longest > limits.max_length:
                raise UserError(
                    f"{question.where}: a choice is {longest} tokens long, the model reads "
                    f"{limits.max_length} at most",
                    "remove the line from the file",
                )
        requests = [request for question in examples for request in question.requests]
        answers = iter(answer(scorer, requests, limits.max_length, limits.token_budget, self.name))
        scores = []
        for index, question in enumerate(examples):
            choices = [next(answers) for _ in question.requests]
            likelihoods = np.array([choice.log_likelihoods.sum() for choice in choices])
            by_character = likelihoods / question.characters
            scores.append(
                QuestionScore(
                    index=index,
                    correct=bool(likelihoods.argmax() == question.right),
                    correct_norm=bool(by_character.argmax() == question.right),
                    log_likelihoods=likelihoods.tolist(),
                    right=question.right,
                    truncated=max(choice.truncated for choice in choices),
                    document=question.document,
                )
            )
        return scores

    def summarize(self, units: Sequence[QuestionScore], examples: list[Question]) -> ChoiceResult:
        acc, acc_stderr = mean_stderr(np.array([float(u.correct) for u in units]))
        acc_norm, acc_norm_stderr = mean_stderr(np.array([float(u.correct_norm) for u in units]))
        likelihood, stderr = mean_stderr(np.array([u.log_likelihoods[u.right] for u in units]))
        return ChoiceResult(
            examples=len(units),
            acc=acc,
            acc_stderr=acc_stderr,
            acc_norm=acc_norm,
            acc_norm_stderr=acc_norm_stderr,
            log_likelihood=likelihood,
            log_likelihood_stderr=stderr,
            truncated=sum(u.truncated > 0 for u in units),
        )
