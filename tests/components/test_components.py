"""Every component has a typed and documented interface and a short body."""

import ast

import pytest

from components.images import TRAIN
from components.step import FOLDER, NAMES, component

STAGES = [name for name in NAMES if name not in ("inputs", "notify")]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.mark.parametrize("name", STAGES)
def test_interface(name):
    spec = component(name).component_spec
    assert spec.inputs["recipe"].type == "String"
    assert spec.inputs["overrides"].type == "List[String]"
    assert spec.outputs["metrics"].type.startswith("system.Metrics")
    assert spec.implementation.container.image == TRAIN
    assert spec.description
    assert all(part.description for part in spec.inputs.values())


def test_its_steps_run_under_the_supervisor(name):
    command = " ".join(component(name).component_spec.implementation.container.command)
    assert "python3 -m components.supervise -m kfp.dsl.executor_main" in command


def test_body_is_short_and_calls_lathe(name):
    source = (FOLDER / name / "component.py").read_text()
    tree = ast.parse(source)
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    body = function.body[1:]  # after the docstring
    lines = source.splitlines()[body[0].lineno - 1 : body[-1].end_lineno]
    assert len([line for line in lines if line.strip()]) <= 17
    assert any(
        isinstance(n, ast.ImportFrom) and n.module.partition(".")[0] == "lathe" for n in body
    )


def test_readme_names_every_input_and_output(name):
    readme = (FOLDER / name / "README.md").read_text()
    spec = component(name).component_spec
    for part in (*spec.inputs, *spec.outputs):
        assert f"`{part}`" in readme, part


def test_a_step_looks_up_the_inputs_of_a_run(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one")
    from components.inputs.component import inputs

    given = {"recipe": "tiny", "qat_recipe": "tiny-qat", "overrides": ["Engine.max_steps=1"]}
    found = inputs.python_func(**given, corpus=f"newest:{tmp_path}")
    assert found[0] == str(corpus) and found[1].keys() == {str(corpus)} and found[2] == {}
