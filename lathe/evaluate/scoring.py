"""What tasks ask of a model, tokens to score and prompts to answer, and the interfaces of what
computes it: torch, an ONNX file, a server.

A model has two answerers. The second one generates in another order and batch size and, where there
is one, with another runtime: the answers that differ are the noise floor, on which two runs of the
same model disagree, because sums in another order are rounded differently.

Shapes: B rows of T tokens, n targets.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lathe_base.artifacts.journal import Journal
from lathe_base.errors import Code, UserError
from lathe_base.progress import bar
from lathe_serving.runtime.exported_model import pad

log = logging.getLogger("lathe")

GENERATE_HINT = "generate answers with a checkpoint that torch runs, an export or a server"

TESTED_PROMPTS = 8
"""Prompts on which the precision is decided, where only answers are generated."""

Scores = tuple[NDArray[np.float64], NDArray[np.bool_]]


@dataclass(frozen=True)
class Targets:
    """Tokens to score in a batch of rows.

    Attributes:
        tokens: (B, T) input ids, short rows padded on the right (the model is causal, so padding
            changes nothing before it).
        rows, columns: (n,) positions in `tokens` whose next token is the target, `rows` ascending.
        ids: (n,) the targets.
    """

    tokens: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    ids: NDArray[np.int64]


class Scorer(Protocol):
    """Anything that scores tokens: torch, an ONNX file, a server."""

    def score(self, targets: Targets) -> Scores:
        """Score n target tokens; logits are computed only at their positions.

        Returns:
            (n,) natural log-likelihoods, and (n,) whether the target is the argmax.
        """


@runtime_checkable
class PreciseScorer(Protocol):
    """A scorer that may compute in less than float32."""

    def settle_precision(
        self, targets: Targets, recall: Callable[[Callable[[], int]], int]
    ) -> None:
        """Decide, once, whether what it computes is close enough to float32.

        Args:
            targets: the first batch.
            recall: returns the result of a test, or that of an evaluation that was killed.
        """


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt to answer greedily.

    Attributes:
        prompt: token ids.
        max_tokens: maximum length of the answer; both fit the model's context.
        stop: texts after which the answer may end, as nothing behind them is read.
    """

    prompt: list[int]
    max_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answerer:
    """One way in which a model generates answers.

    Attributes:
        how: the runtime and the batch, in words.
        generate: yields the index and the new token ids of every request, without the token that
            ended it, in the order in which they are finished.
    """

    how: str
    generate: Callable[[Sequence[AnswerRequest]], Iterator[tuple[int, list[int]]]]


Answerers = Callable[[], tuple[Answerer, Answerer]]
"""Opens both answerers of a model; called at most once."""


@dataclass(frozen=True)
class ResumableScorer:
    """A scorer, and answerers, that reuse the journal of an earlier, killed evaluation.

    Attributes:
        what: name of the scores, so that two scorers can share a journal.
        answerers: returns both answerers; None if the model cannot generate.
    """

    scorer: Scorer
    journal: Journal
    what: str = "scores"
    answerers: Answerers | None = None

    def score(self, targets: Targets) -> Scores:
        """See `Scorer.score`."""
        self._settle_precision(targets)
        # The key is the content of the batch, not its number: a resumed evaluation with another
        # batch size scores everything again instead of mixing up rows.
        batch = hashlib.sha256(repr(targets.tokens.shape).encode())
        for array in (targets.tokens, targets.rows, targets.columns, targets.ids):
            batch.update(array.tobytes())
        name = f"{self.what} {batch.hexdigest()}"
        try:
            likelihoods, greedy = np.array(self.journal.found.get(name), np.float64)
            if np.shape(greedy) == (len(targets.ids),):
                return likelihoods, greedy.astype(np.bool_)
        except (TypeError, ValueError):
            pass  # not in the journal, or an invalid entry
        scores = self.scorer.score(targets)
        # JSON has no NaN, and the evaluation is about to stop: training has diverged.
        if np.isfinite(scores[0]).all():
            self.journal.recall(name, lambda: [x.tolist() for x in (scores[0], scores[1] * 1)])
        return scores

    def answers(
        self, requests: Sequence[AnswerRequest], title: str, run: int = 0
    ) -> tuple[list[list[int]], str]:
        """The token ids of every answer, in the order of the requests, and how they were generated.

        Args:
            title: that of the progress bar, which counts answers.
            run: 0, or 1 for the second answerer.

        Raises:
            UserError: the model cannot generate.
        """
        if self.answerers is None:
            raise UserError(
                f"{title}: this engine does not generate answers", GENERATE_HINT, Code.UNSUPPORTED
            )
        self._settle_precision(_prompt_targets(requests))
        answerer = self.answerers()[run]
        # The index is part of the key, since two equal prompts may be answered differently, next to
        # other rows of a batch.
        names = [
            f"answer {run} {i} {hashlib.sha256(json.dumps(asdict(one)).encode()).hexdigest()}"
            for i, one in enumerate(requests)
        ]
        missing = [i for i, name in enumerate(names) if name not in self.journal.found]
        with bar(title, total=len(requests)) as progress:
            progress.advance(len(requests) - len(missing))
            for k, ids in answerer.generate([requests[i] for i in missing]):
                self.journal.recall(names[missing[k]], lambda ids=ids: ids, list)  # type: ignore[misc]
                progress.advance()
        answers: list[list[int]] = [self.journal.recall(name, list, list) for name in names]
        n_tokens = f"{sum(map(len, answers)):,}"
        log.info("%s: %d answers, %s tokens (%s)", title, len(answers), n_tokens, answerer.how)
        return answers, answerer.how

    def _settle_precision(self, targets: Targets) -> None:
        if isinstance(self.scorer, PreciseScorer):
            name = f"precision of {self.what}"
            self.scorer.settle_precision(targets, lambda test: self.journal.recall(name, test, int))


