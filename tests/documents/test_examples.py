"""Runs the examples; long ones in the slow tests, with shorter variants in the fast ones."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lathe.release.deploy import serve
from lathe_base.config.recipe import load_recipe
from lathe_serving.state import stop
from tests.documents.pages import ROOT
from tests.support.small_run import SMALL

EXAMPLES = ROOT / "examples"
NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
OWN_MODEL = str(EXAMPLES / "own-model.yaml")


def run(*command: str, cwd: Path, seconds: int = 300) -> str:
    """Run a Python program, which must succeed; returns its output."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_files_are_in_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert len(files) >= 5 and all(f"]({name})" in readme for name in files)


def test_the_recipe_says_only_what_differs_from_its_base() -> None:
    recipe, base = load_recipe(OWN_MODEL), load_recipe("tiny")
    assert recipe.Compress.Prune.criterion == "taylor" != base.Compress.Prune.criterion
    given = yaml.safe_load(Path(OWN_MODEL).read_text(encoding="utf-8"))
    assert given["_base_"] == "tiny"
    for group, values in given.items():
        if group != "_base_":
            assert getattr(recipe, group) != getattr(base, group), values


@pytest.mark.slow
def test_the_recipe_prepares_and_finetunes_a_model(tmp_path: Path, small_dense: Path) -> None:
    (tmp_path / "text.txt").write_text("A line of a text of one's own.\n\n" * 2000)
    cut = ("Engine.max_steps=2", "Engine.eval_iters=1", "Prepare.cloze_examples=1")
    options = [part for value in (*SMALL, *cut) for part in ("-o", value)]
    lathe = ("-m", "lathe")
    common = ("-r", OWN_MODEL, *options)
    source = ("--source", "text.txt", "--tokenizer", str(small_dense), "--output", "data")
    run(*lathe, "prepare", *common, *source, cwd=tmp_path)
    trained = ("--init", str(small_dense), "--data", "data", "--output", "dense")
    printed = run(*lathe, "pretrain", *common, *trained, cwd=tmp_path)
    assert "perplexity" in printed and (tmp_path / "dense/lathe.json").is_file()


def test_the_notebook_is_clean_and_its_imports_exist() -> None:
    assert NOTEBOOK["nbformat"] == 4 and len(CODE) >= 6
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == (
            [],
            None,
        )
    imports = [line for cell in CODE for line in cell.splitlines() if line.startswith("from ")]
    exec("\n".join(imports), {})


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text("\n".join(CODE))
    printed = run("cells.py", cwd=tmp_path, seconds=900)
    assert "int8" in printed and "The module" in printed


def test_the_custom_pipeline_compiles(tmp_path: Path) -> None:
    script = str(EXAMPLES / "custom_pipeline.py")
    run(script, "compile", "criteria.yaml", "-o", "Engine.max_steps=5", cwd=tmp_path)
    spec, *_ = yaml.safe_load_all((tmp_path / "criteria.yaml").read_text())
    tasks = spec["root"]["dag"]["tasks"]
    assert len([name for name in tasks if name.startswith("prune")]) == 2
    assert len([name for name in tasks if name.startswith("evaluate")]) == 3


@pytest.mark.long
def test_the_custom_pipeline_runs(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(
        "".join(f"Number {i} comes after number {i - 1}.\n\n" for i in range(6000))
    )
    cut = (*SMALL, "Engine.max_steps=4", "Prepare.vocab_size=300", "Prepare.cloze_examples=4")
    options = [part for value in cut for part in ("-o", value)]
    script = str(EXAMPLES / "custom_pipeline.py")
    printed = run(script, "run", "out", "--corpus", "text.txt", *options, cwd=tmp_path, seconds=900)
    assert all(f"{name:8} perplexity" in printed for name in ("dense", "l1_norm", "taylor"))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, deployed: Path) -> Iterator[str]:
    """Address of a real server of a small random model."""
    folder = tmp_path_factory.mktemp("state")
    os.environ["LATHE_SERVE_STATE"] = str(folder)
    try:
        yield serve(deployed).grpc
        stop()
    finally:
        del os.environ["LATHE_SERVE_STATE"]


@pytest.mark.long
def test_the_clients_get_answers(tmp_path: Path, address: str) -> None:
    common = ("--url", address, "--max-tokens", "5")
    printed = run(str(EXAMPLES / "client.py"), "Once", *common, cwd=tmp_path)
    assert printed.startswith("whole: Once") and "streamed: Once" in printed
    prompts = ("One", "Two", "Three")
    printed = run(str(EXAMPLES / "async_client.py"), *prompts, *common, cwd=tmp_path)
    assert all(prompt in printed for prompt in prompts)


@pytest.mark.parametrize("script", ["client.py", "async_client.py"])
def test_a_client_says_that_no_server_answers(tmp_path: Path, script: str) -> None:
    command = [sys.executable, str(EXAMPLES / script), "x", "--url", "127.0.0.1:9"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "no server answers" in done.stderr and "Traceback" not in done.stderr
