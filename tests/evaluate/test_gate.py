import copy
import json
from pathlib import Path
from typing import Any

import pytest

from lathe.errors import UserError
from lathe.evaluate.gate import gate
from lathe.settings import GateSettings, Recipe

RECIPE = Recipe(Gate=GateSettings(max_accuracy_drop=0.02, max_perplexity_increase=0.10))
METRICS: dict[str, Any] = {
    "model": {"stage": "pretrain", "n_params": 1, "bytes": 4, "quantized": False},
    "cloze": {"accuracy": 0.44},
    "text": {"perplexity": 20.0},
    "protocol": {"max_seq_len": 128, "overlapping_eval": 64},
    "sources": {"cloze": "cloze.jsonl", "text": "heldout.txt"},
    "digests": {"cloze": "c" * 64, "text": "t" * 64, "tokenizer": "k" * 64, "model": "m" * 64},
    "seconds": 1.0,
}


def folder(root: Path, name: str, **changes: dict[str, Any]) -> Path:
    metrics = copy.deepcopy(METRICS)
    for group, values in changes.items():
        metrics[group] = {**metrics[group], **values} if values else None
    (root / name).mkdir()
    (root / name / "metrics.json").write_text(json.dumps(metrics))
    return root / name


@pytest.mark.parametrize(
    ("accuracy", "perplexity", "passed"),
    [
        (0.44, 20.0, True),
        (0.60, 12.0, True),
        (0.421, 21.9, True),
        (0.419, 20.0, False),
        (0.44, 22.1, False),
        (0.30, 40.0, False),
    ],
)
def test_tolerances(tmp_path: Path, accuracy: float, perplexity: float, passed: bool) -> None:
    candidate = folder(tmp_path, "b", cloze={"accuracy": accuracy}, text={"perplexity": perplexity})
    result = gate(RECIPE, folder(tmp_path, "a"), candidate)
    assert result.passed is passed
    assert len(result.reasons) == 2


def test_the_failed_check_is_named_first(tmp_path: Path) -> None:
    candidate = folder(tmp_path, "b", text={"perplexity": 30.0})
    result = gate(RECIPE, folder(tmp_path, "a"), candidate)
    assert result.reasons == (
        "failed: perplexity 20.00 -> 30.00: a change of +50.0%, +10.0% allowed",
        "passed: cloze accuracy 44.00% -> 44.00%: a change of +0.00 points, -2.00 allowed",
    )


def test_a_baseline_without_a_hit_is_owned_to(tmp_path: Path) -> None:
    none: dict[str, Any] = {"cloze": {"accuracy": 0.0}}
    result = gate(RECIPE, folder(tmp_path, "a", **none), folder(tmp_path, "b", **none))
    assert any("proves nothing" in reason for reason in result.reasons)


def test_perplexity_alone_decides_where_there_is_no_cloze_set(tmp_path: Path) -> None:
    without: dict[str, Any] = {"cloze": {}, "digests": {"cloze": None}}
    result = gate(RECIPE, folder(tmp_path, "a", **without), folder(tmp_path, "b", **without))
    assert result.passed
    assert len(result.reasons) == 1


@pytest.mark.parametrize("what", ["cloze", "text", "tokenizer"])
def test_evaluations_on_other_data_are_not_compared(tmp_path: Path, what: str) -> None:
    candidate = folder(tmp_path, "b", digests={what: "f" * 64})
    with pytest.raises(UserError, match=f"differ in {what}"):
        gate(RECIPE, folder(tmp_path, "a"), candidate)


def test_another_protocol_is_not_compared(tmp_path: Path) -> None:
    candidate = folder(tmp_path, "b", protocol={"overlapping_eval": 32})
    with pytest.raises(UserError, match="differ in protocol"):
        gate(RECIPE, folder(tmp_path, "a"), candidate)


def test_no_evaluation_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    good = folder(tmp_path, "a")
    with pytest.raises(UserError, match=r"no metrics\.json"):
        gate(RECIPE, good, tmp_path)
    for i, content in enumerate(["{", "[]", '{"cloze": null}']):
        broken = tmp_path / str(i)
        broken.mkdir()
        (broken / "metrics.json").write_text(content)
        with pytest.raises(UserError, match="broken"):
            gate(RECIPE, good, broken)
