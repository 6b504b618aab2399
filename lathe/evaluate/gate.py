"""The gate: decides whether a candidate may replace the baseline.

It is a non-inferiority test: a loss of quality within the recipe's margin is accepted, and the
verdict is inconclusive if the measurement is not precise enough. Both models are measured on the
same examples and blocks of text. The test compares their paired differences, so that the difficulty
of an example cancels out.

Alpha spending, for repeated gating. Every run of a schedule compares another candidate with the
same live model. A single comparison passes a model that is worse than the margin with a probability
of at most alpha = (1 - confidence) / 2; over many comparisons such a pass becomes likely. Look k
therefore has the level alpha / (k (k + 1)). These levels sum to alpha, so that by the union bound
the probability that any model that is worse than the margin ever passes against this live model is
at most alpha: over any number of looks, with any stopping rule, and for any dependence between
candidates and examples (Foster and Stine, Alpha-investing, Journal of the Royal Statistical Society
B 70, 2008; Tian and Ramdas, Online control of the familywise error rate, Statistical Methods in
Medical Research 30, 2021). An e-process would have more power for one candidate on a growing
sample, but here every look tests another hypothesis.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.table import Table

from lathe.evaluate.comparison import (
    AGAIN,
    PAST,
    Accuracy,
    Check,
    Pair,
    Pairing,
    Verdict,
    outcome,
)
from lathe.evaluate.contamination import statement
from lathe.evaluate.evaluation_folder import METRICS, pair_evaluations
from lathe.evaluate.intervals import share_interval
from lathe.evaluate.lm_eval import is_logged, pair_logged
from lathe_base import storage
from lathe_base.artifacts.kinds import VERDICT, read_json
from lathe_base.config.settings import GateSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_base.inputs import first_mistake, read_text
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_file, claim_output_file, locked

SEVERITY: tuple[Verdict, ...] = ("pass", "inconclusive", "fail")

HISTORY_HINT = "move the file away to start over; this discards the count of looks"


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
        """The verdict in words; see `lathe.evaluate.comparison.outcome`."""
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
            baseline; each is then made at the confidence of `confidence_at`.

    Raises:
        UserError: a folder is not an evaluation, or the two were measured on different data, or
            with a different tokenizer or protocol.
    """
    if output is not None:
        claim_output_file(output, VERDICT, baseline, candidate)
    settings = recipe.Gate
    pairing = _pair(baseline, candidate, settings.cluster_by)
    tested = list(_with_margins(pairing, settings))
    clean = [(without, margin) for one, margin in tested if (without := _uncontaminated(one))]
    statements = {  # of each set that is partly in the training text of either model
        statement(name, share)
        for measured in (pairing.before, pairing.after)
        for name, share in measured.get("contamination", {}).items()
    }
    pairing = replace(pairing, notes=(*pairing.notes, *sorted(filter(None, statements))))

    # A look is spent before the models are compared: whoever has seen a result has looked.
    look = None
    if history is not None:
        if not pairing.baseline:
            raise UserError(
                f"{baseline}: does not record which model it evaluates",
                "evaluate it again",
                Code.INCOMPLETE,
            )
        look = spend(history, pairing.baseline, pairing.candidate)
    confidence = settings.confidence if look is None else confidence_at(look, settings.confidence)
    checks = [
        one.measure.compare(one.name, one.before, one.after, margin, confidence)
        for one, margin in (*tested, *clean)
    ]
    result = _conclude(checks, pairing, settings, confidence, look)

    if output is not None:
        content = {
            "verdict": result.verdict,
            "passed": result.passed,
            "reasons": result.reasons,
            "checks": [asdict(check) for check in result.checks],
            "shown": [asdict(metric) for metric in result.shown],
            "notes": result.notes,
            "look": result.look,
            "confidence": result.confidence,
            "settings": settings.model_dump(),
            "baseline": pairing.before,
            "candidate": pairing.after,
        }
        with atomic_file(output) as work:
            text = json.dumps(content, indent=2, allow_nan=False) + "\n"
            work.write_text(text, encoding="utf-8")
    return result


