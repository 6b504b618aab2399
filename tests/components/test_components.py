"""Every component: its interface is typed and documented, its body is short."""

import ast
import importlib
from pathlib import Path

import pytest

from components.images import TRAIN

FOLDER = Path(__file__).parents[2] / "components"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/component.py"))
STAGES = [name for name in NAMES if name not in ("inputs", "notify")]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_all_stages_are_here():
    stages = "analyze certify choose deploy design estimate evaluate export gate join prepare"
    stages += " pretrain price prune quantize release report tokenize tokenizer"
    assert stages.split() == STAGES


@pytest.mark.parametrize("name", STAGES)
def test_interface(name):
    component = getattr(importlib.import_module(f"components.{name}.component"), name)
    spec = component.component_spec
    assert spec.inputs["recipe"].type == "String"
    assert spec.inputs["overrides"].type == "List[String]"
    assert spec.outputs["metrics"].type.startswith("system.Metrics")
    assert spec.implementation.container.image == TRAIN
    assert spec.description
    assert all(part.description for part in spec.inputs.values())


def test_its_steps_run_under_the_supervisor(name):
    component = getattr(importlib.import_module(f"components.{name}.component"), name)
    command = " ".join(component.component_spec.implementation.container.command)
    assert "python3 -m components.supervise -m kfp.dsl.executor_main" in command


def test_body_is_short_and_calls_lathe(name):
    source = (FOLDER / name / "component.py").read_text()
    tree = ast.parse(source)
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    body = function.body[1:]  # after the docstring
    lines = source.splitlines()[body[0].lineno - 1 : body[-1].end_lineno]
    assert len([line for line in lines if line.strip()]) <= 15
    assert any(
        isinstance(n, ast.ImportFrom) and n.module.partition(".")[0] == "lathe" for n in body
    )


def test_readme_names_every_input_and_output(name):
    readme = (FOLDER / name / "README.md").read_text()
    component = getattr(importlib.import_module(f"components.{name}.component"), name)
    for part in (*component.component_spec.inputs, *component.component_spec.outputs):
        assert f"`{part}`" in readme, part


def test_what_a_run_reads_is_looked_up_by_a_step(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one")
    from components.inputs.component import inputs

    given = {"recipes": ["tiny", "tiny-qat"], "overrides": ["Engine.max_steps=1"]}
    found = inputs.python_func(**given, corpus=f"newest:{tmp_path}")
    assert found[0] == str(corpus) and found[1].keys() == {str(corpus)} and found[2] == {}
