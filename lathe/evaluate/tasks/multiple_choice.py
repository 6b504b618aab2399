"""Multiple choice: whether the right answer is the most likely one.

The files are JSONL in HellaSwag's form (Zellers et al. 2019) or ARC's (Clark et al. 2018), with the
prompts of lm-evaluation-harness's tasks `hellaswag`, `arc_easy` and `arc_challenge`, zero-shot.
Both accuracies are its own: `acc` takes the choice with the largest log-likelihood, `acc_norm` the
one with the largest log-likelihood per character.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe.evaluate.comparison import Accuracy, Units
from lathe.evaluate.intervals import mean_stderr
from lathe.evaluate.scoring import ScoreLimits, Scorer, ScoreRequest, answer
from lathe.evaluate.tasks.task import Reader, Task
from lathe_base.artifacts.kinds import checked
from lathe_base.errors import Code, UserError
from lathe_base.inputs import lines, open_file, parse_json, require_text
from lathe_serving.runtime.text import encode_prompts

HINT = (
    'a line is HellaSwag\'s {"ctx": "...", "endings": ["...", "..."], "label": 0} or ARC\'s '
    '{"question": "...", "choices": {"text": ["...", "..."], "label": ["A", "B"]}, '
    '"answerKey": "A"}'
)


@dataclass(frozen=True)
class Question:
    """An encoded question.

    Attributes:
        where: file and line.
        requests: one per choice: the prompt and the choice, of which the choice is scored.
        characters: length of every choice.
        right: index of the right choice.
        document: the subject of the question, if its line has a `document`.
    """

    where: str
    requests: list[ScoreRequest]
    characters: list[int]
    right: int
    document: int | str | None = None


def read_questions(path: Path, tokenizer: Tokenizer) -> list[Question]:
    """Read and encode a file.

    Raises:
        UserError: no such file, no questions in it, or a broken line (with its number, from 1).
    """
    questions = []
    with open_file(path, "give a multiple-choice JSONL file") as file:
        for number, line in enumerate(lines(file, path), start=1):
            if line.strip():
                where = f"{path}:{number}"
                values = parse_json(line, f"{where}: malformed line", HINT)
                prompt, choices, right = _parse(values, where)
                # White space at the end of the prompt belongs to the choice, as in lm-eval.
                texts = [prompt.rstrip(), *(f"{prompt} {choice}" for choice in choices)]
                known, *whole = encode_prompts(tokenizer, texts)
                requests = [ScoreRequest(tokens, len(tokens) - len(known)) for tokens in whole]
                if not known or min(request.scored for request in requests) < 1:
                    raise UserError(
                        f"{where}: a prompt or choice without tokens of its own",
                        HINT,
                        Code.INVALID_VALUE,
                    )
                document = values.get("document")
                questions.append(
                    Question(
                        where,
                        requests,
                        characters=[len(choice) for choice in choices],
                        right=right,
                        document=document if isinstance(document, int | str) else None,
                    )
                )
    if not questions:
        raise UserError(f"{path}: no questions", HINT, Code.TOO_LITTLE_DATA)
    return questions


@dataclass(frozen=True)
class HellaSwagLine:
    """A line as published; files with only the first three keys are read too."""

    ctx: str
    endings: list[str]
    label: int
    ctx_a: str | None = None
    ctx_b: str | None = None
    activity_label: str | None = None

    def prompt(self) -> str:
        """The text before the endings."""
        prompt = self.ctx
        if self.ctx_a is not None and self.ctx_b is not None:
            prompt = f"{self.ctx_a} {self.ctx_b.capitalize()}"
        return f"{self.activity_label}: {prompt}" if self.activity_label is not None else prompt


@dataclass(frozen=True)
class ArcChoices:
    """The choices of an ARC question."""

    text: list[str]
    label: list[str]


@dataclass(frozen=True)
class ArcLine:
    """A line of the data set `allenai/ai2_arc`."""

    question: str
    choices: ArcChoices
    answerKey: str


def _parse(values: Any, where: str) -> tuple[str, list[str], int]:
    """Prompt, choices, and the index of the right one."""
    # The form is recognized by its keys, so a file may mix both.
    keys = values.keys() if isinstance(values, dict) else set()
    if "endings" in keys:
        swag = checked(values, HellaSwagLine, where, HINT)
        # The columns of HellaSwag as published are joined as lm-eval does.
        prompt, right = _without_markup(swag.prompt()), swag.label
        choices = [_without_markup(ending) for ending in swag.endings]
        if not 0 <= right < len(choices):
            raise UserError(
                f"{where}: label {right} of {len(choices)} endings", HINT, Code.INVALID_VALUE
            )
    elif "choices" in keys:
        arc = checked(values, ArcLine, where, HINT)
        prompt, choices = f"Question: {arc.question}\nAnswer:", arc.choices.text
        if len(arc.choices.label) != len(choices) or arc.answerKey not in arc.choices.label:
            raise UserError(
                f"{where}: answerKey {arc.answerKey!r} with {len(choices)} choices labeled "
                f"{arc.choices.label}",
                HINT,
                Code.INVALID_VALUE,
            )
        right = arc.choices.label.index(arc.answerKey)
    else:
        raise UserError(
            f"{where}: neither endings nor choices in {str(values)[:60]!r}", HINT, Code.MALFORMED
        )
    for text in (prompt, *choices):
        if not require_text(text, where).strip():
            raise UserError(f"{where}: an empty prompt or choice", HINT, Code.INVALID_VALUE)
    if len(choices) < 2:
        raise UserError(f"{where}: fewer than two choices", HINT, Code.INVALID_VALUE)
    return prompt, choices, right


def _without_markup(text: str) -> str:
    """Remove WikiHow's markup in brackets, as lm-eval's `preprocess` for HellaSwag does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


