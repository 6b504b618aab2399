"""May the candidate be deployed in the place of the baseline.

A test of non-inferiority: a loss within the margin of the recipe is accepted, and the verdict says
whether the measurement is fine enough to tell. Both models were measured on the same examples and
blocks of text, so that their differences are compared and what is hard for both cancels out.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from lathe.artifacts.kinds import VERDICT
from lathe.config.settings import GateSettings, Recipe
from lathe.errors import UserError
from lathe.evaluate.paired import Interval, accuracy_difference, loss_difference, mcnemar
from lathe.evaluate.results import Evaluation, read_evaluation, read_log_likelihoods
from lathe.storage import atomic_file, claim_output_file

Verdict = Literal["pass", "inconclusive", "fail"]
SEVERITY: tuple[Verdict, ...] = ("pass", "inconclusive", "fail")
PAST = {"pass": "passed", "inconclusive": "inconclusive", "fail": "failed"}
LARGEST_EXPONENT = 700.0  # exp of more is no float


@dataclass(frozen=True)
class Check:
    """One measure of both models.

    Attributes:
        n: examples, words or blocks of the text.
        change: accuracy: candidate less baseline; perplexity: relative to the baseline.
        low, high: its confidence interval.
        limit: the change that is still allowed, negative for accuracy.
        lost, gained: examples that only the baseline, or only the candidate, has right.
        p_value: McNemar's exact test of no difference at all.
        method: of the interval; see `lathe.evaluate.paired`.
    """

    measure: str
    verdict: Verdict
    baseline: float
    candidate: float
    change: float
    low: float
    high: float
    limit: float
    n: int
    method: str
    lost: int | None = None
    gained: int | None = None
    p_value: float | None = None


@dataclass(frozen=True)
class GateResult:
    """Attributes:
    passed: whether a pipeline deploys the candidate.
    reasons: one sentence a check, the worst first, and what becomes of an inconclusive one.
    checks: in the same order.
    """

    passed: bool
    reasons: tuple[str, ...]
    checks: tuple[Check, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks."""
        known = (check.verdict for check in self.checks)
        return max(known, key=SEVERITY.index, default="pass" if self.passed else "fail")


def gate(recipe: Recipe, baseline: Path, candidate: Path, output: Path | None = None) -> GateResult:
    """Compare two evaluation folders unit by unit with the margins of `recipe.Gate`.

    Cloze accuracy may fall by `max_accuracy_drop` (absolute), perplexity, and that of the cloze
    set's words where `cloze_measure` says so instead, rise by `max_perplexity_increase` (relative
    to the baseline). A check is passed when the bad end of
    the difference's `confidence` interval is within the margin, failed when its good end is
    beyond it, and inconclusive between: then `on_inconclusive` decides. Every check has to pass,
    so that the level needs no correction for their number (an intersection-union test).

    Args:
        output: JSON file to write: verdict, checks, settings, and what both folders were
            measured on.

    Raises:
        UserError: a folder holds no evaluation, or the two were not measured alike: other data,
            another tokenizer or protocol.
    """
    if output is not None:
        claim_output_file(output, VERDICT, baseline, candidate)
    before, after = read_evaluation(baseline), read_evaluation(candidate)
    _require_same_measurement(before, after)
    settings = recipe.Gate
    checks = []
    if before.metrics["cloze"]:
        by_words = settings.cloze_measure == "word_perplexity"
        check = _check_word_perplexity if by_words else _check_accuracy
        checks.append(check(before, after, settings))
    if before.metrics["text"]:
        checks.append(_check_perplexity(before, after, settings))
    checks.sort(key=lambda check: -SEVERITY.index(check.verdict))
    reasons = [_sentence(check, settings.confidence) for check in checks]
    verdict = checks[0].verdict
    if verdict == "inconclusive":
        passed = settings.on_inconclusive == "pass"
        reasons.append(
            f"{'let through' if passed else 'stopped'} without proof: Gate.on_inconclusive is "
            f"{settings.on_inconclusive}; more examples or text would tell"
        )
    else:
        passed = verdict == "pass"
    result = GateResult(passed, tuple(reasons), tuple(checks))
    if output is not None:
        _write(output, result, settings, before, after)
    return result


def judge(best: float, worst: float, allowed: float) -> Verdict:
    """The verdict on a loss that lies between `best` and `worst`."""
    if worst <= allowed:
        return "pass"
    return "fail" if best > allowed else "inconclusive"


def verdict_table(result: GateResult) -> Table:
    """The checks for a terminal, a column each."""
    table = Table("", *(check.measure for check in result.checks))
    rows: dict[str, list[str]] = {}
    for check in result.checks:
        shown = _formats(check)
        for name in ("baseline", "candidate", "change"):
            rows.setdefault(name, []).append(shown[name])
        rows.setdefault("interval", []).append(f"{shown['low']} to {shown['high']}")
        rows.setdefault("allowed", []).append(shown["limit"])
        rows.setdefault("measured on", []).append(_units(check))
        rows.setdefault("verdict", []).append(check.verdict)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _check_accuracy(before: Evaluation, after: Evaluation, settings: GateSettings) -> Check:
    lost = int((before.correct & ~after.correct).sum())
    gained = int((~before.correct & after.correct).sum())
    n = len(before.correct)
    difference = accuracy_difference(lost, gained, n, settings.confidence)
    return Check(
        measure="cloze accuracy",
        verdict=judge(-difference.high, -difference.low, settings.max_accuracy_drop),
        baseline=float(before.correct.mean()),
        candidate=float(after.correct.mean()),
        change=difference.estimate,
        low=difference.low,
        high=difference.high,
        limit=-settings.max_accuracy_drop,
        n=n,
        method="Tango's score interval",
        lost=lost,
        gained=gained,
        p_value=mcnemar(lost, gained),
    )


