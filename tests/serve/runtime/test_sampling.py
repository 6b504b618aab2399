"""The sampler against transformers' logits processors, and frequencies of its samples."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lathe_base.parameters import Params
from lathe_serving.runtime.sampling import distribution, next_token, penalize

VOCAB, EOS = 200, 7


def random_logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 50, 0.75), (1.3, 0, 0.9), (0.5, 5, 1.0), (1.0, 1, 0.5), (1.0, 500, 0.01)],
)
def test_distribution_is_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(seed)
    scores = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(logits)[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    scores = MinPLogitsWarper(min_p)(None, scores)
    expected = scores.softmax(-1)[0].numpy()
    ids, probabilities = distribution(logits, temperature, top_k, top_p, min_p)
    got = np.zeros(VOCAB)
    got[ids] = probabilities
    assert set(ids) == set(np.flatnonzero(expected))
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("spread", [0.5, 6.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.75), (0, 0.9), (2000, 0.5), (9000, 1.0)])
def test_a_large_vocabulary_with_ties(spread: float, top_k: int, top_p: float) -> None:
    """Only part of the vocabulary is sorted, which must not change flat or peaked distributions."""
    logits = np.random.default_rng(0).normal(0, spread, 20_003).astype(np.float32).round(2)
    scores = torch.from_numpy(logits)[None]
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    odds = scores.softmax(-1)[0].double().numpy()
    ids, probabilities = distribution(logits, 1.0, top_k, top_p)
    kept = np.sort(odds)[::-1].cumsum().searchsorted(top_p * (1 - 1e-6)) + 1
    assert abs(len(ids) - (kept if top_p < 1 else (odds > 0).sum())) <= 1
    assert odds[ids].min() >= np.delete(odds, ids).max()
    np.testing.assert_allclose(probabilities, odds[ids] / odds[ids].sum(), rtol=1e-4)


@pytest.mark.parametrize("penalty", [0.8, 1.2, 2.0])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    logits, history = random_logits(0), [3, 5, 5, 9, 150]
    seen = np.zeros(VOCAB, bool)
    seen[history] = True
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([history]), torch.from_numpy(logits)[None])[0].numpy()
    np.testing.assert_allclose(penalize(logits, seen, penalty), expected, rtol=1e-6)


def test_a_bias_is_transformers_and_comes_before_the_penalty() -> None:
    logits, history = random_logits(0), [3, 5, 9]
    bias = {3: 40.0, 17: 21.5, 18: -100.0}
    seen = np.zeros(VOCAB, bool)
    seen[history] = True
    scores = torch.from_numpy(logits.copy())[None]
    sequences = {(token,): value for token, value in bias.items()}
    scores = SequenceBiasLogitsProcessor(sequences)(torch.tensor([history]), scores)
    scores = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([history]), scores)
    params = Params(decode_strategy="greedy_search", repetition_penalty=2.0, logit_bias=bias)
    found = next_token(logits, seen, 0, params, [EOS], np.random.default_rng(0))
    assert found == int(scores.argmax()) == 17
    np.testing.assert_array_equal(logits, random_logits(0))


@pytest.mark.parametrize(
    ("likely", "changes", "n_generated", "is_possible"),
    [
        (EOS, {}, 0, True),
        (EOS, {"min_tokens": 2}, 1, False),
        (EOS, {"ignore_eos": True}, 5, False),
        (EOS, {"ignore_eos": True, "stop_token_ids": (EOS,)}, 5, True),
        (8, {"stop_token_ids": (8,)}, 0, True),
        (8, {"stop_token_ids": (8,), "min_tokens": 2}, 1, False),
        (8, {"stop_token_ids": (8,), "min_tokens": 2}, 2, True),
        (8, {"stop_token_ids": (8,), "ignore_eos": True}, 5, True),
    ],
)
def test_which_tokens_may_end_a_text(
    likely: int, changes: dict[str, Any], n_generated: int, is_possible: bool
) -> None:
    logits = random_logits(0)
    logits[likely] = 100.0
    params = replace(Params(decode_strategy="greedy_search", min_tokens=0), **changes)
    seen, rng = np.zeros(VOCAB, bool), np.random.default_rng(0)
    found = next_token(logits, seen, n_generated, params, [EOS], rng)
    assert (found == likely) is is_possible


@pytest.mark.parametrize("n_generated", [0, 1, 2, 3])
def test_minimum_length_is_transformers(n_generated: int) -> None:
    logits = random_logits(0)
    logits[EOS] = 100.0
    processor = MinNewTokensLengthLogitsProcessor(4, 2, EOS, device="cpu")
    history = torch.zeros(1, 4 + n_generated, dtype=torch.long)
    expected = int(processor(history, torch.from_numpy(logits.copy())[None]).argmax())
    params = Params(decode_strategy="greedy_search", min_tokens=2)
    rng = np.random.default_rng(0)
    seen = np.zeros(VOCAB, bool)
    assert next_token(logits, seen, n_generated, params, [EOS], rng) == expected
    assert logits[EOS] == 100.0


def test_draws_follow_the_distribution() -> None:
    logits = random_logits(1)
    params = Params(temperature=2.0, top_k=6, top_p=1.0, min_tokens=0)
    rng = np.random.default_rng(0)
    seen = np.zeros(VOCAB, bool)
    n = 4000
    drawn = [next_token(logits, seen, 0, params, [EOS], rng) for _ in range(n)]
    ids, probabilities = distribution(logits, 2.0, 6, 1.0)
    counts = np.bincount(drawn, minlength=VOCAB)[ids]
    assert counts.sum() == n
    deviation = (counts - n * probabilities) / np.sqrt(n * probabilities * (1 - probabilities))
    assert np.abs(deviation).max() < 4
