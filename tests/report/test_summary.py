import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from lathe.evaluate.tasks import CLOZE
from lathe.model.checkpoint import load_checkpoint
from lathe.report.summary import (
    Candidate,
    Row,
    Score,
    _scaled,
    cells,
    columns,
    summarize,
    summary_table,
)
from lathe_base.errors import Code
from tests.support.errors import raises

Make = Callable[..., Candidate]


def test_rows_hold_what_the_folders_say(make_candidate: Make) -> None:
    dense, int8 = make_candidate("dense", mb=4), make_candidate("INT8", 42.0, 0.29, mb=1)
    rows = summarize([dense, int8], {"INT8": {"prefill_ms": 2.0, "decode_ms": 0.5}})
    assert rows[0].n_params == load_checkpoint(dense.model).model.config.n_params
    config = load_checkpoint(dense.model).model.config
    linears = 2 * sum(
        p.numel() for p in load_checkpoint(dense.model).model.parameters() if p.ndim == 2
    )
    linears -= 2 * config.n_positions * config.n_embd  # position embeddings are looked up
    attention = 4 * config.n_positions * config.head_dim * sum(config.n_head)
    assert rows[0].flops == linears + attention
    assert (rows[0].n_bytes, rows[1].n_bytes) == (4_000_000, 1_000_000)
    assert (rows[1].perplexity, rows[1].scores["perplexity"].stderr) == (42.0, 0.5)
    accuracy = rows[1].scores["accuracy"]
    assert (accuracy.value, accuracy.stderr) == (0.29, 0.01)
    assert (rows[0].prefill_ms, rows[1].decode_ms) == (None, 0.5)


def test_a_share_of_all_examples_has_an_interval() -> None:
    """Wilson's lower end for a share of 1 is n / (n + z^2)."""
    (measure,) = (m for m in CLOZE.measures if m.key == "accuracy")
    low, high = Score(measure, "", 1.0, 0.0, 200).interval
    assert (low, high) == (pytest.approx(200 / (200 + 1.959964**2)), 1.0)
    assert Score(measure, "", 0.5, 0.1).interval == pytest.approx((0.304, 0.696))


def test_cells_give_errors_and_ratios_to_the_first_row(make_candidate: Make) -> None:
    rows = summarize([make_candidate("dense", mb=4), make_candidate("INT8", 42.0, mb=1)])
    titles = [column.title for column in columns(rows)]
    assert titles == ["Parameters", "FLOPs per token", "File", "Perplexity", "Cloze accuracy"]
    dense, int8 = ([str(cell) for cell in row] for row in cells(rows))
    assert dense[2:] == ["4.00 MB", "40.00 ± 0.50", "30.0 % ± 1.0"]
    assert int8[2:] == ["1.00 MB 0.25x", "42.00 ± 0.50 1.05x", "30.0 % ± 1.0"]


def test_last_tokens_and_words_stand_beside_the_strict_accuracy(make_candidate: Make) -> None:
    dense, old = make_candidate("dense"), make_candidate("old")
    assert dense.evaluation is not None
    path = dense.evaluation / "metrics.json"
    metrics = json.loads(path.read_text())
    metrics["cloze"] |= {
        "last_token_accuracy": 0.4,
        "last_token_accuracy_stderr": 0.02,
        "target_perplexity": 2075.7,
        "target_perplexity_stderr": 365.4,
    }
    path.write_text(json.dumps(metrics))
    rows = summarize([dense, old])
    titles = [column.title for column in columns(rows)]
    assert titles[-3:] == ["Cloze accuracy", "Last-token accuracy", "Cloze word perplexity"]
    new, without = ([str(cell) for cell in row[-3:]] for row in cells(rows))
    assert new == ["30.0 % ± 1.0", "40.0 % ± 2.0", "2076 ± 365"]
    assert without == ["30.0 % ± 1.0", "-", "-"]


def test_figures_of_a_row_are_read_again(make_candidate: Make) -> None:
    (row,) = summarize([make_candidate("dense")], {"dense": {"prefill_ms": 2.0}})
    figures = {key: value for key, value in row.figures().items() if value is not None}
    assert figures["accuracy_stderr"] == 0.01
    assert Row.of_figures("dense", figures | {"unknown": 1.0}) == row


def test_a_model_alone_is_a_row(make_candidate: Make) -> None:
    model = make_candidate("dense").model
    (row,) = summarize([Candidate("dense", model)])
    assert row.n_bytes == (model / "model.safetensors").stat().st_size
    assert row.perplexity is None


def test_terminal_table_has_a_column_a_model(make_candidate: Make) -> None:
    rows = summarize([make_candidate("dense"), make_candidate("pruned")])
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary_table(rows))
    header = console.export_text().splitlines()[1]
    assert "dense" in header
    assert "pruned" in header


def test_missing_folders_are_named(make_candidate: Make, tmp_path: Path) -> None:
    dense = make_candidate("dense")
    with raises(Code.NOT_FOUND, tmp_path / "absent", "model.onnx"):
        summarize([Candidate("dense", dense.model, exported=tmp_path / "absent")])
    with raises(Code.WRONG_KIND, tmp_path, "metrics.json"):
        summarize([Candidate("dense", dense.model, tmp_path)])
    with raises(Code.MISSING_OPTION):
        summarize([])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (7, "7 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12_900_000, "12.9 MB"),
        (123e6, "123 MB"),
        (5e12, "5000 GB"),
    ],
)
def test_sizes_have_three_digits(value: float, shown: str) -> None:
    assert _scaled(value, (" B", " kB", " MB", " GB")) == shown
