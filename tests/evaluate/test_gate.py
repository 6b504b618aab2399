import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from lathe.cli import app
from lathe.evaluate.comparison import Units, judge
from lathe.evaluate.gate import SEVERITY, gate, verdict_table
from lathe.evaluate.intervals import accuracy_difference, unit_totals
from lathe.evaluate.tasks import TASKS
from lathe_base.config.settings import GateSettings, Recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.evaluation_folder import METRICS, WORDS, folder

RECIPE = Recipe(Gate=GateSettings(max_accuracy_drop=0.02, max_perplexity_increase=0.10))
FORGIVING = Recipe(Gate=GateSettings(on_inconclusive="pass"))
BY_WORDS = Recipe(Gate=GateSettings(cloze_measure="word_perplexity"))


@pytest.mark.parametrize(
    ("candidate", "verdict"),
    [
        ({}, "pass"),
        ({"wrong": 600, "rise": -0.3}, "pass"),
        ({"wrong": 1010, "rise": 0.09}, "pass"),
        ({"wrong": 1030}, "inconclusive"),  # -1.5 points, interval to -2.1
        ({"wrong": 1042}, "inconclusive"),  # -2.1 points, interval from -1.5
        ({"wrong": 1080}, "fail"),
        ({"rise": 0.09, "noise": 0.2}, "inconclusive"),
        ({"rise": 0.11}, "fail"),
        ({"wrong": 1030, "rise": 0.11}, "fail"),
        ({"wrong": 1400, "rise": 1.0}, "fail"),
    ],
)
def test_verdicts(tmp_path: Path, candidate: dict[str, Any], verdict: str) -> None:
    baseline = folder(tmp_path / "a")
    candidate_folder = folder(tmp_path / "b", **candidate)
    result = gate(RECIPE, baseline, candidate_folder)
    assert result.verdict == verdict
    assert result.passed == (verdict == "pass")
    assert gate(FORGIVING, baseline, candidate_folder).passed == (verdict != "fail")
    assert len(result.checks) == 2
    assert len(result.reasons) == 2 + (verdict == "inconclusive")


def test_the_same_examples_right_tell_more_than_the_same_number(tmp_path: Path) -> None:
    baseline = folder(tmp_path / "a")
    same = gate(RECIPE, baseline, folder(tmp_path / "b"))
    others = gate(RECIPE, baseline, folder(tmp_path / "c", first_wrong=300))
    for result, verdict, discordant in ((same, "pass", 0), (others, "inconclusive", 300)):
        check = next(c for c in result.checks if c.measure == "cloze accuracy")
        assert check.verdict == verdict
        assert check.change == 0
        assert check.lost == check.gained == discordant


def test_the_worst_check_is_named_first_and_an_open_one_explained(tmp_path: Path) -> None:
    baseline = folder(tmp_path / "a")
    failed = gate(RECIPE, baseline, folder(tmp_path / "b", rise=0.5))
    assert failed.reasons == (
        "failed: perplexity 20.09 -> 30.13: a change of +50%, 95% interval +50% to +50%, "
        "+10% allowed; 50 blocks",
        "passed: cloze accuracy 50.00% -> 50.00%: a change of +0.00 points, 95% interval "
        "-0.19 points to +0.19 points, -2.00 points allowed; 2,000 examples, 0 lost, 0 gained, "
        "McNemar p = 1",
    )
    stopped = gate(RECIPE, baseline, folder(tmp_path / "c", wrong=1030))
    assert stopped.outcome == "NOT PROVEN"
    assert stopped.reasons[0].startswith(
        "NOT PROVEN: stopped, because Gate.on_inconclusive is fail"
    )
    assert stopped.reasons[1].startswith("not proven: cloze accuracy 50.00% -> 48.50%")
    open_ = gate(FORGIVING, baseline, tmp_path / "c")
    assert open_.outcome == "NOT PROVEN, passed by the recipe"
    assert open_.reasons[0].startswith("NOT PROVEN: passed without proof, because")


def test_a_baseline_within_the_margin_is_owned_to(tmp_path: Path) -> None:
    result = gate(RECIPE, folder(tmp_path / "a", wrong=1970), folder(tmp_path / "b", wrong=2000))
    assert any("meaningless: even" in reason for reason in result.reasons)


