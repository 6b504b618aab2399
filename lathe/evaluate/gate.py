"""The gate: decides whether a candidate may replace the baseline.

It is a non-inferiority test: a loss of quality within the recipe's margin is accepted, and the
verdict is inconclusive if the measurement is not precise enough. Both models are measured on the
same examples and blocks of text. The test compares their paired differences, so that the difficulty
of an example cancels out.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.table import Table

from lathe.evaluate.alpha_spending import confidence_at, spend
from lathe.evaluate.comparison import AGAIN, Accuracy, Check, Units, Verdict
from lathe.evaluate.contamination import statement, without_contaminated
from lathe.evaluate.evaluation_folder import METRICS
from lathe.evaluate.intervals import Interval, share_interval
from lathe.evaluate.lm_eval import is_logged, pair_logged
from lathe.evaluate.paired_evaluations import Pair, Pairing, pair_evaluations
from lathe.evaluate.wording import PAST, decisive, formats, outcome, sentence, units
from lathe_base.artifacts.kinds import VERDICT, read_json
from lathe_base.config.settings import GateSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_file, claim_output_file

SEVERITY: tuple[Verdict, ...] = ("pass", "inconclusive", "fail")


@dataclass(frozen=True)
class InformationalMetric:
    """A figure with its confidence interval.

    Attributes:
        measure: its name.
        n: number of units, which `unit` names.
        lost, gained: for flips, examples that only the baseline, or only the candidate, gets right.
    """

    measure: str
    value: float
    low: float
    high: float
    n: int
    unit: str
    method: str
    lost: int | None = None
    gained: int | None = None

    def text(self) -> tuple[str, str]:
        """The figure and its interval, as text."""
        shape = "{:.5f} nats" if self.measure.startswith("KL") else "{:.2%}"
        value, low, high = (shape.format(x) for x in (self.value, self.low, self.high))
        return value, f"{low} to {high}"

    def units(self) -> str:
        """The number of units it was measured on, as text."""
        flips = f", {self.lost} lost, {self.gained} gained" if self.lost is not None else ""
        return f"{self.n:,} {self.unit}{flips}"


@dataclass(frozen=True)
class GateResult:
    """The verdict on a candidate.

    Attributes:
        passed: whether a pipeline deploys the candidate.
        reasons: one sentence per check, the worst first; before them, if nothing is proven, the
            consequence.
        checks: in the same order.
        shown: figures for information, which are not tested.
        notes: what could not be compared, and why.
        confidence: of the intervals.
        look: the number of this comparison against the same baseline, from 1; None if looks are not
            counted.
    """

    passed: bool
    reasons: tuple[str, ...]
    checks: tuple[Check, ...] = ()
    shown: tuple[InformationalMetric, ...] = ()
    notes: tuple[str, ...] = ()
    confidence: float | None = None
    look: int | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the checks; without any, that of `passed`."""
        return conclusion(self.checks) if self.checks else "pass" if self.passed else "fail"

    @property
    def outcome(self) -> str:
        """The verdict in words; see `lathe.evaluate.wording.outcome`."""
        return outcome(self.verdict, self.passed)


def conclusion(checks: Sequence[Check]) -> Verdict:
    """The worst verdict of the checks. Passes that even a model that has learned nothing
    would achieve prove nothing: if there are no others, the conclusion is inconclusive."""
    worst = max((check.verdict for check in checks), key=SEVERITY.index)
    if worst == "pass" and all(check.is_meaningless for check in checks):
        return "inconclusive"
    return worst


def _verdict(path: Path) -> dict[str, dict[str, Any]]:
    values = read_json(path, "compare the models again")
    return {"verdict": {name: values[name] for name in ("verdict", "passed")}}


