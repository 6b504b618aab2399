"""The scoring interface that all tasks share, and batched requests to it.

Shapes: B rows of T tokens, n targets.
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lathe_base.artifacts.journal import Journal
from lathe_base.progress import bar
from lathe_serving.runtime.exported_model import pad

log = logging.getLogger("lathe")

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


@dataclass(frozen=True)
class Resumable:
    """A scorer that reuses the journal of an earlier, killed evaluation.

    Attributes:
        what: name of the scores, so that two scorers can share a journal.
    """

    scorer: Scorer
    journal: Journal
    what: str = "scores"

    def score(self, targets: Targets) -> Scores:
        """See `Scorer.score`."""
        batch = hashlib.sha256(repr(targets.tokens.shape).encode())
        for array in (targets.tokens, targets.rows, targets.columns, targets.ids):
            batch.update(array.tobytes())
        name = f"{self.what} {batch.hexdigest()}"
        if (known := _scores(self.journal.found.get(name), len(targets.ids))) is not None:
            return known
        scores = self.scorer.score(targets)
        if np.isfinite(scores[0]).all():  # or the evaluation will say that they are not
            self.journal.recall(name, lambda: [x.tolist() for x in (scores[0], scores[1] * 1)])
        return scores


def _scores(finding: object, n: int) -> Scores | None:
    """The scores of `n` targets from a journal's entry; None if the entry is invalid."""
    try:
        likelihoods, greedy = np.array(finding, np.float64)
    except (TypeError, ValueError):
        return None
    return (likelihoods, greedy.astype(np.bool_)) if np.shape(greedy) == (n,) else None


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
    lengths = [min(len(request.tokens) - 1, max_length) for request in requests]
    answers: dict[int, ScoreAnswer] = {}
    batches = batches_by_tokens(lengths, token_budget)
    done, padded, rate, started = 0, 0, "", time.perf_counter()
    with bar(title, total=sum(lengths)) as progress:
        for batch in batches:
            scored = _answer_batch(scorer, [requests[i] for i in batch], max_length)
            answers |= dict(zip(batch, scored, strict=True))
            read = sum(lengths[i] for i in batch)
            done += read
            padded += lengths[batch[0]] * len(batch)
            rate = f"{done / (time.perf_counter() - started):,.0f} tokens/s"
            progress.advance(read, rate)
    log.info(
        "%s: %s tokens in %d batches, %.1f %% padding, %s",
        *(title, f"{done:,}", len(batches), 100 * (1 - done / max(padded, 1)), rate),
    )
    return [answers[i] for i in range(len(requests))]


def _answer_batch(
    scorer: Scorer, requests: Sequence[ScoreRequest], max_length: int
) -> list[ScoreAnswer]:
    # The last token is only predicted, never an input.
    inputs = [request.tokens[:-1][-max_length:] for request in requests]
    sizes = [request.scored for request in requests]
    rows = np.repeat(np.arange(len(requests)), sizes)
    columns = np.concatenate(
        [np.arange(len(row) - n, len(row)) for row, n in zip(inputs, sizes, strict=True)]
    )
    targets = np.concatenate([np.asarray(r.tokens[-r.scored :], np.int64) for r in requests])
    tokens, _ = pad(inputs)
    log_likelihoods, greedy = scorer.score(Targets(tokens, rows, columns, targets))
    cuts = np.cumsum(sizes)[:-1]
    return [
        ScoreAnswer(of_request, hits, len(request.tokens) - 1 - len(row))
        for request, row, of_request, hits in zip(
            requests, inputs, np.split(log_likelihoods, cuts), np.split(greedy, cuts), strict=True
        )
    ]


def batches_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices grouped by length, longest first, each group at most `budget` tokens when padded
    (a single row may be longer)."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    for i in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
