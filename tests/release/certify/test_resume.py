"""Comparing a killed and resumed training run bit for bit with an uninterrupted one."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from lathe.cli import app
from lathe.release.certify import resume
from lathe.release.certify.resume import KINDS, Training, plan_kills
from lathe.release.certify.tensors import TensorDifference, first_difference, weight_digests
from lathe.report.training import read_certificate
from lathe.train.state_folder import METADATA, committed_steps, compute_digests, write_metadata
from tests.support.small_run import SMALL

FEW_STEPS = (*SMALL, "Engine.logging_freq=1", "Model.hidden_dropout_prob=0.1")
OPTIONS = [part for value in FEW_STEPS for part in ("-o", value)]


def certify(data: Path, output: Path, kills: int, *more: str) -> int:
    """Run the command; returns its exit status."""
    given = ["--data", str(data), "--output", str(output), "--kills", str(kills), *OPTIONS, *more]
    result = CliRunner().invoke(app, ["certify-resume", *given])
    return getattr(result.exception, "status", result.exit_code)


def test_kills_are_drawn_from_the_seed_and_of_every_kind() -> None:
    planned = plan_kills(3, 20, 100, 4)
    assert planned == plan_kills(3, 20, 100, 4) != plan_kills(4, 20, 100, 4)
    assert {kill.kind for kill in planned} == set(KINDS)
    assert [kill.step for kill in planned] == sorted(kill.step for kill in planned)
    assert {kill.rank for kill in planned} == {0, 1, 2, 3}
    assert all(0 <= kill.step < 100 and 0 <= kill.wait < 1 for kill in planned)


def test_the_first_tensor_that_differs_is_named(tmp_path: Path) -> None:
    tensors = {name: np.arange(6, dtype=np.float32).reshape(2, 3) for name in ("a", "b", "c")}
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
    assert first_difference(one, other) is None and weight_digests(one) == weight_digests(other)
    tensors["c"] = tensors["c"].astype(np.float16)
    tensors["b"] = tensors["b"] + np.array([0, 0.25, 0], dtype=np.float32)
    save_file(tensors, other / "model.safetensors")
    assert first_difference(one, other) == TensorDifference("b", 0.25, 2)
    before, after = weight_digests(one), weight_digests(other)
    assert before.file != after.file and before.tensors["a"] == after.tensors["a"]
    tensors["b"] = load_file(one / "model.safetensors")["b"]
    save_file(tensors, other / "model.safetensors")
    assert first_difference(one, other) == TensorDifference("c", None, None)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_training_that_is_killed_ends_as_one_that_is_not(small_data, tmp_path, processes) -> None:
    output = tmp_path / "certificate.json"
    assert certify(small_data, output, 3, "-o", f"Distributed.dp_degree={processes}") == 0
    found = json.loads(output.read_text())
    assert found["passed"] and found["difference"] is None and found["processes"] == processes
    assert found["uninterrupted"] == found["resumed"]
    assert {kill["planned"]["kind"] for kill in found["kills"]} == set(KINDS)
    shown = read_certificate(output)
    assert (shown.passed, shown.steps, len(shown.kills)) == (True, found["steps"], 3)


def alter(path: Path) -> None:
    """Change the first number of every matrix in a file."""
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, part in json.loads(data[8:begin]).items():
        if name != "__metadata__" and part["dtype"] == "F32" and len(part["shape"]) == 2:
            data[begin + part["data_offsets"][0] + 2] ^= 0x40  # a bit of the mantissa
    path.write_bytes(data)


def reseal(state: Path) -> None:
    values = json.loads((state / METADATA).read_text())
    sizes = values.pop("files")
    del values["sha256"], values["metadata_sha256"]
    write_metadata(state, values, sizes, compute_digests(state / name for name in sizes))


@pytest.mark.slow
def test_a_state_that_was_altered_is_caught(small_data, tmp_path, monkeypatch) -> None:
    """Alters the state from which the second attempt resumes, and its digests: a wrong state, not
    a corrupt one."""
    begun: list[Path] = []

    def altering(command: list[str], output: Path, log: Path) -> Training:
        begun.append(output)
        for state in committed_steps(output / "state"):
            alter(next(state.glob("*.safetensors")))
            reseal(state)
        return Training(command, output, log)

    monkeypatch.setattr(resume, "Training", altering)
    output = tmp_path / "certificate.json"
    assert certify(small_data, output, 1, "--seed", "11") == 1
    found = json.loads(output.read_text())
    assert not found["passed"] and len(begun) == 3
    assert found["difference"]["largest"] > 0
    assert found["difference"]["tensor"] in found["resumed"]["tensors"]


def test_a_file_of_the_users_is_not_replaced(small_data, tmp_path) -> None:
    output = tmp_path / "mine.json"
    output.write_text("{}")
    assert certify(small_data, output, 1) == 2
    assert output.read_text() == "{}"
