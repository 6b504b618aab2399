"""Perplexity of a text; see `lathe.evaluate.wikitext`."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from lathe.evaluate.comparison import Perplexity
from lathe.evaluate.score_requests import Limits, Scorer
from lathe.evaluate.tasks.task import Task
from lathe.evaluate.wikitext import (
    BlockLoss,
    PerplexityResult,
    Text,
    read_text,
    split_blocks,
    summarize_perplexity,
    token_losses,
    windows_of,
)


class TextPerplexity(Task[Text, BlockLoss]):
    """A UTF-8 file, read in overlapping windows."""

    name = "text"
    unit = "blocks"
    loss = "loss"
    measures = (
        Perplexity(
            key="perplexity",
            title="Perplexity",
            axis="perplexity",
            loss=lambda units: units.column("loss"),
            tokens=lambda units: units.column("tokens"),
            method="linearized ratio over blocks, Student's t",
            unit="blocks",
            margin=lambda gate: gate.max_perplexity_increase,
        ),
    )

    def read(self, path: Path, tokenizer: Tokenizer) -> Text:
        return read_text(path, tokenizer)

    def score(self, scorer: Scorer, examples: Text, limits: Limits) -> list[BlockLoss]:
        length, budget = limits.max_length, limits.token_budget
        losses = token_losses(scorer, windows_of(examples, limits), length, budget)
        return split_blocks(losses, length)

    def summarize(self, units: Sequence[BlockLoss], examples: Text) -> PerplexityResult:
        return summarize_perplexity(units, examples)