def test_an_untrained_model_does_not_pass_against_another(tmp_path: Path) -> None:
    """0 % of the last words right in both, and no text."""
    only: dict[str, Any] = {"wrong": 2000, "text": False}
    folders = [folder(tmp_path / name, **only) for name in "ab"]
    result = gate(RECIPE, *folders, tmp_path / "verdict.json")
    (check,) = result.checks
    assert check.verdict == "pass" and check.is_meaningless
    assert (result.verdict, result.passed) == ("inconclusive", False)
    assert result.reasons[0].startswith("NOT PROVEN: stopped, because Gate.on_inconclusive is fail")
    assert "Gate.cloze_measure=word_perplexity" in result.reasons[0]
    written = json.loads((tmp_path / "verdict.json").read_text())
    assert (written["verdict"], written["passed"]) == ("inconclusive", False)
    forgiven = gate(FORGIVING, *folders)
    assert (forgiven.verdict, forgiven.passed) == ("inconclusive", True)
    assert gate(BY_WORDS, *folders).verdict == "pass"


@pytest.mark.parametrize(
    ("vocab_size", "verdict"),
    [
        (50_257, "pass"),
        (21, "pass"),
        (20, "inconclusive"),
        (None, "pass"),
    ],  # the baseline's perplexity is 20.09
)
def test_a_perplexity_no_better_than_a_uniform_guess_proves_nothing(
    tmp_path: Path, vocab_size: int | None, verdict: str
) -> None:
    folders = [folder(tmp_path / name, wrong=2000, vocab_size=vocab_size) for name in "ab"]
    result = gate(RECIPE, *folders)
    assert [check.verdict for check in result.checks] == ["pass", "pass"]
    assert result.verdict == verdict
    chance = {check.measure: check.chance for check in result.checks}
    assert chance == {"cloze accuracy": 0.0, "perplexity": vocab_size and pytest.approx(vocab_size)}


