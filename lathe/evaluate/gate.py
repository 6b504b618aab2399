"""The gate: may the candidate replace the baseline?

It is a non-inferiority test: a loss of quality within the recipe's margin is accepted, and the
verdict says whether the measurement is precise enough to decide. Both models are measured on the
same examples and blocks of text. The test compares their paired differences, so that the difficulty
of an example cancels out.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lathe.artifacts.kinds import VERDICT, read_json
from lathe.config.settings import GateSettings, Recipe
from lathe.errors import UserError
from lathe.evaluate.measures import Check, Verdict
from lathe.evaluate.results import Evaluation, read_evaluation
from lathe.provenance.step import attested
from lathe.storage import atomic_file, claim_output_file

SEVERITY: tuple[Verdict, ...] = ("pass", "inconclusive", "fail")
PAST = {"pass": "passed", "inconclusive": "inconclusive", "fail": "failed"}


@dataclass(frozen=True)
class GateResult:
    """The verdict on a candidate.

    Attributes:
        passed: whether a pipeline deploys the candidate.
        reasons: one sentence per check, the worst first, and how an inconclusive one was decided.
        checks: in the same order.
    """

    passed: bool
    reasons: tuple[str, ...]
    checks: tuple[Check, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the checks."""
        known = (check.verdict for check in self.checks)
        return max(known, key=SEVERITY.index, default="pass" if self.passed else "fail")


def _verdict(path: Path) -> dict[str, dict[str, Any]]:
    values = read_json(path, "compare the models again")
    return {"verdict": {name: values[name] for name in ("verdict", "passed")}}


@attested("gate", "baseline", "candidate", results=_verdict)
def gate(recipe: Recipe, baseline: Path, candidate: Path, output: Path | None = None) -> GateResult:
    """Compare two evaluation folders unit by unit with the margins of `recipe.Gate`.

    Cloze accuracy may fall by `max_accuracy_drop` (absolute), or, if `cloze_measure` says so, the
    perplexity of the cloze set's words is checked instead. Perplexities may rise by
    `max_perplexity_increase` (relative to the baseline). The accuracies of other tasks may fall by
    `max_task_accuracy_drop`. A check passes if the worse end of the difference's `confidence`
    interval is within the margin, and fails if the better end is beyond it. Otherwise it is
    inconclusive, and `on_inconclusive` decides. Every check has to pass, so the level needs no
    correction for the number of checks (an intersection-union test).

    Args:
        output: JSON file to write: verdict, checks, settings, and what both folders were
            measured on.

    Raises:
        UserError: a folder holds no evaluation, or the two were measured on different data, or with
            a different tokenizer or protocol.
    """
    if output is not None:
        claim_output_file(output, VERDICT, baseline, candidate)
    before, after = read_evaluation(baseline), read_evaluation(candidate)
    _require_same_measurement(before, after)
    settings = recipe.Gate
    checks = sorted(
        _checks(before, after, settings), key=lambda check: -SEVERITY.index(check.verdict)
    )
    reasons = [_sentence(check, settings.confidence) for check in checks]
    verdict = checks[0].verdict
    if verdict == "inconclusive":
        passed = settings.on_inconclusive == "pass"
        reasons.append(
            f"{'let through' if passed else 'stopped'} without proof: Gate.on_inconclusive is "
            f"{settings.on_inconclusive}; more examples or more text would decide it"
        )
    else:
        passed = verdict == "pass"
    result = GateResult(passed, tuple(reasons), tuple(checks))
    if output is not None:
        _write(output, result, settings, before, after)
    return result


def verdict_table(result: GateResult) -> Table:
    """A table for a terminal with one column per check."""
    table = Table("", *(check.measure for check in result.checks))
    rows: dict[str, list[str]] = {}
    for check in result.checks:
        shown = _formats(check)
        for name in ("baseline", "candidate", "change"):
            rows.setdefault(name, []).append(shown[name])
        rows.setdefault("interval", []).append(f"{shown['low']} to {shown['high']}")
        rows.setdefault("allowed", []).append(shown["limit"])
        rows.setdefault("can show", []).append(shown["detectable"])
        rows.setdefault("measured on", []).append(_units(check))
        if any(other.needed for other in result.checks):
            rows.setdefault("would decide", []).append(_decisive(check))
        rows.setdefault("verdict", []).append(check.verdict)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _checks(before: Evaluation, after: Evaluation, settings: GateSettings) -> Iterator[Check]:
    for name, result in before.measured.items():
        for measure in result.task.measures:
            margin = measure.margin(settings)
            if margin is not None:
                title = result.label(measure) if result.is_named else measure.title.lower()
                units = before.units[name], after.units[name]
                yield measure.compare(title, *units, margin, settings.confidence)


def _sentence(check: Check, confidence: float) -> str:
    shown = _formats(check)
    return (
        f"{PAST[check.verdict]}: {check.measure} {shown['baseline']} -> {shown['candidate']}: "
        f"a change of {shown['change']}, {100 * confidence:.4g}% interval {shown['low']} to "
        f"{shown['high']}, {shown['limit']} allowed; {_units(check)}{_needed(check)}"
    )


def _needed(check: Check) -> str:
    return f"; {_decisive(check)} would decide it if the change stays" if check.needed else ""


def _decisive(check: Check) -> str:
    """The units that would decide an inconclusive check, to two digits."""
    return f"about {float(f'{check.needed:.2g}'):,.0f} {check.unit}" if check.needed else ""


def _units(check: Check) -> str:
    if check.p_value is None:
        return f"{check.n:,} {check.unit}"
    text = (
        f"{check.n:,} examples, {check.lost} lost, {check.gained} gained, "
        f"McNemar p = {check.p_value:.2g}"
    )
    if check.baseline <= -check.limit:
        text += " (proves nothing: a model that gets no example right would be within the margin)"
    return text


def _formats(check: Check) -> dict[str, str]:
    """The figures of a check as text; accuracies change by percentage points."""
    if check.lost is None:
        value, change = "{:.2f}", "{:+.3g}%"
    else:
        value, change = "{:.2%}", "{:+.2f} points"
    shown = {name: value.format(getattr(check, name)) for name in ("baseline", "candidate")}
    for name in ("change", "low", "high", "limit"):
        shown[name] = change.format(100 * getattr(check, name))
    plain = change.replace("+", "").format(100 * (check.detectable or 0.0))
    shown["detectable"] = f"a change of {plain}"
    return shown


def _require_same_measurement(before: Evaluation, after: Evaluation) -> None:
    hint = "evaluate both models on the same data with the same recipe"
    names = f"{before.folder} and {after.folder}"
    a, b = (_digests(evaluation) for evaluation in (before, after))
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name):
            raise UserError(
                f"{names} differ in {name}: {_short(a.get(name))} against {_short(b.get(name))}",
                hint,
            )
    ours, theirs = before.metrics["protocol"], after.metrics["protocol"]
    if ours != theirs:
        raise UserError(f"{names} differ in protocol: {ours} against {theirs}", hint)
    if any(len(before.units[name].rows) != len(after.units[name].rows) for name in before.units):
        raise UserError(f"{names} have different examples or blocks", hint)


def _digests(evaluation: Evaluation) -> dict[str, str | None]:
    """SHA-256 of what a model was measured on, by name."""
    tokenizer = evaluation.metrics["digests"].get("tokenizer")
    results = evaluation.measured.items()
    return {**{name: result.digest for name, result in results}, "tokenizer": tokenizer}


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
    digests = {name: r.digest for name, r in evaluation.measured.items() if r.is_named}
    return {"folder": str(evaluation.folder), **parts, "digests": parts["digests"] | digests}