@attested("gate", "baseline", "candidate", results=_verdict)
def gate(
    recipe: Recipe,
    baseline: Path,
    candidate: Path,
    output: Path | None = None,
    history: Path | str | None = None,
) -> GateResult:
    """Compare two models unit by unit with the margins of `recipe.Gate`.

    Both are folders of `lathe evaluate`, or both of lm-evaluation-harness with `--log_samples`.

    Cloze accuracy may fall by `max_accuracy_drop` (absolute), or, if `cloze_measure` says so, the
    perplexity of the cloze set's words is checked instead. Perplexities may rise by
    `max_perplexity_increase` (relative to the baseline). Accuracies and other scores of other tasks
    may fall by `max_task_accuracy_drop`. `margins` overrides these for individual measures.

    A check passes if the worse end of the difference's `confidence` interval is within the margin,
    and fails if the better end is beyond it. Otherwise it is inconclusive, and `on_inconclusive`
    decides. It also decides if only such checks pass that a model that has learned nothing would
    pass too. Every check has to pass, so the level needs no correction for the number of checks (an
    intersection-union test: Berger, Multiparameter hypothesis testing and acceptance sampling,
    Technometrics 24, 1982).

    A check of generated answers does not fail, but is inconclusive, if the net loss is within the
    noise floor: the number of answers on which the baseline disagrees with itself when it is run
    again.

    If the evaluations mark units as contaminated, because a model's training text contains them,
    the measure is also checked without these, as `NAME, uncontaminated`, and both checks have to
    pass.

    Args:
        output: JSON file to write: verdict, checks, settings, and the data of both evaluations.
        history: file, or address in an object store, that counts the comparisons with the same
            baseline; each is then made at the confidence of `lathe.evaluate.alpha_spending`.

    Raises:
        UserError: a folder is not an evaluation, or the two were measured on different data, or
            with a different tokenizer or protocol.
    """
    if output is not None:
        claim_output_file(output, VERDICT, baseline, candidate)
    settings = recipe.Gate
    pairing = _pair(baseline, candidate, settings)
    judged = list(_judged(pairing, settings))
    clean = list(_uncontaminated(judged))
    said = {  # of each set that is partly in the training text of either model
        statement(name, share)
        for measured in (pairing.before, pairing.after)
        for name, share in measured.get("contamination", {}).items()
    }
    pairing = replace(pairing, notes=(*pairing.notes, *sorted(filter(None, said))))
    if history is not None and not pairing.baseline:
        raise UserError(
            f"{baseline}: does not record which model it evaluates",
            "evaluate it again",
            Code.INCOMPLETE,
        )
    look = None if history is None else spend(history, pairing.baseline, pairing.candidate)
    confidence = settings.confidence if look is None else confidence_at(look, settings.confidence)
    checks = [
        pair.measure.compare(pair.name, pair.before, pair.after, margin, confidence)
        for pair, margin in (*judged, *clean)
    ]
    result = _conclude(checks, pairing, settings, confidence, look)
    if output is not None:
        _write(output, result, settings, pairing)
    return result


def _conclude(
    checks: Sequence[Check],
    pairing: Pairing,
    settings: GateSettings,
    confidence: float,
    look: int | None,
) -> GateResult:
    """The result: `conclusion` decides; if it is inconclusive, the recipe does."""
    ranked = sorted(checks, key=lambda check: -SEVERITY.index(check.verdict))
    reasons = [sentence(check, confidence) for check in ranked]
    verdict = conclusion(checks)
    passed = verdict == "pass"
    if verdict == "inconclusive":
        passed = settings.on_inconclusive == "pass"
        cure = "more examples or more text would decide it"
        if ranked[0].verdict == "pass":
            cure = (
                "no check can tell the candidate from a model that has learned nothing: train "
                "longer, or if the baseline is good at other data, evaluate on that too (a text, "
                "Gate.cloze_measure=word_perplexity) or narrow the margin"
            )
        reasons.insert(
            0,
            f"NOT PROVEN: {'passed without proof' if passed else 'stopped'}, because "
            f"Gate.on_inconclusive is {settings.on_inconclusive}; {cure}",
        )
    return GateResult(
        passed=passed,
        reasons=tuple(reasons),
        checks=tuple(ranked),
        shown=tuple(informational_metrics(pairing, confidence)),
        notes=pairing.notes,
        confidence=confidence,
        look=look,
    )


def _pair(baseline: Path, candidate: Path, settings: GateSettings) -> Pairing:
    """The measures of both, from Lathe or lm-evaluation-harness."""
    by_lm_eval = [
        not (path / METRICS).is_file() and is_logged(path) for path in (baseline, candidate)
    ]
    if any(by_lm_eval) and not all(by_lm_eval):
        raise UserError(
            f"{baseline} and {candidate}: only one of them is from lm_eval",
            "evaluate both models with the same program",
            Code.MISMATCH,
        )
    pair = pair_logged if all(by_lm_eval) else pair_evaluations
    return pair(baseline, candidate, settings.cluster_by)


def _judged(pairing: Pairing, settings: GateSettings) -> Iterator[tuple[Pair, float]]:
    """The measures that the gate tests, each with its margin.

    Raises:
        UserError: there are none, or a pattern of `Gate.margins` matches no measure.
    """
    names = [pair.name for pair in pairing.pairs]
    for pattern in settings.margins:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"Gate.margins: {pattern!r} matches no measure of these evaluations",
                f"they have: {', '.join(names)}",
                Code.UNKNOWN_NAME,
            )
    is_judged = False
    for pair in pairing.pairs:
        margin = pair.measure.margin(settings)
        for pattern, stated in settings.margins.items():
            if fnmatchcase(pair.name, pattern):
                margin = stated
        if margin is not None:
            is_judged = True
            yield pair, margin
    if not is_judged:
        raise UserError(
            f"no margin applies to any measure: {', '.join(names)}",
            "give one with -o 'Gate.margins={MEASURE: 0.01}'",
            Code.MISSING_OPTION,
        )