@dataclass(frozen=True)
class QuestionScore:
    """The score of one question.

    Attributes:
        index: question of the file, from 0.
        correct, correct_norm: whether `acc` and `acc_norm` count it.
        log_likelihoods: of every choice, nats.
        right: index of the right choice.
        truncated: most tokens that were cut from the left of a choice's prompt.
        document: the subject of the question, if known.
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
    """Means over the questions with their standard errors; `log_likelihood` is that of the right
    choice, `truncated` the number of truncated questions."""

    examples: int
    acc: float
    acc_stderr: float
    acc_norm: float
    acc_norm_stderr: float
    log_likelihood: float
    log_likelihood_stderr: float
    truncated: int


def _chance(units: Units) -> float:
    return float(np.mean([1 / len(row["log_likelihoods"]) for row in units.rows]))


class MultipleChoice(Task[list[Question], QuestionScore]):
    """A JSONL file in HellaSwag's or ARC's form."""

    name = "multiple_choice"
    measures = (
        Accuracy(
            key="acc",
            title="acc",
            axis="% of questions right",
            column="correct",
            guesses=_chance,
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
        Accuracy(
            key="acc_norm",
            title="acc_norm",
            axis="% of questions right",
            column="correct_norm",
            guesses=_chance,
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
    )

    def read(self, path: Path, reader: Reader) -> list[Question]:
        return read_questions(path, reader.tokenizer)

    def score(
        self, scorer: Scorer, examples: list[Question], limits: ScoreLimits
    ) -> list[QuestionScore]:
        for question in examples:
            # A prompt may be cut on the left, but not the choice that is scored.
            longest = max(request.scored for request in question.requests)
            if longest > limits.max_length:
                raise UserError(
                    f"{question.where}: a choice is {longest} tokens long, but the model's limit "
                    f"is {limits.max_length}",
                    "remove the line from the file",
                    Code.TOO_LONG,
                )
        requests = [request for question in examples for request in question.requests]
        answers = iter(answer(scorer, requests, limits.max_length, limits.token_budget, self.name))
        scores = []
        for index, question in enumerate(examples):
            choices = [next(answers) for _ in question.requests]
            likelihoods = np.array([choice.log_likelihoods.sum() for choice in choices])
            # A long choice has a small likelihood, whatever it says.
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

    def tokens(
        self, units: Sequence[QuestionScore], examples: list[Question]
    ) -> Iterator[NDArray[np.int64]]:
        for question in examples:
            yield np.asarray(question.requests[question.right].tokens)

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
