"""No stage has an input that its attestation leaves out."""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from lathe_base.config.settings import Recipe
from lathe_base.provenance import step
from lathe_base.provenance.step import attested

ROOT = Path(__file__).parents[2]
PACKAGES = ("lathe", "lathe_base", "lathe_launch", "lathe_serving", "lathe_paddle")
NOT_INPUTS = {
    ("recipe", None): "attested as the step's parameters",
    ("output", None): "the subject",
    ("history", None): "counts the comparisons; the verdict has the number",
    ("source", "prepare"): "attested as the corpus, by its text",
    ("source", "tokenize"): "attested as the corpus, by its text",
    ("source", "tokenizer"): "attested as the corpus, by its text",
}


def decorated() -> list[tuple[str, str, str]]:
    """Step, module and qualified name of every function and method with the decorator."""
    found = []
    for path in sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "attested(" not in text:
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for owner in ast.walk(ast.parse(text)):
            prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
            for node in ast.iter_child_nodes(owner):
                if isinstance(node, ast.FunctionDef):
                    name, calls = node.name, node.decorator_list
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                    name, calls = ast.unparse(node.targets[0]), [node.value.func]
                else:
                    continue
                for call in calls:
                    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "attested":
                        found.append((ast.literal_eval(call.args[0]), module, prefix + name))
    return found


STAGES = decorated()


def make_argument(parameter: inspect.Parameter, path: Path) -> Any:
    """An argument that refers to `path`; None for a parameter that is not a path."""
    kind = str(parameter.annotation)
    if "Callable" in kind:
        return None
    if "TaskOption" in kind or "tuple[str" in kind:
        return [("task", path)]
    if "tuple" in kind:
        return [(path, 1.0)]
    if "Sequence" in kind and "Path" in kind:
        return [path]
    return path if "Path" in kind or parameter.name == "tokenizer" else None


@contextmanager
def replaced(wrapper: Callable[..., Any], name: str, value: Any) -> Iterator[None]:
    """Another value for a variable of the decorator, such as the function that it calls."""
    closure: Any = wrapper
    cell = closure.__closure__[closure.__code__.co_freevars.index(name)]
    before, cell.cell_contents = cell.cell_contents, value
    try:
        yield
    finally:
        cell.cell_contents = before


@pytest.mark.parametrize(("verb", "module", "name"), STAGES, ids=[f"{m}.{n}" for _, m, n in STAGES])
def test_every_input_of_a_stage_is_attested(
    verb: str, module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = attrgetter(name)(importlib.import_module(module))
    arguments: dict[str, Any] = {}
    expected = {}
    for parameter in inspect.signature(stage).parameters.values():
        path = tmp_path / parameter.name
        is_input = not {(parameter.name, None), (parameter.name, verb)} & NOT_INPUTS.keys()
        value = make_argument(parameter, path) if is_input else None
        if value is not None:
            path.write_text(parameter.name)
            expected[parameter.name] = path.as_uri()
        arguments[parameter.name] = value
    arguments |= {"recipe": Recipe(), "output": tmp_path / "output"}
    if "recipe" not in inspect.signature(stage).parameters:
        del arguments["recipe"]
    seen: dict[str, str | None] = {}

    def record(_: str, __: Any, ___: Path, inputs: Any, *____: Any) -> None:
        seen.update({resource.name: resource.uri for resource, _ in inputs})

    monkeypatch.setattr(step, "attest", record)
    with replaced(stage, "stage", lambda **_: None), replaced(stage, "results", None):
        stage(**arguments)
    assert expected and seen == expected


def test_every_decorated_stage_is_found() -> None:
    verbs = {verb for verb, _, _ in STAGES}
    assert {"prepare", "pretrain", "prune", "quantize", "evaluate", "export", "gate"} <= verbs


def test_an_input_that_is_no_parameter_is_refused_at_decoration() -> None:
    def stage(recipe: Recipe, model: Path, output: Path) -> None: ...

    with pytest.raises(TypeError, match=r"attested\('prune'\).*no parameter modle; it has recipe"):
        attested("prune", "modle")(stage)
    attested("prune", "model", "teacher")(stage)  # the recipe may name a teacher
