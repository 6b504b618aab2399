"""May the candidate be deployed in the place of the baseline."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.errors import UserError
from lathe.settings import Recipe

METRICS = ("model", "cloze", "text", "protocol", "sources", "digests", "seconds")


@dataclass(frozen=True)
class GateResult:
    """`reasons` has one sentence a check, those that failed first."""

    passed: bool
    reasons: tuple[str, ...]


def gate(recipe: Recipe, baseline: Path, candidate: Path) -> GateResult:
    """Compare two evaluation folders with the tolerances of `recipe.Gate`.

    Cloze accuracy may fall by `max_accuracy_drop` (absolute), perplexity rise by
    `max_perplexity_increase` (relative to the baseline).

    Raises:
        UserError: a folder holds no evaluation, or the two were not measured alike: other data,
            another tokenizer or protocol.
    """
    before, after = read_metrics(baseline), read_metrics(candidate)
    _require_same_measurement(before, after, baseline, candidate)
    checks = []
    if before["cloze"]:
        change = after["cloze"]["accuracy"] - before["cloze"]["accuracy"]
        allowed = recipe.Gate.max_accuracy_drop
        checks.append(
            (
                change >= -allowed,
                f"cloze accuracy {before['cloze']['accuracy']:.2%} -> "
                f"{after['cloze']['accuracy']:.2%}: a change of {100 * change:+.2f} points, "
                f"{-100 * allowed:+.2f} allowed"
                + (
                    ""
                    if before["cloze"]["accuracy"]
                    else " (proves nothing: the baseline has none)"
                ),
            )
        )
    if before["text"]:
        rise = after["text"]["perplexity"] / before["text"]["perplexity"] - 1
        allowed = recipe.Gate.max_perplexity_increase
        checks.append(
            (
                rise <= allowed,
                f"perplexity {before['text']['perplexity']:.2f} -> "
                f"{after['text']['perplexity']:.2f}: a change of {rise:+.1%}, "
                f"{allowed:+.1%} allowed",
            )
        )
    checks.sort(key=lambda check: check[0])
    reasons = tuple(f"{'passed' if ok else 'failed'}: {text}" for ok, text in checks)
    return GateResult(all(ok for ok, _ in checks), reasons)


def read_metrics(folder: Path) -> dict[str, Any]:
    """`metrics.json` of an evaluation folder.

    Raises:
        UserError: there is none, or it is broken.
    """
    path = folder / "metrics.json"
    try:
        metrics = json.loads(path.read_text())
        return {key: metrics[key] for key in METRICS}
    except FileNotFoundError:
        raise UserError(
            f"{folder}: no metrics.json", "give the folder that `lathe evaluate` wrote"
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError):
        raise UserError(f"{path}: broken", "evaluate the model again") from None


def _require_same_measurement(
    before: dict[str, Any], after: dict[str, Any], baseline: Path, candidate: Path
) -> None:
    cure = "evaluate both models on the same data with the same recipe"
    for name in ("cloze", "text", "tokenizer"):
        a, b = before["digests"].get(name), after["digests"].get(name)
        if a != b:
            raise UserError(
                f"{baseline} and {candidate} differ in {name}: {_short(a)} against {_short(b)}",
                cure,
            )
    if before["protocol"] != after["protocol"]:
        raise UserError(
            f"{baseline} and {candidate} differ in protocol: "
            f"{before['protocol']} against {after['protocol']}",
            cure,
        )


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"