def _pair(baseline: Path, candidate: Path, cluster_by: str | None) -> Pairing:
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
    return pair(baseline, candidate, cluster_by)


def _with_margins(pairing: Pairing, settings: GateSettings) -> Iterator[tuple[Pair, float]]:
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
    is_tested = False
    for pair in pairing.pairs:
        margin = pair.measure.margin(settings)
        for pattern, stated in settings.margins.items():
            if fnmatchcase(pair.name, pattern):  # the last pattern that matches wins
                margin = stated
        if margin is not None:
            is_tested = True
            yield pair, margin
    if not is_tested:
        raise UserError(
            f"no margin applies to any measure: {', '.join(names)}",
            "give one with -o 'Gate.margins={MEASURE: 0.01}'",
            Code.MISSING_OPTION,
        )


def _uncontaminated(pair: Pair) -> Pair | None:
    """The pair on the units that neither model's training text contains; None if no unit is
    contaminated.

    Raises:
        UserError: too few units are left.
    """
    # A unit that either model has seen is left out of both: units stay paired.
    rows = list(zip(pair.before.rows, pair.after.rows, strict=True))
    clean = [not (a.get("contaminated") or b.get("contaminated")) for a, b in rows]
    if all(clean):
        return None
    if sum(clean) < 2:
        raise UserError(
            f"{pair.name}: the training text contains {len(clean) - sum(clean):,} of "
            f"{len(clean):,} units: the set is not held out",
            "evaluate both models on another set",
            Code.TOO_LITTLE_DATA,
        )
    before, after = (
        replace(units, rows=[row for row, keep in zip(units.rows, clean, strict=True) if keep])
        for units in (pair.before, pair.after)
    )
    return replace(pair, name=f"{pair.name}, uncontaminated", before=before, after=after)


def _conclude(
    checks: Sequence[Check],
    pairing: Pairing,
    settings: GateSettings,
    confidence: float,
    look: int | None,
) -> GateResult:
    """The result: `conclusion` decides; if it is inconclusive, the recipe does."""
    # Sorting is stable: checks of equal severity stay in the order of the tasks.
    ranked = sorted(checks, key=lambda check: -SEVERITY.index(check.verdict))
    reasons = [check.sentence(confidence) for check in ranked]
    verdict = conclusion(checks)
    passed = verdict == "pass"
    if verdict == "inconclusive":
        passed = settings.on_inconclusive == "pass"
        cure = "more examples or more text would decide it"
        if ranked[0].verdict == "pass":  # every check passes, and would for any model
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


def verdict_table(result: GateResult) -> Table:
    """A table for a terminal with one column per check."""
    table = Table("", *(check.measure for check in result.checks))
    rows: dict[str, list[str]] = {}
    for check in result.checks:
        shown = check.formatted()
        for name in ("baseline", "candidate", "change"):
            rows.setdefault(name, []).append(shown[name])
        rows.setdefault("interval", []).append(f"{shown['low']} to {shown['high']}")
        rows.setdefault("allowed", []).append(shown["limit"])
        rows.setdefault("can show", []).append(shown["detectable"])
        rows.setdefault("measured on", []).append(check.formatted_units())
        if any(other.noise_floor is not None for other in result.checks):
            floor = check.noise_floor
            known = "" if floor is None else f"{floor:,} of {check.n:,} {check.unit}"
            rows.setdefault("noise floor", []).append(known)
        if any(other.needed for other in result.checks):
            rows.setdefault("would decide", []).append(check.decisive_units())
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


