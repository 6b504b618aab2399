"""Rebuilding a folder by repeating its steps gives identical bytes."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.compress.sensitivity.analyze import analyze
from lathe.data.blend import blend
from lathe.data.prepare import prepare
from lathe.data.sources import documents
from lathe.export.export import export
from lathe.release.certify.rebuild import JOURNAL, compare, rebuild
from lathe_base.artifacts.kinds import release_digests
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from lathe_base.provenance import bundle
from lathe_base.provenance.bundle import seal
from lathe_base.provenance.chain import recorded_chain
from lathe_base.provenance.keys import SIGNING_KEY
from lathe_base.provenance.step import attest, materials, now
from lathe_base.storage import sha256
from lathe_base.storage.ownership import ATTESTATION_FILES
from tests.support import warm
from tests.support.attested import OVERRIDES, AttestedRun
from tests.support.errors import raises


@pytest.fixture(autouse=True)
def warm_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuild in forks of a process that has imported torch."""
    monkeypatch.setattr(sys, "executable", str(warm.interpreter()))
    for name, value in warm.for_children().items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_an_export_comes_out_with_the_same_bytes(made: AttestedRun, tmp_path: Path) -> None:
    done = rebuild(made.dense_onnx, tmp_path / "again", [made.public])
    assert [found.step for found in done] == ["prepare", "pretrain", "export"]
    assert not any(found.different for found in done)
    assert "model.onnx" in done[-1].same and "tokens.bin" in done[0].same
    again = tmp_path / "again" / "3-export" / "model.onnx"
    assert sha256(again) == sha256(made.dense_onnx / "model.onnx")


def test_the_first_differing_tensor_is_reported(made: AttestedRun, tmp_path: Path) -> None:
    own, *others = bundle.read(made.dense)
    statement = own.statement
    statement.recipe["Global"]["seed"] += 1  # a false claim: trained with another seed
    bundle.write(made.dense, [seal(statement, None, ""), *others])
    done = rebuild(made.dense, tmp_path / "again")
    assert [(found.step, found.different) for found in done] == [
        ("prepare", ()),
        ("pretrain", ("model.safetensors",)),
    ]
    assert "elements differ, by" in done[-1].detail
    assert json.loads((tmp_path / "again" / JOURNAL).read_text())["steps"][1]["different"]
    shutil.rmtree(made.dense)
    with raises(Code.WRONG_KIND, made.dense):
        rebuild(made.dense, tmp_path / "again")


def test_unrepeatable_runs(made: AttestedRun, tmp_path: Path) -> None:
    output = tmp_path / "again"
    with raises(Code.UNSUPPORTED, "`evaluate`"):
        rebuild(made.folder / "verdict.json", output)
    (made.folder / "corpus.txt").unlink()
    elsewhere = made.folder / "moved.txt"
    statements = bundle.read(made.data)
    place = f"file://{made.folder / 'corpus.txt'}"
    statement = statements[0].statement
    statement.predicate.build_definition.resolved_dependencies[0].uri = place
    bundle.write(made.data, [seal(statement, None, "")])
    with raises(Code.NOT_FOUND, made.folder / "corpus.txt"):
        rebuild(made.data, output)
    elsewhere.write_text("another text\n" * 3000)
    (found,) = rebuild(made.data, output, corpora=[str(elsewhere)])
    assert "tokens.bin" in found.different
    with raises(Code.EXISTS, output):
        rebuild(made.dense, output)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with raises(Code.EXISTS, "notes.txt"):
        rebuild(made.dense, tmp_path / "mine")


def test_a_differing_graph_is_reported_by_tensor_and_other_files_by_byte(
    made: AttestedRun,
    tmp_path: Path,
) -> None:
    step = recorded_chain(made.dense_onnx)
    assert step
    same = compare(step, made.dense_onnx, made.dense_onnx)
    assert same.same and not same.different and not same.detail
    again = tmp_path / "again"
    shutil.copytree(made.dense_onnx, again)
    graph = onnx.load(again / "model.onnx")
    weight = next(i for i in graph.graph.initializer if i.name == "h.1.mlp.c_fc.weight")
    values = numpy_helper.to_array(weight).copy()
    values.flat[:2] += 0.25
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(graph, again / "model.onnx")
    found = compare(step, again, made.dense_onnx)
    assert found.different == ("model.onnx",)
    assert found.detail == "h.1.mlp.c_fc.weight: 2 elements differ, by 0.25 at most"
    shutil.copy(made.dense_onnx / "model.onnx", again)
    text = (again / "tokenizer.json").read_bytes()
    (again / "tokenizer.json").write_bytes(text[:100] + bytes([text[100] ^ 1]) + text[101:])
    detail = compare(step, again, made.dense_onnx).detail
    assert detail == "tokenizer.json differs from byte 100"
    assert "not available for comparison" in compare(step, again, None).detail


