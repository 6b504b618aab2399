"""The steps behind a folder are repeated, and come out the same to the byte."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lathe.certify.rebuild import JOURNAL, rebuild
from lathe.errors import UserError
from lathe.provenance import bundle
from lathe.provenance.envelope import seal
from lathe.storage import sha256
from tests.support.attested import Made, made, made_once  # noqa: F401


@pytest.mark.slow
def test_an_export_comes_out_with_the_same_bytes(made: Made, tmp_path: Path) -> None:  # noqa: F811
    done = rebuild(made.dense_onnx, tmp_path / "again", [made.public])
    assert [found.step for found in done] == ["prepare", "pretrain", "export"]
    assert not any(found.different for found in done)
    assert "model.onnx" in done[-1].same and "tokens.bin" in done[0].same
    again = tmp_path / "again" / "3-export" / "model.onnx"
    assert sha256(again) == sha256(made.dense_onnx / "model.onnx")


def test_the_first_tensor_that_differs_is_told(made: Made, tmp_path: Path) -> None:  # noqa: F811
    own, *others = bundle.read(made.dense)
    statement = own.statement
    statement.recipe["Global"]["seed"] += 1  # claims what it was not trained with
    bundle.write(made.dense, [seal(statement, None, ""), *others])
    done = rebuild(made.dense, tmp_path / "again")
    assert [(found.step, found.different) for found in done] == [
        ("prepare", ()),
        ("pretrain", ("model.safetensors",)),
    ]
    assert "elements differ, by" in done[-1].detail
    assert json.loads((tmp_path / "again" / JOURNAL).read_text())["steps"][1]["different"]
    shutil.rmtree(made.dense)
    with pytest.raises(UserError, match="no attestations"):
        rebuild(made.dense, tmp_path / "again")


def test_what_cannot_be_repeated(made: Made, tmp_path: Path) -> None:  # noqa: F811
    output = tmp_path / "again"
    with pytest.raises(UserError, match="`evaluate` is not a step that can be repeated"):
        rebuild(made.folder / "verdict.json", output)
    (made.folder / "corpus.txt").unlink()
    elsewhere = made.folder / "moved.txt"
    bundle_of = bundle.read(made.data)
    place = f"file://{made.folder / 'corpus.txt'}"
    statement = bundle_of[0].statement
    statement.predicate.build_definition.resolved_dependencies[0].uri = place
    bundle.write(made.data, [seal(statement, None, "")])
    with pytest.raises(UserError, match="is not there any more"):
        rebuild(made.data, output)
    elsewhere.write_text("another text\n" * 3000)
    (found,) = rebuild(made.data, output, corpus=str(elsewhere))
    assert "tokens.bin" in found.different
    with pytest.raises(UserError, match="rebuild of something else"):
        rebuild(made.dense, output)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(UserError, match=r"notes\.txt"):
        rebuild(made.dense, tmp_path / "mine")


@pytest.mark.slow
def test_a_rebuild_that_is_killed_at_any_moment_resumes(made: Made, tmp_path: Path) -> None:  # noqa: F811
    output, draw = tmp_path / "again", random.Random(0)
    command = [sys.executable, "-m", "lathe", "rebuild", str(made.dense_onnx)]
    command += ["--output", str(output), "--key", str(made.public)]
    for _ in range(5):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(2, 14))
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = output / "3-export" / "model.onnx"
    assert sha256(again) == sha256(made.dense_onnx / "model.onnx")
