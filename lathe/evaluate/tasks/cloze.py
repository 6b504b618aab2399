"""Cloze accuracy: whether a model predicts the last word of a passage (Paperno et al. 2016).

The strict protocol of Megatron-LM's `--strict-lambada` and PaddleFleetX's `cloze_eval`: every BPE
token of the last word must be the teacher-forced argmax. Nothing is detokenized, no stop words
are filtered. The last word is what follows the last space, as in lm-eval's `lambada_openai`; a line
break before it (7 of LAMBADA's 5,153 passages) is part of it; Megatron replaces it with a space.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from lathe.evaluate.comparison import MAX_EXPONENT, Accuracy, Perplexity
from lathe.evaluate.intervals import mean_stderr
from lathe.evaluate.scoring import ScoreLimits, Scorer, ScoreRequest, answer
from lathe.evaluate.tasks.task import Reader, Task
from lathe_base.errors import Code, UserError
from lathe_base.inputs import lines, open_file, parse_json, require_text
from lathe_serving.runtime.text import encode_pairs


@dataclass(frozen=True)
class ClozeExample:
    """Token ids of a passage without its last word, and of that word; and the passage's document,
    if the file names it."""

    context: list[int]
    label: list[int]
    document: int | str | None = None


@dataclass(frozen=True)
class ExampleScore:
    """The score of one example.

    Attributes:
        index: line of the file, from 0.
        correct: every label token is the argmax.
        last_token_correct: the last label token is the argmax (the non-strict protocol).
        log_likelihood: of the whole word, nats.
        label_tokens: length of the word in tokens.
        truncated: tokens cut from the left to fit the model.
        document: the passage's document, if known.
    """

    index: int
    correct: bool
    last_token_correct: bool
    log_likelihood: float
    label_tokens: int
    truncated: int
    document: int | str | None = None


@dataclass(frozen=True)
class ClozeResult:
    """Means over the examples with their standard errors.

    `target_perplexity` is exp(-mean log-likelihood of a word), as in lm-eval's `lambada_openai`;
    its error is the delta method's. `truncated` is the number of truncated examples.
    """

    examples: int
    accuracy: float
    accuracy_stderr: float
    last_token_accuracy: float
    last_token_accuracy_stderr: float
    log_likelihood: float
    log_likelihood_stderr: float
    target_perplexity: float
    target_perplexity_stderr: float
    truncated: int


def read_cloze(path: Path, tokenizer: Tokenizer) -> list[ClozeExample]:
    """Read and encode a LAMBADA-format JSONL file, one `{"text": ...}` per line, perhaps with a
    number or name as its `document`, and with the `target` that the text ends with, which is its
    last word unless given: texts of languages without spaces between words need it.

    Raises:
        UserError: no such file, no examples in it, or a broken line (with its number, from 1).
    """
    pairs, documents = [], []
    with open_file(path, "give a LAMBADA-format JSONL file") as file:
        for number, line in enumerate(lines(file, path), start=1):
            if line.strip():
                context, label, document = _split(line, f"{path}:{number}")
                pairs.append((context, label))
                documents.append(document)
    if not pairs:
        raise UserError(
            f"{path}: no examples", 'give lines of {"text": "..."}', Code.TOO_LITTLE_DATA
        )
    encoded = encode_pairs(tokenizer, pairs)
    return [ClozeExample(*ids, name) for ids, name in zip(encoded, documents, strict=True)]


def _split(line: str, where: str) -> tuple[str, str, int | str | None]:
    """The passage before its target, the target with the white space before it, and the
    document."""
    hint = 'a line is {"text": "at least two words"}'
    try:
        values = parse_json(line, f"{where}: malformed line", hint)
        text, document = values["text"].strip(), values.get("document")
        target = values.get("target", "").strip()
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(
            f"{where}: malformed line ({type(error).__name__}: {error})", hint, Code.MALFORMED
        ) from None
    # JSON may escape half of a surrogate pair, which no tokenizer takes.
    require_text(text, where)
    if not text.endswith(target) or target == text:
        raise UserError(
            f"{where}: text {text[-40:]!r} does not end with a target {target[:40]!r} after others",
            'write {"text": "all of it", "target": "it"}',
            Code.INVALID_VALUE,
        )
    if not target and " " not in text:
        raise UserError(
            f"{where}: text {text[:40]!r} has no space before its last word",
            f'{hint}; without spaces between words, give its end too, as "target"',
            Code.INVALID_VALUE,
        )
    # The white space before the target belongs to it: GPT-2's tokens begin with their space.
    context = text[: -len(target) if target else text.rindex(" ")].rstrip()
    return context, text[len(context) :], document if isinstance(document, int | str) else None


def score_cloze(
    scorer: Scorer, examples: Sequence[ClozeExample], max_length: int, token_budget: int
) -> list[ExampleScore]:
    """Score every example, in order.

    Args:
        max_length: longest input of the model, tokens; a longer example is truncated on the left.
        token_budget: padded tokens per batch.

    Raises:
        UserError: a label alone does not fit `max_length`.
    """
    # A context may be cut on the left, but not the word that is scored.
    for index, example in enumerate(examples):
        if len(example.label) > max_length:
            raise UserError(
                f"example {index}: its last word is {len(example.label)} tokens long, but the "
                f"model's limit is {max_length}",
                "remove it from the file",
                Code.TOO_LONG,
            )
    requests = [
        ScoreRequest(example.context + example.label, len(example.label)) for example in examples
    ]
    answers = answer(scorer, requests, max_length, token_budget, "cloze")
    return [
        ExampleScore(
            index=i,
            correct=bool(scored.greedy.all()),
            last_token_correct=bool(scored.greedy[-1]),
            log_likelihood=float(scored.log_likelihoods.sum()),
            label_tokens=len(scored.greedy),
            truncated=scored.truncated,
            document=example.document,
        )
        for i, (example, scored) in enumerate(zip(examples, answers, strict=True))
    ]


class Cloze(Task[list[ClozeExample], ExampleScore]):
    """A LAMBADA-format JSONL file, by the strict protocol."""

    name = "cloze"
    measures = (
        Accuracy(
            key="accuracy",
            title="Cloze accuracy",
            metric="cloze_accuracy",
            axis="% of last words right",
            column="correct",
            margin=lambda gate: (
                gate.max_accuracy_drop if gate.cloze_measure == "accuracy" else None
            ),
        ),
        Accuracy(
            key="last_token_accuracy", title="Last-token accuracy", column="last_token_correct"
        ),
        Perplexity(
            key="target_perplexity",
            title="Cloze word perplexity",
            metric="word_perplexity",
            loss=lambda units: -units.column("log_likelihood"),
            tokens=lambda units: np.ones(len(units.rows)),
            predictions=lambda units: units.column("label_tokens"),
            method="paired Student's t",
            unit="words",
            whole_above=100.0,
            margin=lambda gate: (
                gate.max_perplexity_increase if gate.cloze_measure == "word_perplexity" else None
            ),
        ),
    )

    def read(self, path: Path, reader: Reader) -> list[ClozeExample]:
        return read_cloze(path, reader.tokenizer)

    def check(self, path: Path) -> None:
        """Check every line without the model's tokenizer; raises as `read` does."""
        read_cloze(path, Tokenizer(models.BPE()))  # which knows no word, but takes any text

    def score(
        self, scorer: Scorer, examples: list[ClozeExample], limits: ScoreLimits
    ) -> list[ExampleScore]:
        return score_cloze(scorer, examples, limits.max_length, limits.token_budget)

    def tokens(
        self, units: Sequence[ExampleScore], examples: list[ClozeExample]
    ) -> Iterator[NDArray[np.int64]]:
        for example in examples:
            yield np.array(example.context + example.label)

    def summarize(self, units: Sequence[ExampleScore], examples: list[ClozeExample]) -> ClozeResult:
        rows = [asdict(unit) for unit in units]
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        accuracy, accuracy_stderr = mean_stderr(columns["correct"].astype(float))
        last, last_stderr = mean_stderr(columns["last_token_correct"].astype(float))
        log_likelihood, log_likelihood_stderr = mean_stderr(columns["log_likelihood"])
        perplexity = math.exp(min(-log_likelihood, MAX_EXPONENT))
        return ClozeResult(
            examples=len(units),
            accuracy=accuracy,
            accuracy_stderr=accuracy_stderr,
            last_token_accuracy=last,
            last_token_accuracy_stderr=last_stderr,
            log_likelihood=log_likelihood,
            log_likelihood_stderr=log_likelihood_stderr,
            target_perplexity=perplexity,
            target_perplexity_stderr=perplexity * log_likelihood_stderr,  # the delta method
            truncated=int((columns["truncated"] > 0).sum()),
        )