def test_a_word_is_as_hard_to_guess_as_all_its_tokens(tmp_path: Path) -> None:
    folders = [folder(tmp_path / name, vocab_size=100, text=False) for name in "ab"]
    for path in folders:  # every second word has three tokens
        examples = [json.loads(line) for line in (path / "examples.jsonl").open()]
        rows = [row | {"label_tokens": 1 + 2 * (i % 2)} for i, row in enumerate(examples)]
        (path / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (check,) = gate(BY_WORDS, *folders).checks
    assert check.chance == pytest.approx(100**2)


def test_choices_at_random_prove_nothing(tmp_path: Path) -> None:
    """Four choices, 26 % right, and a margin of one point."""
    row = {"log_likelihoods": [0.0] * 4}
    rows = [row | {"correct": i % 100 < 26} for i in range(1000)]
    (measure,) = [m for m in TASKS["multiple_choice"].measures if m.key == "acc"]
    units = Units(tmp_path, {}, rows)
    check = measure.compare("acc", units, units, 0.01, 0.95)
    assert check.verdict == "pass" and check.is_meaningless
    assert not measure.compare("acc", units, units, 0.009, 0.95).is_meaningless


def test_a_small_model_is_judged_by_its_perplexity(tmp_path: Path) -> None:
    baseline = folder(tmp_path / "a", wrong=2000)
    assert gate(RECIPE, baseline, folder(tmp_path / "b", wrong=2000)).verdict == "pass"
    worse = gate(RECIPE, baseline, folder(tmp_path / "c", wrong=2000, rise=0.11))
    assert worse.verdict == "fail"


def add_documents(path: Path, n: int) -> None:
    rows = [json.loads(line) for line in (path / "examples.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "document": i * n // len(rows)}) for i, row in enumerate(rows)]
    (path / "examples.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("n", "says", "method"),
    [
        (1, "2,000 examples of 1 document, too few to", "interval of 20 stretches of documents"),
        (3, "2,000 examples of 3 documents, too few to", "interval of 21 stretches of documents"),
        (20, "2,000 examples of 20 documents, 0 lost", "cluster-robust interval of 20 documents"),
        (2000, "2,000 examples, 0 lost", "Tango's score interval"),
    ],
)
def test_a_verdict_says_of_how_many_documents_the_units_are(
    tmp_path: Path, n: int, says: str, method: str
) -> None:
    folders = [folder(tmp_path / name, text=False) for name in "ab"]
    for path in folders:
        add_documents(path, n)
    (check,) = (result := gate(RECIPE, *folders)).checks
    assert says in result.reasons[-1] and method in check.method
    assert check.documents == (None if n == 2000 else n)


@pytest.mark.parametrize(
    ("documents", "lost", "verdict"),
    [
        (1, range(0, 2000, 20), "pass"),
        (1, range(700, 800), "inconclusive"),
        (4, range(700, 800), "inconclusive"),
        (2000, range(700, 800), "pass"),
    ],
)
def test_examples_of_few_documents_are_not_taken_as_independent(
    documents: int, lost: range, verdict: str, tmp_path: Path
) -> None:
    """5 % fewer are right: all over the text, or in one chapter of it."""
    folders = [folder(tmp_path / name, text=False) for name in "ab"]
    rows = [{"correct": i not in lost} for i in range(2000)]
    lines = [json.dumps(row | {"tokens": 1, "loss": 1.0}) + "\n" for row in rows]
    (folders[1] / "examples.jsonl").write_text("".join(lines))
    lines = [json.dumps(row | {"correct": True}) + "\n" for row in map(json.loads, lines)]
    (folders[0] / "examples.jsonl").write_text("".join(lines))
    for path in folders:
        add_documents(path, documents)
    recipe = Recipe(Gate=GateSettings(max_accuracy_drop=0.065))
    (check,) = gate(recipe, *folders).checks
    assert (check.verdict, check.change) == (verdict, -0.05)


@pytest.mark.parametrize(
    ("candidate", "verdict"),
    [
        ({}, "pass"),
        ({"worse": 0.05}, "pass"),  # 5 %
        ({"worse": 0.08, "noise": 0.8}, "inconclusive"),  # 8 %, interval to 12 %
        ({"worse": 0.1}, "fail"),  # 10.5 %
        ({"worse": 0.2, "noise": 0.8}, "fail"),
    ],
)
def test_a_model_that_gets_no_word_right_is_judged_by_how_likely_they_are(
    tmp_path: Path, candidate: dict[str, Any], verdict: str
) -> None:
    only: dict[str, Any] = {"wrong": 2000, "text": False}
    baseline = folder(tmp_path / "a", **only)
    result = gate(BY_WORDS, baseline, folder(tmp_path / "b", **only, **candidate))
    (check,) = result.checks
    assert (check.verdict, check.n) == (verdict, 2000)
    assert check.baseline == pytest.approx(np.exp(-WORDS.mean()))
    assert check.change == pytest.approx(np.expm1(candidate.get("worse", 0.0)), abs=1e-9)
    assert "; 2,000 words" in result.reasons[-1] and "+10% allowed" in result.reasons[-1]


def test_the_words_of_an_evaluation_that_has_none_are_missed_only_where_they_count(
    tmp_path: Path,
) -> None:
    folders = [folder(tmp_path / name) for name in "ab"]
    lines = "".join('{"correct": true}\n' for _ in range(2000))
    (folders[1] / "examples.jsonl").write_text(lines)
    assert gate(RECIPE, *folders).checks
    with raises(Code.MALFORMED, folders[1] / "examples.jsonl"):
        gate(BY_WORDS, *folders)


@pytest.mark.parametrize("measure", ["cloze", "text"])
def test_one_measure_alone_decides(tmp_path: Path, measure: str) -> None:
    only: dict[str, Any] = {"cloze": measure == "cloze", "text": measure == "text"}
    result = gate(RECIPE, folder(tmp_path / "a", **only), folder(tmp_path / "b", **only))
    assert result.verdict == "pass"
    assert len(result.checks) == 1


def test_the_artifact_says_what_was_compared_and_how(tmp_path: Path) -> None:
    output = tmp_path / "out" / "gate.json"
    baseline, candidate = folder(tmp_path / "a"), folder(tmp_path / "b", wrong=1030)
    result = gate(RECIPE, baseline, candidate, output)
    written = json.loads(output.read_text())
    assert (written["verdict"], written["passed"]) == ("inconclusive", False)
    assert written["reasons"] == list(result.reasons)
    assert written["settings"]["confidence"] == 0.95
    accuracy = next(c for c in written["checks"] if c["measure"] == "cloze accuracy")
    assert (accuracy["n"], accuracy["lost"], accuracy["gained"]) == (2000, 30, 0)
    assert accuracy["p_value"] == pytest.approx(2**-29)
    assert accuracy["low"] < accuracy["change"] == -0.015 < accuracy["high"]
    assert accuracy["limit"] == -0.02
    for side in ("baseline", "candidate"):
        assert written[side]["digests"] == METRICS["digests"]
        assert written[side]["protocol"] == METRICS["protocol"]


def test_the_table_shows_every_check(tmp_path: Path) -> None:
    result = gate(RECIPE, folder(tmp_path / "a"), folder(tmp_path / "b", wrong=1030))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(verdict_table(result))
    text = captured.get()
    for shown in ("cloze accuracy", "perplexity", "48.50%", "-1.50 points", "30 lost", "50 blocks"):
        assert shown in text


bounds = st.floats(-1, 1)


@given(bounds, bounds, bounds, bounds)
def test_a_wider_margin_never_turns_the_verdict_worse(
    a: float, b: float, margin: float, wider: float
) -> None:
    best, worst = sorted((a, b))
    margin, wider = sorted((margin, wider))
    narrow_verdict, wide_verdict = judge(best, worst, margin), judge(best, worst, wider)
    assert SEVERITY.index(wide_verdict) <= SEVERITY.index(narrow_verdict)


@pytest.mark.parametrize("what", ["cloze", "text", "tokenizer"])
def test_evaluations_on_other_data_are_not_compared(tmp_path: Path, what: str) -> None:
    candidate = folder(tmp_path / "b", digests={what: "f" * 64})
    with raises(Code.MISMATCH, what, 12 * "f"):
        gate(RECIPE, folder(tmp_path / "a"), candidate)


def test_another_protocol_is_not_compared(tmp_path: Path) -> None:
    candidate = folder(tmp_path / "b", protocol={"overlapping_eval": 32})
    with raises(Code.MISMATCH, "protocol"):
        gate(RECIPE, folder(tmp_path / "a"), candidate)


def test_no_evaluation_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    good = folder(tmp_path / "a")
    with raises(Code.WRONG_KIND, f"{tmp_path}: ", "metrics.json"):
        gate(RECIPE, good, tmp_path)
    for i, content in enumerate(["{", "[]", '{"cloze": null}', "[" * 5000]):
        broken = tmp_path / str(i)
        broken.mkdir()
        (broken / "metrics.json").write_text(content)
        with raises(Code.MALFORMED, broken / "metrics.json"):
            gate(RECIPE, good, broken)


@pytest.mark.parametrize(
    ("name", "content", "code", "text"),
    [
        ("examples.jsonl", None, Code.INCOMPLETE, ""),
        (
            "examples.jsonl",
            '{"correct": true}\n',
            Code.INCOMPLETE,
            "1 lines, metrics.json counts 2000",
        ),
        ("examples.jsonl", '{"corr', Code.MALFORMED, ""),
        ("blocks.jsonl", None, Code.INCOMPLETE, ""),
        ("blocks.jsonl", '{"tokens": 100}\n' * 50, Code.MALFORMED, ""),
        ("blocks.jsonl", '{"tokens": 100, "loss": "x"}\n' * 50, Code.MALFORMED, ""),
    ],
)
def test_units_that_are_absent_or_broken_are_refused(
    tmp_path: Path, name: str, content: str | None, code: Code, text: str
) -> None:
    good, broken = folder(tmp_path / "a"), folder(tmp_path / "b")
    (broken / name).unlink()
    if content is not None:
        (broken / name).write_text(content)
    with raises(code, broken / name, text):
        gate(RECIPE, good, broken)


@pytest.mark.parametrize(
    ("wrong", "verdict", "status"),
    [(1000, "pass", 0), (1030, "inconclusive", 1), (1080, "fail", 1)],
)
def test_the_verb_ends_with_the_verdict(
    tmp_path: Path, wrong: int, verdict: str, status: int
) -> None:
    folders = [str(folder(tmp_path / "a")), str(folder(tmp_path / "b", wrong=wrong))]
    output = tmp_path / "gate.json"
    done = CliRunner().invoke(app, ["gate", *folders, "--output", str(output)])
    assert done.exit_code == status, done.output
    assert f"verdict: {verdict}" in done.stdout
    assert ("NOT PROVEN: stopped" in done.stdout) == (verdict == "inconclusive")
    assert json.loads(output.read_text())["verdict"] == verdict
    wide = ["-o", "Gate.max_accuracy_drop=0.2"]
    assert (
        CliRunner().invoke(app, ["gate", *folders, *wide, "--output", str(output)]).exit_code == 0
    )


@pytest.mark.parametrize("wrong", [1030, 1042])
def test_an_inconclusive_accuracy_says_how_many_examples_decide(tmp_path: Path, wrong: int) -> None:
    (check, _) = gate(RECIPE, folder(tmp_path / "a"), folder(tmp_path / "b", wrong=wrong)).checks
    assert check.verdict == "inconclusive" and check.needed is not None and check.needed > 2000
    verdicts = []
    for share in (0.8, 1.2):  # scale the number of examples, with the same share of losses
        n = round(share * check.needed)
        lost = round((wrong - 1000) / 2000 * n)
        interval = accuracy_difference(lost, 0, n, 0.95)
        verdicts.append(judge(-interval.high, -interval.low, 0.02))
    assert verdicts == ["inconclusive", "pass" if wrong == 1030 else "fail"]


def test_an_inconclusive_perplexity_says_how_many_blocks_decide(tmp_path: Path) -> None:
    result = gate(RECIPE, folder(tmp_path / "a"), folder(tmp_path / "b", rise=0.09, noise=0.2))
    (check,) = (c for c in result.checks if c.measure == "perplexity")
    assert check.verdict == "inconclusive" and check.needed is not None
    assert f"about {float(f'{check.needed:.2g}'):,.0f} blocks would decide it" in result.reasons[1]
    verdicts = []
    for share in (0.8, 1.2):
        half = (
            (np.log1p(check.high) - np.log1p(check.low)) / 2 * np.sqrt(50 / (share * check.needed))
        )
        ends = np.expm1(np.log1p(check.change) + np.array([-half, half]))
        verdicts.append(judge(*ends.tolist(), 0.1))
    assert verdicts == ["inconclusive", "pass"]


def test_the_detectable_change_is_seen_in_four_of_five_cases() -> None:
    """Simulates text blocks and examples: the power is 0.8."""
    random = np.random.default_rng(0)
    n, spread, trials = 400, 0.3, 4000
    tokens = np.ones(n)
    noise = random.normal(0, spread, n)
    detectable = unit_totals(noise, tokens).interval(0.95).detectable(0.95)
    detectable *= spread / noise.std()
    seen = [
        unit_totals(random.normal(detectable, spread, n), tokens).interval(0.95).low > 0
        for _ in range(trials)
    ]
    assert np.mean(seen) == pytest.approx(0.8, abs=0.03)
    flips = accuracy_difference(60, 60, 2000, 0.95).detectable(0.95)
    lost, gained = 0.03 + flips / 2, 0.03 - flips / 2
    counts = random.multinomial(2000, (lost, gained, 1 - lost - gained), trials // 4)
    seen = [accuracy_difference(int(a), int(b), 2000, 0.95).high < 0 for a, b, _ in counts]
    assert np.mean(seen) == pytest.approx(0.8, abs=0.04)


def mark(folder: Path, contaminated: int) -> Path:
    """Mark the first examples of an evaluation as contaminated."""
    path = folder / "examples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    marked = [row | {"contaminated": i < contaminated} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in marked))
    metrics = json.loads((folder / "metrics.json").read_text())
    found = {"contaminated": contaminated, "units": len(rows), "too_short": 0, "by_chance": 0.01}
    (folder / "metrics.json").write_text(json.dumps(metrics | {"contamination": {"cloze": found}}))
    return folder


def test_contaminated_examples_are_judged_with_and_without(tmp_path: Path) -> None:
    # The candidate loses 120 of the 1,500 clean examples, and none of the contaminated ones.
    baseline = mark(folder(tmp_path / "a", wrong=0, text=False), 500)
    candidate = mark(folder(tmp_path / "b", wrong=33, first_wrong=500, text=False), 500)
    lenient = Recipe(Gate=GateSettings(max_accuracy_drop=0.025))
    result = gate(lenient, baseline, candidate, tmp_path / "gate.json")
    whole, clean = sorted(result.checks, key=lambda check: -check.n)
    assert (whole.n, whole.verdict) == (2000, "pass")
    assert (clean.measure, clean.n) == ("cloze accuracy, uncontaminated", 1500)
    assert clean.change == pytest.approx(-33 / 1500)
    assert result.verdict == clean.verdict == "inconclusive" and not result.passed
    said = "cloze: not held out: the training text contains 500 of its 2,000 units"
    assert any(note.startswith(said) for note in result.notes)
    written = json.loads((tmp_path / "gate.json").read_text())
    assert written["candidate"]["contamination"]["cloze"]["contaminated"] == 500
    assert written["notes"][0].startswith(said)

    for path in (baseline, candidate):
        mark(path, 1999)
    with raises(Code.TOO_LITTLE_DATA, "1,999 of 2,000"):
        gate(lenient, baseline, candidate)
