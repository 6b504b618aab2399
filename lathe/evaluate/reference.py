"""Divergence of a model's next-token distributions from a reference model's, over a text.

Two figures per token, averaged over blocks like the perplexity: top-1 agreement, and the
Kullback-Leibler divergence of the model from the reference, sum p_reference (log p_reference - log
p_model), in nats.

Shapes: B rows of T tokens, n positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import scipy  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lathe.evaluate.intervals import ratio_stderr
from lathe.evaluate.score_requests import Resumable, ScoreLimits, Scores, Targets, answer
from lathe.evaluate.tasks.text import BlockLoss, TokenizedText, text_windows
from lathe_base.artifacts.journal import Journal
from lathe_base.errors import Code, UserError

POSITIONS = 256  # of which both models' (n, V) logits are held at a time


@runtime_checkable
class LogitScorer(Protocol):
    """A scorer that also returns logits: torch, or an ONNX file."""

    def logits(self, targets: Targets) -> NDArray[np.float32]:
        """Logits (n, V) of the token after each position; see `Scorer.score`."""


@dataclass(frozen=True)
class DivergenceScorer:
    """A scorer that returns, at every position, the divergence instead of the target's
    log-likelihood, and top-1 agreement instead of whether the target is the argmax.
    """

    model: LogitScorer
    reference: LogitScorer

    def score(self, targets: Targets) -> Scores:
        """See `Scorer.score`."""
        max_length = int(np.bincount(targets.rows).max())
        step = max(1, POSITIONS // max_length)  # whole rows, so that none is computed twice
        divergences, agreed = [], []
        for start in range(0, len(targets.tokens), step):
            part = (targets.rows >= start) & (targets.rows < start + step)
            rows = targets.tokens[start : start + step]
            shifted = Targets(
                rows, *(x[part] for x in (targets.rows - start, targets.columns, targets.ids))
            )
            ours, theirs = self.model.logits(shifted), self.reference.logits(shifted)
            agreed.append(ours.argmax(1) == theirs.argmax(1))
            log_p, log_q = (
                scipy.special.log_softmax(x.astype(np.float64), axis=1) for x in (theirs, ours)
            )
            divergences.append(np.einsum("nv,nv->n", np.exp(log_p), log_p - log_q))
        return np.concatenate(divergences), np.concatenate(agreed)


@dataclass(frozen=True)
class Agreement:
    """Figures of a text compared with a reference.

    Attributes:
        agreement: top-1 agreement: share of positions with the same most likely token.
        divergence: mean nats per token.
    """

    agreement: float
    agreement_stderr: float
    divergence: float
    divergence_stderr: float


def compare_text(
    model: object,
    reference: object,
    text: TokenizedText,
    blocks: Sequence[BlockLoss],
    limits: ScoreLimits,
    journal: Journal,
) -> tuple[list[BlockLoss], dict[str, Any]]:
    """The blocks of a text with their agreement and divergence, and the figures over all of them.

    Args:
        model, reference: scorers of two models with the same vocabulary.
        blocks: blocks of the text, with the losses of `model`.
        journal: keeps results, so that a killed evaluation can resume.

    Raises:
        UserError: a scorer without logits: a server's, or Paddle's.
    """
    if not isinstance(model, LogitScorer) or not isinstance(reference, LogitScorer):
        raise UserError(
            "--reference requires a checkpoint that torch runs, or an export",
            "omit --reference or --endpoint",
            Code.CONFLICTING_OPTIONS,
        )
    requests = text_windows(text, limits)
    scorer = Resumable(DivergenceScorer(model, reference), journal, "divergence")
    answers = answer(scorer, requests, limits.max_length, limits.token_budget, "reference")
    # The windows cover the text in order, so their positions divide into blocks by number.
    ends = np.cumsum([block.tokens for block in blocks])[:-1]
    divergences = np.split(np.concatenate([a.log_likelihoods for a in answers]), ends)
    agreed = np.split(np.concatenate([a.greedy for a in answers]), ends)
    compared = [
        replace(block, agreed=int(hits.sum()), divergence=float(nats.sum()))
        for block, nats, hits in zip(blocks, divergences, agreed, strict=True)
    ]
    counts = np.array([block.tokens for block in blocks], np.float64)
    sums = [np.array([part.sum() for part in parts], float) for parts in (agreed, divergences)]
    total = counts.sum()
    agreement = Agreement(
        *(x for s in sums for x in (float(s.sum() / total), ratio_stderr(s, counts)))
    )
    return compared, asdict(agreement)
