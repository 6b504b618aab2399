"""The search for the best model that meets a target."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lathe.model.config import read_config
from lathe.search.compress import METADATA, _Search, compress
from lathe.search.design import Design, Goal, Proposal, parse_goal
from lathe.search.result import Trial, conclude, require_met
from lathe.train.pretrain import pretrain
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import GateSettings, Recipe
from lathe_base.errors import Code, StageError
from tests.support.errors import raises
from tests.support.evaluation_folder import folder as evaluation_folder
from tests.support.small_run import SMALL

SHORT = (
    *SMALL, "Engine.max_steps=4", "Optimizer.lr.warmup_rate=0.0", "Export.prompts=2",
    "Sensitivity.eval_batches=1", "Sensitivity.calibration_batches=1",
    "Compress.Quantization.quantize_embedding=True",
)  # fmt: skip


@pytest.mark.parametrize(
    ("target", "budget"),
    [
        ("speed=0.4", "accuracy=-1"),
        ("latency", "accuracy=-1"),
        ("latency=fast", "accuracy=-1"),
        ("latency=1.5", "accuracy=-1"),
        ("latency=0.4", "loss=1"),
        ("latency=0.4", "accuracy=1"),
        ("latency=0.4", "perplexity=-0.1"),
        ("latency=0.4", "perplexity=nan"),
        ("latency=0.4", "perplexity=inf"),
        ("latency=0.4", "accuracy=nan"),
        ("latency=0.4", "accuracy=-inf"),
        ("latency=0.4", "accuracy=-101"),
        ("latency=nan", "accuracy=-1"),
        ("latency=inf", "accuracy=-1"),
        ("latency=-0.4", "accuracy=-1"),
        ("latency=0", "accuracy=-1"),
    ],
)
def test_goals_that_make_no_sense(target: str, budget: str) -> None:
    wrong = f"--budget {budget}" if target == "latency=0.4" else f"--target {target}"
    with raises(Code.INVALID_VALUE, wrong):
        parse_goal(target, budget)


def test_goals() -> None:
    assert parse_goal("latency=0.4", "accuracy=-0.5") == Goal("latency", 0.4, "accuracy", 0.005)
    assert parse_goal("bytes=.2", "perplexity=0.05") == Goal("bytes", 0.2, "perplexity", 0.05)


def test_paddle_is_refused_before_the_work(tmp_path: Path) -> None:
    recipe = load_recipe("tiny", ("Compress.engine=paddle",))
    goal = parse_goal("bytes=0.2", "perplexity=0.5")
    with raises(Code.UNSUPPORTED, "Compress.engine=torch"):
        compress(goal, (recipe, recipe, recipe), tmp_path, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_best_trial_has_the_best_quality_of_those_that_meet_the_target(tmp_path: Path) -> None:
    evaluation = evaluation_folder(tmp_path / "dense")
    goal = Goal("bytes", 0.2, "perplexity", 0.1)
    trials = [
        trial("large", perplexity=90.0, bytes=0.3),
        trial("good", perplexity=101.0, bytes=0.19),
        trial("bad", perplexity=103.0, bytes=0.1),
        trial("worst", perplexity=99.0, bytes=0.1, verdict="fail"),
        trial("unproven", perplexity=98.0, bytes=0.1, verdict="inconclusive"),
    ]
    found = conclude(goal, GateSettings(), evaluation, trials, tmp_path / "out")
    assert found.best is not None and found.best.name == "good"
    forgiving = GateSettings(on_inconclusive="pass")
    found = conclude(goal, forgiving, evaluation, trials, tmp_path / "forgiving")
    assert found.best is not None and found.best.name == "unproven"


def trial(name: str, perplexity: float, bytes: float, verdict: str = "pass") -> Trial:
    times = dict.fromkeys(("latency", "prefill", "parameters"), 0.5)
    return Trial(name, None, perplexity, bytes=bytes, verdict=verdict, **times)


def test_an_earlier_trial_is_judged_by_the_budget_of_this_search(tmp_path: Path) -> None:
    goal, recipe = Goal("bytes", 0.5, "perplexity", 0.05), Recipe()
    proposal = Proposal(Design((2,), (8,), {}), predicted=0.2, cost=0.1)
    folder = tmp_path / proposal.design.name
    for path, rise in ((tmp_path / "dense", 0.0), (folder, 0.1)):
        path.mkdir()
        evaluation_folder(path / "evaluation", rise=rise)
    known = trial(proposal.design.name, perplexity=1.0, bytes=0.2)
    (folder / METADATA).write_text(json.dumps(asdict(known)))
    unread: Any = None
    search = _Search(goal, *[recipe] * 3, unread, tmp_path, tmp_path, None, pytest.fail)
    assert (known.verdict, search.attempt(proposal).verdict) == ("pass", "fail")


@pytest.mark.slow
def test_a_family_with_shared_keys_is_searched_too(small_data: Path, tmp_path: Path) -> None:
    shape = (
        "Model.architecture=qwen2", "Model.hidden_size=64", "Model.num_key_value_heads=2",
        "Model.ffn_hidden_size=96", "Model.tie_word_embeddings=False",
    )  # fmt: skip
    recipe = load_recipe("tiny", (*SHORT, *shape))
    pretrain(recipe, small_data, tmp_path / "dense")
    goal = parse_goal("bytes=0.2", "perplexity=0.5")
    texts = (tmp_path / "dense", small_data, tmp_path / "out")
    best = require_met(compress(goal, (recipe, recipe, recipe), *texts))
    assert best.meets(goal) and best.design is not None and best.predicted is not None
    assert best.bytes == pytest.approx(best.predicted, rel=0.03)
    found = read_config(tmp_path / "out" / best.name / "quantized")
    assert found.n_kv_head == tuple(n for n in best.design.heads if n)
    page = (tmp_path / "out" / "compress.html").read_text()
    assert "mlp.gate_up_proj" in page


@pytest.mark.slow
def test_search_meets_the_target_and_resumes(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    recipe = load_recipe("tiny", SHORT)
    goal = parse_goal("bytes=0.2", "perplexity=0.5")
    texts = (small_dense, small_data, tmp_path / "out")
    found = compress(goal, (recipe, recipe, recipe), *texts)
    best = require_met(found)
    assert best.meets(goal) and best.design is not None and best.predicted is not None
    assert best.bytes == pytest.approx(best.predicted, rel=0.03)
    assert sum(best.design.channels) < 2 * 128 and set(best.design.formats.values()) == {
        "static_int8"
    }
    assert json.loads((tmp_path / "out" / "compress.json").read_text())["best"]["name"] == best.name
    page = (tmp_path / "out" / "compress.html").read_text()
    assert best.name in page and "data:image/svg+xml" in page and "mlp.c_proj" in page

    trained = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")}
    again = compress(goal, (recipe, recipe, recipe), *texts)
    assert again == found
    assert trained == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")}
    harder = parse_goal("bytes=0.01", "perplexity=0.5")
    with raises(Code.GATE, "bytes 0.01", kind=StageError):
        compress(harder, (recipe, recipe, recipe), *texts)
    other = load_recipe("tiny", (*SHORT, "Engine.max_steps=5"))
    with raises(Code.STATE_MISMATCH, texts[-1]):
        compress(goal, (recipe, other, recipe), *texts)