def _uncontaminated(judged: Sequence[tuple[Pair, float]]) -> Iterator[tuple[Pair, float]]:
    """The measures of contaminated sets, on their uncontaminated units.

    Raises:
        UserError: too few units are left.
    """
    for pair, margin in judged:
        clean = without_contaminated(pair)
        if clean and len(clean.before.rows) < 2:
            raise UserError(
                f"{pair.name}: the training text contains "
                f"{len(pair.before.rows) - len(clean.before.rows):,} of {len(pair.before.rows):,} "
                "units: the set is not held out",
                "evaluate both models on another set",
                Code.TOO_LITTLE_DATA,
            )
        if clean:
            yield clean, margin


def verdict_table(result: GateResult) -> Table:
    """A table for a terminal with one column per check."""
    table = Table("", *(check.measure for check in result.checks))
    rows: dict[str, list[str]] = {}
    for check in result.checks:
        shown = formats(check)
        for name in ("baseline", "candidate", "change"):
            rows.setdefault(name, []).append(shown[name])
        rows.setdefault("interval", []).append(f"{shown['low']} to {shown['high']}")
        rows.setdefault("allowed", []).append(shown["limit"])
        rows.setdefault("can show", []).append(shown["detectable"])
        rows.setdefault("measured on", []).append(units(check))
        if any(other.noise_floor is not None for other in result.checks):
            floor = check.noise_floor
            known = "" if floor is None else f"{floor:,} of {check.n:,} {check.unit}"
            rows.setdefault("noise floor", []).append(known)
        if any(other.needed for other in result.checks):
            rows.setdefault("would decide", []).append(decisive(check))
        rows.setdefault("verdict", []).append(PAST[check.verdict])
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def shown_table(result: GateResult) -> Table:
    """A table for a terminal with the figures that are not tested, one per row."""
    level = f"{100 * (result.confidence or 0):.6g}% interval"
    table = Table("for information only", "", level, "measured on")
    for figure in result.shown:
        table.add_row(figure.measure, *figure.text(), figure.units())
    return table


def _write(output: Path, result: GateResult, settings: GateSettings, pairing: Pairing) -> None:
    content = {
        "verdict": result.verdict,
        "passed": result.passed,
        "reasons": result.reasons,
        "checks": [asdict(check) for check in result.checks],
        "shown": [asdict(figure) for figure in result.shown],
        "notes": result.notes,
        "look": result.look,
        "confidence": result.confidence,
        "settings": settings.model_dump(),
        "baseline": pairing.before,
        "candidate": pairing.after,
    }
    with atomic_file(output) as work:
        work.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def informational_metrics(pairing: Pairing, confidence: float) -> Iterator[InformationalMetric]:
    """Yield the flips of every accuracy, and the noise floor of generated answers; agreement and
    divergence where the candidate was evaluated with the baseline as its reference.

    Two models of the same accuracy may differ in many answers. Dutta et al., Accuracy is not all
    you need (2024), find that the share of flipped answers and the divergence of next-token
    distributions show the effects of compression better.
    """
    for pair in pairing.pairs:
        if isinstance(pair.measure, Accuracy):
            rows = (*pair.before.rows, *pair.after.rows)
            if all(pair.measure.column in row for row in rows):  # earlier versions wrote fewer
                theirs, ours = pair.measure.right(pair.before), pair.measure.right(pair.after)
                lost, gained = int((theirs & ~ours).sum()), int((~theirs & ours).sum())
                interval = share_interval(lost + gained, len(theirs), confidence)
                yield _informational(
                    *(f"flips of {pair.name}", interval, len(theirs), "examples"),
                    "Wilson's score interval",
                    lost=lost,
                    gained=gained,
                )
            floor = pair.before.noise_floor(pair.measure.column)
            if floor is not None:
                n, how = len(pair.before.rows), pair.before.rows[0].get(f"how{AGAIN}")
                interval = share_interval(floor, n, confidence)
                yield _informational(
                    *(f"noise floor of {pair.name} ({how})", interval, n, "examples"),
                    "Wilson's score interval",
                )
        elif (
            "agreement" in pair.after.figures
            and len(pair.after.rows) > 1
            and pairing.after["digests"].get("reference") == pairing.baseline
        ):
            yield from _divergence(pair.after, confidence)


def _divergence(units: Units, confidence: float) -> Iterator[InformationalMetric]:
    tokens = units.column("tokens")
    for what, column in (
        ("top-1 agreement", "agreed"),
        ("KL divergence from the baseline", "divergence"),
    ):
        totals = units.totals(units.column(column), tokens)
        interval = totals.interval(confidence)
        method = f"linearized ratio over {len(totals.sums)} stretches, Student's t"
        yield _informational(what, interval, len(tokens), "blocks", method)


def _informational(
    measure: str, interval: Interval, n: int, unit: str, method: str, **flips: int
) -> InformationalMetric:
    return InformationalMetric(
        measure, interval.estimate, interval.low, interval.high, n, unit, method, **flips
    )
