"""Cloze accuracy: whether a model predicts the last word of a passage; see
`lathe.evaluate.lambada`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lathe.evaluate.comparison import Accuracy, Perplexity
from lathe.evaluate.lambada import (
    ClozeExample,
    ClozeResult,
    ExampleScore,
    read_cloze,
    score_cloze,
    summarize_cloze,
)
from lathe.evaluate.score_requests import Limits, Scorer
from lathe.evaluate.tasks.task import Task


class Cloze(Task[list[ClozeExample], ExampleScore]):
    """A LAMBADA-format JSONL file, by the strict protocol."""

    name = "cloze"
    measures = (
        Accuracy(
            key="accuracy",
            title="Cloze accuracy",
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
            loss=lambda units: -units.column("log_likelihood"),
            tokens=lambda units: np.ones(len(units.rows)),
            method="paired Student's t",
            unit="words",
            whole_above=100.0,
            margin=lambda gate: (
                gate.max_perplexity_increase if gate.cloze_measure == "word_perplexity" else None
            ),
        ),
    )

    def read(self, path: Path, tokenizer: Tokenizer) -> list[ClozeExample]:
        return read_cloze(path, tokenizer)

    def score(
        self, scorer: Scorer, examples: list[ClozeExample], limits: Limits
    ) -> list[ExampleScore]:
        return score_cloze(scorer, examples, limits.max_length, limits.token_budget)

    def summarize(self, units: Sequence[ExampleScore], examples: list[ClozeExample]) -> ClozeResult:
        return summarize_cloze(units)