def informational_metrics(pairing: Pairing, confidence: float) -> Iterator[InformationalMetric]:
    """Yield the flips of every accuracy, and the noise floor of generated answers; agreement and
    divergence where the candidate was evaluated with the baseline as its reference.

    Two models of the same accuracy may differ in many answers. Dutta et al., Accuracy is not all
    you need (2024), find that the share of flipped answers and the divergence of next-token
    distributions show the effects of compression better.
    """
    wilson = "Wilson's score interval"
    for pair in pairing.pairs:
        n = len(pair.before.rows)
        if isinstance(pair.measure, Accuracy):
            rows = (*pair.before.rows, *pair.after.rows)
            if all(pair.measure.column in row for row in rows):  # earlier versions wrote fewer
                theirs, ours = pair.measure.right(pair.before), pair.measure.right(pair.after)
                lost, gained = int((theirs & ~ours).sum()), int((~theirs & ours).sum())
                share = share_interval(lost + gained, n, confidence)
                ends = share.estimate, share.low, share.high
                name = f"flips of {pair.name}"
                yield InformationalMetric(name, *ends, n, "examples", wilson, lost, gained)
            floor = pair.before.noise_floor(pair.measure.column)
            if floor is not None:
                share = share_interval(floor, n, confidence)
                ends = share.estimate, share.low, share.high
                name = f"noise floor of {pair.name} ({pair.before.rows[0].get(f'how{AGAIN}')})"
                yield InformationalMetric(name, *ends, n, "examples", wilson)
        elif (
            "agreement" in pair.after.figures
            and n > 1
            and pairing.after["digests"].get("reference") == pairing.baseline
        ):
            tokens = pair.after.column("tokens")
            for name, column in (
                ("top-1 agreement", "agreed"),
                ("KL divergence from the baseline", "divergence"),
            ):
                totals = pair.after.totals(pair.after.column(column), tokens)
                mean = totals.interval(confidence)
                ends = mean.estimate, mean.low, mean.high
                method = f"linearized ratio over {len(totals.sums)} stretches, Student's t"
                yield InformationalMetric(name, *ends, n, "blocks", method)


class Look(BaseModel):
    """One comparison: digest of the candidate and its data, and the time."""

    model_config = ConfigDict(extra="forbid")

    candidate: str
    at: datetime


class Looks(BaseModel):
    """The history file: the looks against each live model, by its digest."""

    model_config = ConfigDict(extra="forbid")

    looks: dict[str, tuple[Look, ...]] = {}


def confidence_at(look: int, confidence: float) -> float:
    """The confidence of the two-sided interval at the `look`-th comparison, from 1."""
    return 1 - (1 - confidence) / (look * (look + 1))


def spend(history: str | Path, baseline: str, candidate: str) -> int:
    """Record a look at `candidate` against `baseline`, and return its number, from 1.

    It is recorded before the result is known. The same candidate on the same data keeps the number
    of its first look, so that repeating a step spends nothing.

    Args:
        history: file, or address in an object store; created if it does not exist.

    Raises:
        UserError: the file is broken, or another process is writing to it.
    """
    path, is_stored = Path(history), storage.is_store(str(history))
    # A file is locked; an object is replaced only if nobody else has changed it, see below.
    with nullcontext() if is_stored else locked(path.parent):
        text: str | None = None
        if is_stored and storage.exists(str(history)):
            text = storage.read_text(str(history))
        elif not is_stored and path.exists():
            text = read_text(path)
        try:
            recorded = Looks.model_validate_json(text) if text is not None else Looks()
        except ValidationError as error:
            raise UserError(
                f"{history}: broken: {first_mistake(error)}", HISTORY_HINT, Code.MALFORMED
            ) from None
        # Counted by live model: when it is replaced, the next one has all of alpha again.
        looks = recorded.looks.get(baseline, ())
        # The same candidate on the same data has been looked at before: its level is spent.
        for number, look in enumerate(looks, start=1):
            if look.candidate == candidate:
                return number
        added = (*looks, Look(candidate=candidate, at=datetime.now(UTC)))
        values = Looks(looks=recorded.looks | {baseline: added}).model_dump(mode="json")
        changed = json.dumps(values, indent=1) + "\n"
        if is_stored:
            storage.replace_text(str(history), changed, text)  # fails if `text` is not current
        else:
            with atomic_file(path) as work:
                work.write_text(changed, encoding="utf-8")
        return len(added)