def write_release(made: AttestedRun, folder: Path) -> Path:
    """Write a release folder of an export with its attestation."""
    shutil.copytree(made.dense_onnx, folder / "gpt" / "1")
    for name in ATTESTATION_FILES:
        (folder / "gpt" / "1" / name).unlink(missing_ok=True)
    inputs = list(materials("exported", made.dense_onnx))
    attest("release", made.recipe, folder, inputs, {}, now(), release_digests(folder))
    return folder


def test_a_release_that_serves_another_graph_than_it_was_made_from_is_not_rebuilt(
    made: AttestedRun,
    tmp_path: Path,
) -> None:
    shutil.copyfile(made.onnx / "model.onnx", made.dense_onnx / "model.onnx")
    release = write_release(made, tmp_path / "release")
    with raises(Code.WRONG_KIND, release):
        rebuild(release, tmp_path / "again")


@pytest.mark.slow
def test_a_release_alone_is_rebuilt_by_somebody_who_has_the_corpus(
    made: AttestedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SIGNING_KEY, str(made.folder / "key.pem"))
    release = write_release(made, tmp_path / "release")
    public = made.public.rename(tmp_path / "key.pub")
    corpus = (made.folder / "corpus.txt").rename(tmp_path / "moved.txt")
    shutil.rmtree(made.folder)
    done = rebuild(release, tmp_path / "again", [public], [str(corpus)])
    assert [found.step for found in done] == ["prepare", "pretrain", "export"]
    assert not any(found.different for found in done)
    served = release / "gpt" / "1" / "model.onnx"
    assert sha256(tmp_path / "again" / "3-export" / "model.onnx") == sha256(served)


@pytest.mark.slow
def test_all_steps_to_an_int8_graph_come_out_with_the_same_bytes(
    made: AttestedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two corpora that have since moved, a blend, distillation, pruning, analysis and INT8."""
    monkeypatch.setenv(SIGNING_KEY, str(made.folder / "key.pem"))
    more, tokenizer = made.folder / "more.txt", str(made.data / "tokenizer.json")
    more.write_text("\n\n".join(islice(documents("python"), 40, 70)))
    prepare(made.recipe, made.more, str(more), tokenizer)
    blend([(made.data, 0.7), (made.more, 0.3)], made.blend)
    recipe = load_recipe("tiny", [*OVERRIDES, f"Compress.Distill.teacher={made.dense}"])
    prune(recipe, made.dense, made.blend, made.pruned)
    analyze(made.recipe, made.pruned, made.blend, made.sensitivity)
    quantize(made.recipe, made.pruned, made.blend, made.int8, made.sensitivity)
    exported = export(made.recipe, made.int8, made.blend, made.int8_onnx)
    assert exported.flavour == "int8"
    moved = [p.rename(tmp_path / p.name) for p in (made.folder / "corpus.txt", more)]
    done = rebuild(made.int8_onnx, tmp_path / "again", [made.public], [*map(str, moved)])
    names = [found.step for found in done]
    assert names[-4:] == ["prune", "analyze", "quantize", "export"]
    assert sorted(names[:-4]) == ["blend", "prepare", "prepare", "pretrain"]
    assert not any(found.different for found in done)
    assert "model.onnx" in done[-1].same
    assert sha256(done[-1].folder / "model.onnx") == sha256(made.int8_onnx / "model.onnx")


@pytest.mark.slow
def test_a_rebuild_that_is_killed_at_any_moment_resumes(made: AttestedRun, tmp_path: Path) -> None:
    output, draw = tmp_path / "again", random.Random(0)
    command = [*warm.python(), "-m", "lathe", "rebuild", str(made.dense_onnx)]
    command += ["--output", str(output), "--key", str(made.public)]
    for _ in range(5):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.5, 5))
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = output / "3-export" / "model.onnx"
    assert sha256(again) == sha256(made.dense_onnx / "model.onnx")
