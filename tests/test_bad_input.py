"""User errors: one message with a hint, status 2, and no partial output."""

import shutil
import sys
from pathlib import Path

import pytest

from lathe.cli import main
from tests.support.command_line import restoring_process_state
from tests.support.small_run import SMALL

SETTINGS = [part for value in SMALL for part in ("-o", value)]


def refused(
    arguments: list[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Run `lathe ...`, which must fail with a user error; returns the message."""
    monkeypatch.setattr(sys, "argv", ["lathe", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended, restoring_process_state():
        main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.count("error[") == 1 and "hint: " in message and "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("name", "text", "options", "expected"),
    [
        ("missing.txt", None, [], "missing.txt: no such file"),
        ("empty.txt", "\n \n", [], "empty.txt"),
        ("broken.jsonl", '{"text": "one"}\n{"text": "tw\n', [], "broken.jsonl:2"),
        ("other.jsonl", '{"body": "one"}\n', [], "text"),
        ("small.jsonl", '{"text": "one two"}\n' * 40, [], "fewer than one sample"),
        (
            "split.jsonl",
            '{"text": "one two"}\n',
            ["-o", "Data.Train.dataset.split=0,0,1"],
            "sample",
        ),
        ("any.txt", "words", ["-o", "Prepare.vocab_sise=9"], "did you mean Prepare.vocab_size"),
    ],
)
def test_corpus(
    name: str,
    text: str | None,
    options: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    output = tmp_path / "data"
    command = ["prepare", "--source", tmp_path / name, "--output", output, *options]
    assert expected in refused(command, capsys, monkeypatch)
    assert [p.name for p in tmp_path.iterdir()] == ([name] if text is not None else [])


def test_data_of_another_vocabulary(
    small_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["pretrain", "--data", small_data, "--output", tmp_path / "m", *SETTINGS]
    message = refused([*command, "-o", "Model.vocab_size=128"], capsys, monkeypatch)
    assert "257 ids, but the model's has 128" in message
    assert not (tmp_path / "m" / "lathe.json").exists()


@pytest.mark.parametrize("verb", ["prune", "analyze", "quantize", "evaluate", "export"])
def test_truncated_weights(
    verb: str,
    small_dense: Path,
    small_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(small_dense, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    output = tmp_path / "out"
    command = [verb, tmp_path / "m", "--data", small_data, "--output", output, *SETTINGS]
    assert "model.safetensors: missing, truncated" in refused(command, capsys, monkeypatch)
    assert not any(
        (output / name).exists() for name in ("lathe.json", "metrics.json", "model.onnx")
    )


def test_degrees_that_the_processes_do_not_fill(
    small_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")  # as in one of its workers
    command = ["pretrain", "--data", small_data, "--output", tmp_path / "m", *SETTINGS]
    message = refused([*command, "-o", "Distributed.pp_degree=2"], capsys, monkeypatch)
    assert "2 (pp) * 1 (sharding) = 2 processes, but there are 1" in message
