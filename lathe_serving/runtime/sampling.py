"""Choose the next token from one row of logits, in numpy.

The definitions are those of transformers' logits processors, in their order: bias, repetition
penalty, minimum length, then for sampling: temperature, top-k, top-p and min-p (each on what
remains), one draw. OpenAI's presence and frequency penalties follow the repetition penalty.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe_base.parameters import Params

Logits = NDArray[np.float32]
GROUP = 16  # values whose maximum stands for them in the search for the k-th largest
LIKELY = 1024  # a vocabulary's most probable ids, which usually contain what top-p keeps


def next_token(
    logits: Logits,
    seen: NDArray[np.bool_],
    n_generated: int,
    params: Params,
    end_ids: Sequence[int],
    rng: np.random.Generator,
    counts: NDArray[np.int32] | None = None,
    allowed: NDArray[np.bool_] | None = None,
) -> int:
    """Choose the next id.

    Args:
        logits: (vocab,) float32 of the last position; not modified.
        seen: (vocab,) true for every id in the prompt or generated so far.
        n_generated: number of ids generated so far; `end_ids` and `params.stop_token_ids` are
            excluded below `params.min_tokens`, and `end_ids` that are not among them with
            `params.ignore_eos`.
        end_ids: the model's own.
        counts: (vocab,) how often each id was generated so far, for the presence and frequency
            penalties.
        allowed: (vocab,) the ids allowed next; at least one that does not end the text.
    """
    if allowed is not None:
        logits = np.where(allowed, logits, np.float32(-np.inf))
    if params.logit_bias:
        logits = logits.copy()
        logits[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    if params.repetition_penalty != 1.0:
        logits = penalize(logits, seen, params.repetition_penalty)
    if counts is not None and (params.presence_penalty or params.frequency_penalty):
        penalty = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        logits = logits - penalty.astype(np.float32)
    is_early = n_generated < params.min_tokens
    excluded = []
    if is_early:
        excluded = [*end_ids, *params.stop_token_ids]
    elif params.ignore_eos:
        excluded = [token for token in end_ids if token not in params.stop_token_ids]
    if excluded:
        logits = logits.copy()
        logits[excluded] = -np.inf
    if params.decode_strategy == "greedy_search":
        return int(logits.argmax())
    if allowed is not None:  # mostly a few, among which there is less to sort
        possible = np.flatnonzero(logits > -np.inf)
        logits = logits[possible]
    ids, probabilities = distribution(
        logits, params.temperature, params.top_k, params.top_p, params.min_p
    )
    steps = probabilities.cumsum()
    # Scaled by the last step: after rounding it may be less than one, and an id must be found.
    token = ids[np.searchsorted(steps, rng.random() * steps[-1], side="right")]
    return int(token if allowed is None else possible[token])


def log_softmax(logits: Logits) -> Logits:
    """(..., V) log-probabilities."""
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1, dtype=np.float64, keepdims=True)
    out: Logits = shifted - np.log(total).astype(np.float32)
    return out


def most_likely(scores: Logits, k: int) -> NDArray[np.int64]:
    """(k,) ids of the largest scores, in order; of equal ones the lower id first."""
    ids = _top(scores, min(k, scores.size))
    order = np.argsort(-scores[ids], kind="stable")[:k]
    return ids[order]


def penalize(logits: Logits, seen: NDArray[np.bool_], penalty: float) -> Logits:
    """Divide positive logits of seen ids by `penalty`, multiply negative ones (Keskar et al.,
    CTRL, 2019)."""
    factor = np.float32(penalty)
    return np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)


def distribution(
    logits: Logits, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids that survive top-k (0: all), top-p and min-p, and their probabilities, which sum to
    one.

    All ties at the k-th place survive. Top-p keeps the smallest set of most probable ids whose
    total probability reaches `top_p`, at least one (Holtzman et al., 2020). Min-p keeps those that
    are at least `min_p` times as probable as the most probable one (Nguyen et al., 2024).
    """
    ids = _top(logits, top_k) if 0 < top_k < logits.size else np.arange(logits.size)
    with np.errstate(over="ignore"):
        scores = (logits[ids] - logits[ids].max()).astype(np.float64) / temperature
    weights = np.exp(scores)
    probabilities = weights / weights.sum()
    if top_p < 1.0:
        if len(ids) > LIKELY:
            likely = _top(probabilities, LIKELY)
            # Then the rest need not be sorted; the margin covers rounding of the sum.
            if probabilities[likely].sum() > top_p + 1e-9:
                ids, probabilities = ids[likely], probabilities[likely]
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        # In the order of ids, not of probabilities: rounding could swap two that are almost equal,
        # and the same random number would then choose another token.
        keep = np.sort(order[before < top_p])
        ids, probabilities = ids[keep], probabilities[keep] / probabilities[keep].sum()
    if min_p:
        keep = np.flatnonzero(probabilities >= min_p * probabilities.max())
        ids, probabilities = ids[keep], probabilities[keep] / probabilities[keep].sum()
    return ids, probabilities


def _top(values: NDArray[np.floating[Any]], k: int) -> NDArray[np.int64]:
    """Indices of values not below the k-th largest, in order. The k-th largest of the maxima of
    small groups bounds it from below, which leaves few values to partition."""
    groups = values[: len(values) // GROUP * GROUP].reshape(GROUP, -1)
    ids = np.arange(len(values))
    if groups.shape[1] >= k:
        ids = np.flatnonzero(values >= np.partition(groups.max(0), -k)[-k])
    values = values[ids]
    top: NDArray[np.int64] = ids[values >= np.partition(values, -k)[-k]]
    return top