def _prompt_targets(requests: Sequence[AnswerRequest]) -> Targets:
    """All tokens but the first of a few prompts."""
    prompts = [one.prompt for one in requests[:TESTED_PROMPTS]]
    sizes = [len(prompt) - 1 for prompt in prompts]
    tokens, _ = pad(prompts)
    rows = np.repeat(np.arange(len(prompts)), sizes)
    columns = np.concatenate([np.arange(size) for size in sizes])
    return Targets(tokens, rows, columns, tokens[rows, columns + 1])


@dataclass(frozen=True)
class ScoreLimits:
    """Limits of a model's input.

    Attributes:
        max_length: longest input, tokens.
        overlap: tokens by which the window over a text advances.
        token_budget: padded tokens per batch.
        rolling: whether to use lm-evaluation-harness's windows, which advance by `max_length`.
        answers_twice: whether answers are generated a second time, to measure the noise floor.
    """

    max_length: int
    overlap: int
    token_budget: int
    rolling: bool = False
    answers_twice: bool = False


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens, the last `scored` of which are to be predicted, each from all tokens before it."""

    tokens: Sequence[int] | NDArray[np.int64]
    scored: int


@dataclass(frozen=True)
class ScoreAnswer:
    """The scores of one request.

    Attributes:
        log_likelihoods: (scored,) nats.
        greedy: (scored,) whether the token is the argmax.
        truncated: tokens cut from the left to fit the model.
    """

    log_likelihoods: NDArray[np.float64]
    greedy: NDArray[np.bool_]
    truncated: int


def answer(
    scorer: Scorer, requests: Sequence[ScoreRequest], max_length: int, token_budget: int, title: str
) -> list[ScoreAnswer]:
    """The answers in the order of the requests, computed in batches of similar length.

    Args:
        max_length: longest input of the model, tokens; longer requests are truncated on the left.
            It must be at least the `scored` of every request.
        token_budget: padded tokens per batch.
        title: that of the progress bar, which counts input tokens.
    """
    # The last token is only predicted, never an input.
    inputs = [request.tokens[:-1][-max_length:] for request in requests]
    answers: dict[int, ScoreAnswer] = {}
    batches = batches_by_tokens([*map(len, inputs)], token_budget)
    done, padded, rate, started = 0, 0, "", time.perf_counter()
    with bar(title, total=sum(map(len, inputs))) as progress:
        for batch in batches:
            # The targets of all rows, one after the other: the last `scored` positions of each.
            sizes = [requests[i].scored for i in batch]
            lengths = [len(inputs[i]) for i in batch]
            rows = np.repeat(np.arange(len(batch)), sizes)
            columns = np.concatenate(
                [np.arange(n - size, n) for n, size in zip(lengths, sizes, strict=True)]
            )
            ids = np.concatenate(
                [np.asarray(requests[i].tokens[-requests[i].scored :], np.int64) for i in batch]
            )
            tokens, _ = pad([inputs[i] for i in batch])
            log_likelihoods, greedy = scorer.score(Targets(tokens, rows, columns, ids))

            # Back to a row's own arrays; `split` takes the ends of all parts but the last.
            ends = np.cumsum(sizes)[:-1]
            by_row = np.split(log_likelihoods, ends), np.split(greedy, ends)
            for i, row_likelihoods, row_greedy in zip(batch, *by_row, strict=True):
                truncated = len(requests[i].tokens) - 1 - len(inputs[i])
                answers[i] = ScoreAnswer(row_likelihoods, row_greedy, truncated)

            done += sum(lengths)
            padded += lengths[0] * len(batch)  # the first row is the longest
            rate = f"{done / (time.perf_counter() - started):,.0f} tokens/s"
            progress.advance(sum(lengths), rate)
    log.info(
        "%s: %s tokens in %d batches, %.1f %% padding, %s",
        *(title, f"{done:,}", len(batches), 100 * (1 - done / max(padded, 1)), rate),
    )
    return [answers[i] for i in range(len(requests))]


def batches_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices grouped by length, longest first, each group at most `budget` tokens when padded
    (a single row may be longer)."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    for i in order:
        # The first row of a group is its longest, to which all others are padded.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
