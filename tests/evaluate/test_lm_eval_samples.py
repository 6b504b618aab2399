"""The gate on logged samples of lm-evaluation-harness."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_rel
from typer.testing import CliRunner

from lathe.cli import app
from lathe.evaluate.gate import gate
from lathe.evaluate.intervals import accuracy_difference, cluster_totals, mcnemar
from lathe_base.config.settings import GateSettings, Recipe
from lathe_base.errors import Code, UserError
from tests.support.errors import raises
from tests.support.lm_eval import DATE, questions, sample, sha, write_run

RNG = np.random.default_rng(0)
THEIRS = RNG.random(1000) < 0.6
OURS = THEIRS ^ (RNG.random(1000) < 0.03)
LOST, GAINED = int((THEIRS & ~OURS).sum()), int((~THEIRS & OURS).sum())
PLAIN = Recipe(Gate=GateSettings(max_task_accuracy_drop=0.03))


def both(tmp_path: Path, theirs: Any, ours: Any, results: Any = None) -> tuple[Path, Path]:
    return write_run(tmp_path / "a", theirs, results), write_run(tmp_path / "b", ours, results)


def test_accuracies_are_compared_pair_by_pair_in_whatever_order(tmp_path: Path) -> None:
    rows = questions(list(OURS))
    folders = both(tmp_path, {"arc_easy": questions(list(THEIRS))}, {"arc_easy": rows[::-1]})
    result = gate(PLAIN, *folders)
    (check,) = result.checks
    interval = accuracy_difference(LOST, GAINED, 1000, 0.95)
    assert (check.measure, check.lost, check.gained) == ("arc_easy acc", LOST, GAINED)
    assert (check.low, check.high) == (interval.low, interval.high)
    assert check.p_value == mcnemar(LOST, GAINED)
    (flips,) = result.shown
    assert flips.measure == "flips of arc_easy acc"
    assert flips.value == (LOST + GAINED) / 1000 and flips.low < flips.value < flips.high


def test_the_command_takes_folders_of_several_tasks_and_single_files(tmp_path: Path) -> None:
    theirs = {"arc_easy": questions(list(THEIRS)), "boolq": questions(list(THEIRS[:500]))}
    ours = {"arc_easy": questions(list(OURS)), "boolq": questions(list(OURS[:500]))}
    folders = both(tmp_path, theirs, ours, {"model_name": "org/model", "results": {}})
    output = str(tmp_path / "gate.json")
    options = ["--output", output, "-o", "Gate.margins={boolq acc: 0.1, arc*: 0.03}"]
    done = CliRunner().invoke(app, ["gate", *map(str, folders), *options])
    assert done.exit_code == 0, done.output
    assert "flips of boolq acc" in done.stdout
    written = json.loads(Path(output).read_text())
    limits = {check["measure"]: check["limit"] for check in written["checks"]}
    assert limits == {"arc_easy acc": -0.03, "boolq acc": -0.1}
    assert written["baseline"]["model"] == "org/model"
    files = [next(folder.glob("samples_boolq*")) for folder in folders]
    assert written["candidate"]["digests"]["boolq"] != written["baseline"]["digests"]["boolq"]
    assert [c.measure for c in gate(PLAIN, *files).checks] == ["boolq acc"]


def test_a_continuous_metric_is_a_paired_t_test(tmp_path: Path) -> None:
    first = RNG.beta(2, 2, 300)
    second = np.clip(first + RNG.normal(-0.01, 0.05, 300), 0, 1)
    runs = [
        {"rouge": [sample(i, {"rougeL": float(x)}) for i, x in enumerate(values)]}
        for values in (first, second)
    ]
    results = {"higher_is_better": {"rouge": {"rougeL": True}}}
    (check,) = gate(PLAIN, *both(tmp_path, *runs, results)).checks
    expected = ttest_rel(second, first)
    interval = expected.confidence_interval(0.95)
    assert check.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert (check.low, check.high) == pytest.approx((interval.low, interval.high), abs=1e-12)
    assert check.limit == -0.03 and check.test == "paired t"


def test_a_metric_of_which_less_is_better_fails_when_it_rises(tmp_path: Path) -> None:
    runs = [
        {"t": [sample(i, {"wer": 0.2 + rise + i % 7 / 50}) for i in range(90)]} for rise in (0, 0.2)
    ]
    results = {"higher_is_better": {"t": {"wer": False}}}
    (check,) = gate(PLAIN, *both(tmp_path, *runs, results)).checks
    assert (check.verdict, check.limit) == ("fail", 0.03)
    (back,) = gate(PLAIN, tmp_path / "b", tmp_path / "a").checks
    assert back.verdict == "pass"


def test_perplexities_are_ratios(tmp_path: Path) -> None:
    """`perplexity` logs log-likelihoods per document, `word_perplexity` also word counts."""
    losses = RNG.normal(3.0, 0.3, 200)
    runs = []
    for rise in (0.0, np.log(1.05)):
        nats = losses + rise + RNG.normal(0, 0.01, 200)
        values = [
            {"perplexity": -float(x), "word_perplexity": [-50 * float(x), 50 + i % 3]}
            for i, x in enumerate(nats)
        ]
        runs.append({"wiki": [sample(i, v) for i, v in enumerate(values)]})
    results = {"results": {"wiki": {"perplexity,none": None}}}
    checks = gate(Recipe(), *both(tmp_path, *runs, results)).checks
    assert {check.measure for check in checks} == {"wiki perplexity", "wiki word_perplexity"}
    for check in checks:
        assert check.verdict == "pass" and check.change == pytest.approx(0.05, abs=0.003)
        assert check.limit == 0.1


def test_each_filter_is_a_measure_of_its_own(tmp_path: Path) -> None:
    runs = []
    for right in (THEIRS, OURS):
        rows = questions(list(right), "exact_match")
        loose = [{**row, "filter": "flexible-extract", "exact_match": 1.0} for row in rows]
        strict = [{**row, "filter": "strict-match"} for row in rows]
        runs.append({"gsm8k": strict + loose})
    checks = gate(PLAIN, *both(tmp_path, *runs)).checks
    lost = {check.measure: check.lost for check in checks}
    assert lost == {
        "gsm8k exact_match (strict-match)": LOST,
        "gsm8k exact_match (flexible-extract)": 0,
    }


def test_questions_about_one_article_are_not_independent_examples(tmp_path: Path) -> None:
    folders = both(tmp_path, {"qa": questions(list(THEIRS))}, {"qa": questions(list(OURS))})
    settings = GateSettings(max_task_accuracy_drop=0.03, cluster_by="title")
    (check,) = gate(Recipe(Gate=settings), *folders).checks
    articles = np.arange(1000) % 20
    robust = cluster_totals(OURS * 1.0 - THEIRS, np.ones(1000), articles).interval(0.95)
    score = accuracy_difference(LOST, GAINED, 1000, 0.95)
    assert check.low == min(robust.low, score.low) and check.high == max(robust.high, score.high)
    assert "20 documents" in check.method and check.test == "t-test by document"


def test_a_metric_that_is_not_a_mean_over_documents_is_named_and_skipped(tmp_path: Path) -> None:
    rows = [
        sample(i, {"acc": float(hit), "mcc": [0, 1], "bleu": 0.5, "own": 1.5})
        for i, hit in enumerate(THEIRS)
    ]
    results = {
        "results": {"t": {"acc,none": float(THEIRS.mean()), "bleu,none": 31.4}},
        "higher_is_better": {"t": {"bleu": True, "acc": True}},
    }
    result = gate(PLAIN, *both(tmp_path, {"t": rows}, {"t": rows}, results))
    assert [check.measure for check in result.checks] == ["t acc"]
    mcc, bleu, own = result.notes
    assert mcc.startswith("t mcc is skipped: it is not one number")
    assert "the run's 31.4 is not a mean over documents" in bleu
    assert "t own is skipped: no results_*.json says" in own


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rows: rows[:-2], "doc_id 8, 9"),
        (
            lambda rows: [{**r, "doc_hash": sha("x")} for r in rows],
            "different document",
        ),
        (
            lambda rows: [{**r, "prompt_hash": sha(1)} for r in rows],
            "doc_id 0 has a different prompt",
        ),
        (
            lambda rows: [{**r, "target_hash": sha(1)} for r in rows],
            "doc_id 0 has a different target",
        ),
        (lambda rows: [{**r, "filter": "strict"} for r in rows], "filters: none against strict"),
        (lambda rows: questions([True] * 10, "em"), "metrics: acc against em"),
    ],
)
def test_unpairable_samples_are_named(tmp_path: Path, change: Any, text: str) -> None:
    rows = questions([True] * 10)
    with raises(Code.MISMATCH, text):
        gate(PLAIN, *both(tmp_path, {"t": rows}, {"t": change(rows)}))


def test_other_tasks_versions_and_programs_are_not_compared(tmp_path: Path) -> None:
    rows = questions([True] * 10)
    a = write_run(tmp_path / "a", {"t": rows}, {"versions": {"t": 1}})
    with raises(Code.MISMATCH, "tasks: t against u"):
        gate(PLAIN, a, write_run(tmp_path / "b", {"u": rows}))
    with raises(Code.MISMATCH, "version: 1 against 2"):
        gate(PLAIN, a, write_run(tmp_path / "c", {"t": rows}, {"versions": {"t": 2}}))
    own = tmp_path / "own"
    own.mkdir()
    (own / "metrics.json").write_text("{}")
    with raises(Code.MISMATCH, a, own, "lm_eval"):
        gate(PLAIN, a, own)
    write_run(tmp_path / "all" / "one", {"t": rows})
    write_run(tmp_path / "all" / "two", {"t": rows})
    with raises(Code.AMBIGUOUS, tmp_path / "all", "one, two"):
        gate(PLAIN, a, tmp_path / "all")


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        ("", Code.TOO_LITTLE_DATA, ""),
        ("{", Code.MALFORMED, "jsonl:1: "),
        ("[]", Code.MALFORMED, "jsonl:1: "),
        ('{"doc": 1}', Code.MALFORMED, "doc_id"),
        ('{"doc_id": 1, "filter": 3}', Code.MALFORMED, "filter"),
        ('{"doc_id": 1}\n{"doc_id": 1}', Code.DUPLICATE, "jsonl:2: duplicate doc_id 1"),
        ('{"doc_id": 1, "acc": NaN}', Code.NOT_FINITE, "NaN"),
        ('{"doc_id": 1, "acc": "yes"}', Code.MISMATCH, "acc"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: str, code: Code, text: str) -> None:
    path = tmp_path / f"samples_t_{DATE}.jsonl"
    path.write_text(content)
    with raises(code, path, text):
        gate(PLAIN, path, path)


def test_a_run_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    results = {"n-samples": {"t": {"original": 20, "effective": 20}}}
    folders = both(tmp_path, {"t": questions([True] * 10)}, {"t": questions([True] * 10)}, results)
    with raises(Code.INCOMPLETE, "10 documents", "20"):
        gate(PLAIN, *folders)


def test_files_of_early_versions_are_paired_by_their_contents(tmp_path: Path) -> None:
    """lm-eval 0.4.0 wrote no hashes, filters or lists of metrics."""
    later = ("doc_hash", "prompt_hash", "target_hash", "filter", "metrics")
    rows = [{k: v for k, v in row.items() if k not in later} for row in questions([True] * 30)]
    assert gate(PLAIN, *both(tmp_path, {"t": rows}, {"t": rows})).checks[0].n == 30
    changed = [{**row, "doc": {"question": "another"}} for row in rows]
    with raises(Code.MISMATCH, "doc_id 0", "document"):
        gate(PLAIN, tmp_path / "a", write_run(tmp_path / "c", {"t": changed}))


def test_margins_for_unknown_measures_are_rejected(tmp_path: Path) -> None:
    folders = both(tmp_path, {"t": questions([True] * 30)}, {"t": questions([True] * 30)})
    wrong = Recipe(Gate=GateSettings(margins={"hellaswag*": 0.01}))
    with raises(Code.UNKNOWN_NAME, "'hellaswag*'", "t acc"):
        gate(wrong, *folders)
    nothing = Recipe(Gate=GateSettings(margins={"*": None}))
    with raises(Code.MISSING_OPTION, "t acc"):
        gate(nothing, *folders)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KEYS = ["doc_id", "doc", "target", "filter", "metrics", "doc_hash", "acc", "perplexity"]
GROUPS = ["results", "versions", "n-samples", "higher_is_better"]


@given(
    st.lists(st.dictionaries(st.sampled_from(KEYS), JSON), min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(GROUPS), JSON | st.dictionaries(st.just("t"), JSON)),
)
@settings(max_examples=50, deadline=None)
def test_any_lines_are_compared_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], results: dict[str, Any]
) -> None:
    numbered = [{"doc_id": i, "acc": 1.0} | row for i, row in enumerate(rows)]
    folder = write_run(tmp_path_factory.mktemp("run"), {"t": numbered}, results)
    with contextlib.suppress(UserError):
        assert gate(PLAIN, folder, folder).checks