def _check_perplexity(before: Evaluation, after: Evaluation, settings: GateSettings) -> Check:
    if len(before.tokens) < 2:
        raise UserError(f"{before.folder}: one block of text", "evaluate on a longer text")
    difference = loss_difference(before.losses, after.losses, before.tokens, settings.confidence)
    return _compare_perplexities(
        "perplexity",
        (before.metrics["text"]["perplexity"], after.metrics["text"]["perplexity"]),
        difference,
        settings,
        n=len(before.tokens),
        method="linearized ratio over blocks, Student's t",
    )


def _check_word_perplexity(before: Evaluation, after: Evaluation, settings: GateSettings) -> Check:
    first, second = (-read_log_likelihoods(x) for x in (before, after))
    n = len(first)
    if n < 2:
        raise UserError(f"{before.folder}: one cloze example", "evaluate on more of them")
    difference = loss_difference(first, second, np.ones(n), settings.confidence)
    return _compare_perplexities(
        "cloze word perplexity",
        (math.exp(min(x.mean(), LARGEST_EXPONENT)) for x in (first, second)),
        difference,
        settings,
        n=n,
        method="paired Student's t",
    )


def _compare_perplexities(
    measure: str,
    perplexities: Iterable[float],
    difference: Interval,
    settings: GateSettings,
    n: int,
    method: str,
) -> Check:
    """`difference` is that of the mean losses, in nats."""
    change, low, high = (
        math.expm1(min(x, LARGEST_EXPONENT))
        for x in (difference.estimate, difference.low, difference.high)
    )
    baseline, candidate = perplexities
    return Check(
        measure=measure,
        verdict=judge(low, high, settings.max_perplexity_increase),
        baseline=baseline,
        candidate=candidate,
        change=change,
        low=low,
        high=high,
        limit=settings.max_perplexity_increase,
        n=n,
        method=method,
    )


def _sentence(check: Check, confidence: float) -> str:
    shown = _formats(check)
    return (
        f"{PAST[check.verdict]}: {check.measure} {shown['baseline']} -> {shown['candidate']}: "
        f"a change of {shown['change']}, {100 * confidence:.4g}% interval {shown['low']} to "
        f"{shown['high']}, {shown['limit']} allowed; {_units(check)}"
    )


def _units(check: Check) -> str:
    if check.p_value is None:
        return f"{check.n:,} {'words' if check.measure.startswith('cloze') else 'blocks'}"
    text = (
        f"{check.n:,} examples, {check.lost} lost, {check.gained} gained, "
        f"McNemar p = {check.p_value:.2g}"
    )
    if check.baseline <= -check.limit:
        text += " (proves nothing: a model without a hit would be within the margin)"
    return text


def _formats(check: Check) -> dict[str, str]:
    """How the figures of a check are shown: accuracies change by points."""
    if check.measure.endswith("perplexity"):
        value, change = "{:.2f}", "{:+.3g}%"
    else:
        value, change = "{:.2%}", "{:+.2f} points"
    shown = {name: value.format(getattr(check, name)) for name in ("baseline", "candidate")}
    for name in ("change", "low", "high", "limit"):
        shown[name] = change.format(100 * getattr(check, name))
    return shown


def _require_same_measurement(before: Evaluation, after: Evaluation) -> None:
    hint = "evaluate both models on the same data with the same recipe"
    names = f"{before.folder} and {after.folder}"
    for name in ("cloze", "text", "tokenizer"):
        a, b = (x.metrics["digests"].get(name) for x in (before, after))
        if a != b:
            raise UserError(f"{names} differ in {name}: {_short(a)} against {_short(b)}", hint)
    a, b = before.metrics["protocol"], after.metrics["protocol"]
    if a != b:
        raise UserError(f"{names} differ in protocol: {a} against {b}", hint)
    if len(before.correct) != len(after.correct) or before.tokens.tolist() != after.tokens.tolist():
        raise UserError(f"{names} have other examples or blocks", hint)


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"


def _write(
    output: Path,
    result: GateResult,
    settings: GateSettings,
    before: Evaluation,
    after: Evaluation,
) -> None:
    content = {
        "verdict": result.verdict,
        "passed": result.passed,
        "reasons": result.reasons,
        "checks": [asdict(check) for check in result.checks],
        "settings": settings.model_dump(),
        "baseline": _measured(before),
        "candidate": _measured(after),
    }
    with atomic_file(output) as work:
        work.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _measured(evaluation: Evaluation) -> dict[str, Any]:
    parts = {name: evaluation.metrics[name] for name in ("protocol", "sources", "digests")}
    return {"folder": str(evaluation.folder), **parts}
