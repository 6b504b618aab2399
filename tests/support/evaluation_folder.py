"""Writes evaluation folders with chosen errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np

METRICS: dict[str, Any] = {
    "model": {"stage": "pretrain", "n_params": 1, "bytes": 4, "quantized": False},
    "protocol": {"max_seq_len": 128, "overlapping_eval": 64},
    "sources": {"cloze": "cloze.jsonl", "text": "heldout.txt"},
    "digests": {"cloze": "c" * 64, "text": "t" * 64, "tokenizer": "k" * 64, "model": "m" * 64},
    "seconds": 1.0,
}
HARD = np.random.default_rng(0).normal(0.0, 0.5, 50)
HARD += 3.0 - HARD.mean()  # nats per token of 50 blocks
WORDS = np.random.default_rng(1).normal(-7.0, 3.0, 2000)  # log-likelihoods, nats


def folder(
    path: Path,
    n: int = 2000,
    wrong: int = 1000,
    first_wrong: int = 0,
    rise: float = 0.0,
    noise: float = 0.0,
    worse: float = 0.0,
    cloze: bool = True,
    text: bool = True,
    vocab_size: int | None = None,
    **changes: dict[str, Any],
) -> Path:
    """Write an evaluation.

    Args:
        n: number of cloze examples.
        wrong: number of wrong examples, starting at `first_wrong`.
        rise: relative increase of perplexity over HARD, whose blocks have 100 tokens.
        noise: amplitude of alternating noise on losses and log-likelihoods, in nats.
        worse: decrease of the last words' log-likelihoods from WORDS, in nats.
        cloze, text: whether these parts were evaluated.
        changes: values to replace in groups of METRICS.
    """
    path.mkdir()
    correct = np.ones(n, bool)
    correct[first_wrong : first_wrong + wrong] = False
    losses = HARD + np.log1p(rise) + noise * np.resize([1.0, -1.0], 50)
    metrics = {**METRICS, "cloze": None, "text": None, "vocab_size": vocab_size}
    for group, values in changes.items():
        metrics[group] = {**METRICS[group], **values}
    if cloze:
        metrics["cloze"] = {"examples": n, "accuracy": correct.mean()}
        words = WORDS[:n] - worse - noise * np.resize([1.0, -1.0], n)
        lines = [
            json.dumps(
                {"index": i, "correct": bool(c), "log_likelihood": float(w), "label_tokens": 1}
            )
            for i, (c, w) in enumerate(zip(correct, words, strict=True))
        ]
        (path / "examples.jsonl").write_text("\n".join(lines) + "\n")
    if text:
        metrics["text"] = {"blocks": 50, "perplexity": float(np.exp(losses.mean()))}
        lines = [json.dumps({"tokens": 100, "loss": 100 * loss}) for loss in losses]
        (path / "blocks.jsonl").write_text("\n".join(lines) + "\n")
    (path / "metrics.json").write_text(json.dumps(metrics))
    return path
