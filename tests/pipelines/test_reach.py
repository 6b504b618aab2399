"""A component's digest depends on exactly the sources that can change its result."""

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines.compiler.facts import extract_facts
from pipelines.compiler.reach import DYNAMIC, FORMER_NAMES, REPOSITORY, SOURCES, Sources
from tests.pipelines.test_run import start

IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import ([\w, ]+|\((?:[^)]*)\))|import ([\w., ]+))", re.M)
COMPUTED = re.compile(r"import_module\((?!STORES\b|\")|__import__\(|(?<![.\w])(?:exec|eval)\(")
LOADED = f"""
SOURCES = {SOURCES}
import ast, importlib, json, sys
found = {{}}
for name in sys.argv[1:]:
    for module in [m for m in sys.modules if m.split(".")[0] in SOURCES]:
        del sys.modules[module]
    tree = ast.parse(open(f"components/{{name}}/component.py").read())
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    imports = [n for n in function.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), name, "exec"), {{}})
    found[name] = [m for m in sys.modules if m.split(".")[0] in SOURCES]
print(json.dumps(found))
"""
TRACE = f"""
import atexit, os, sys
if "--function_to_execute" in sys.orig_argv:
    place = sys.orig_argv.index("--function_to_execute") + 1
    os.environ["TRACED"] = sys.orig_argv[place]
def write():
    if name := os.environ.get("TRACED"):
        with open(f"{{os.environ['TRACES']}}/{{name}}.{{os.getpid()}}", "w") as file:
            own = [m for m in list(sys.modules) if m.split(".")[0] in {SOURCES}]
            file.write("\\n".join(own))
atexit.register(write)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An editable copy of the sources."""
    root = tmp_path_factory.mktemp("tree")
    for package in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, root / package, ignore=ignored)
    return root


@pytest.fixture(scope="module")
def components(tree: Path) -> list[str]:
    return sorted(path.parent.name for path in (tree / "components").glob("*/component.py"))


def digests(root: Path, components: list[str]) -> dict[str, str]:
    sources = Sources(root)
    return {name: sources.reached(name).digest for name in components}


@pytest.fixture(scope="module")
def changed_by(tree: Path, components: list[str]) -> Callable[[str, str], set[str]]:
    """Function that returns the components whose digest changes if lines are added to a file."""
    before = digests(tree, components)

    def changed(path: str, added: str) -> set[str]:
        file = tree / path
        text = file.read_text()
        file.write_text(text + added)
        try:
            after = digests(tree, components)
        finally:
            file.write_text(text)
        return {name for name in components if before[name] != after[name]}

    return changed


@pytest.mark.parametrize(
    "path, expected",
    [
        ("lathe/train/optimizer.py", {"pretrain", "prune", "quantize"}),
        ("lathe/compress/prune.py", {"prune"}),
        ("lathe_paddle/prune.py", {"prune"}),
        ("lathe/data/join.py", {"join"}),
        ("lathe_serving/triton_model.py", {"deploy", "release"}),
    ],
)
def test_an_edit_changes_the_components_that_reach_it(changed_by, path, expected):
    assert changed_by(path, "\n\nX = 1\n") == expected


def test_an_edit_of_what_all_import_changes_all(changed_by, components):
    assert changed_by("lathe_base/errors.py", "\n\nX = 1\n") == set(components)


def test_data_beside_the_code_counts_and_comments_do_not(changed_by):
    changed = changed_by("lathe/report/page.html.j2", "<hr>")
    assert "report" in changed and "prepare" not in changed
    for path in (
        "lathe_base/errors.py",
        "components/gate/README.md",
        "lathe_base/recipes/tiny.yaml",
    ):
        assert changed_by(path, "\n# A remark.\n") == set()


def test_a_step_depends_on_the_groups_that_its_code_reads():
    groups = {name: Sources().reached(name).groups for name in ("prepare", "pretrain", "gate")}
    assert {"Prepare", "Data"} <= groups["prepare"]
    assert {"Optimizer", "Compress", "Gate"}.isdisjoint(groups["prepare"])
    assert {"Model", "Engine", "Optimizer", "Data", "Distributed"} <= groups["pretrain"]
    assert "Gate" in groups["gate"] and "Optimizer" not in groups["gate"]


@pytest.mark.slow
def test_no_random_edit_is_missed(tree, components):
    """Compares with two independent bounds: every module that a component's imports load in a real
    interpreter must affect its digest, and a module that no chain of import statements or names in
    the sources leads to must not."""
    must, may = loaded(tree, components), {name: named(tree, name) for name in components}
    edits = 200
    sources, draw = Sources(tree), random.Random(edits)
    before = {name: sources.reached(name) for name in components}
    modules = sorted(sources._paths)
    while edits:
        module = draw.choice(modules)
        text = edited(sources._paths[module].read_text(), draw)
        if text is None:
            continue
        edits -= 1
        after = Sources.__new__(Sources)
        after.__dict__ |= sources.__dict__
        after._facts = sources._facts | {module: extract_facts(text.encode())}
        after._cache = {}
        changed = {n for n in components if after.reached(n).digest != before[n].digest}
        assert {name for name in components if module in must[name]} <= changed, module
        assert changed <= {name for name in components if module in may[name]}, module


def edited(text: str, draw: random.Random) -> str | None:
    """Change a random number or operator of a source.

    Returns:
        The new source; None if there is nothing to change, or the number is a float too large to
        change.
    """
    tree = ast.parse(text)
    before = ast.unparse(tree)
    nodes = list(ast.walk(tree))
    numbers = [n for n in nodes if isinstance(n, ast.Constant) and type(n.value) in (int, float)]
    sums = [n for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add | ast.Mult)]
    if not (found := numbers + sums):
        return None
    node = draw.choice(found)
    if isinstance(node, ast.Constant):
        node.value += draw.randint(1, 9)
    else:
        node.op = ast.Sub()
    after = ast.unparse(tree)
    return None if after == before else after


def loaded(root: Path, components: list[str]) -> dict[str, set[str]]:
    """Modules that each component's imports load."""
    run = subprocess.run(
        [sys.executable, "-c", LOADED, *components],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: set(found) for name, found in json.loads(run.stdout.splitlines()[-1]).items()}


def named(root: Path, component: str) -> set[str]:
    """Modules reachable from a component by import statements anywhere, or by names in the text."""
    seen: set[str] = set()
    waiting = [f"components.{component}.component"]
    while waiting:
        module = waiting.pop()
        path = root.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module in seen or not file.is_file():
            continue
        seen.add(module)
        waiting += [module.rpartition(".")[0]] if "." in module else []
        waiting += _mentioned(file.read_text(), module)
    return seen


def _mentioned(text: str, module: str) -> Iterator[str]:
    for place, names, plain in IMPORT.findall(text):
        yield from (part.strip() for part in plain.split(","))
        yield place
        yield from (f"{place}.{name}" for name in re.findall(r"\w+", names))
    for name in re.findall(r"\b(?:lathe\w*|components)(?:\.\w+)+", text):
        yield from (name, f"{name}.__main__")
    yield from (f"{module.rpartition('.')[0]}.{name}" for name in re.findall(r'"(\w+)\.py"', text))
    if '"-m", "lathe"' in text:
        yield "lathe.__main__"
    if module in DYNAMIC:
        yield from (f"{DYNAMIC[module]}{p.stem}" for p in (REPOSITORY / "lathe/cli").iterdir())


def test_computed_imports_are_known():
    found = {
        module
        for package in SOURCES
        for path in (REPOSITORY / package).rglob("*.py")
        for module in [".".join(path.relative_to(REPOSITORY).with_suffix("").parts)]
        if COMPUTED.search(path.read_text())
    }
    assert found == DYNAMIC.keys() | {FORMER_NAMES}  # the names in STORES occur in the text


@pytest.mark.slow
def test_every_download_of_a_run_was_checked(tmp_path, recipe, corpus, monkeypatch):
    """At exit, every process of every step writes which modules it has imported."""
    hook, traces = tmp_path / "hook", tmp_path / "traces"
    hook.mkdir()
    traces.mkdir()
    (hook / "sitecustomize.py").write_text(TRACE)
    monkeypatch.setenv("PYTHONPATH", f"{hook}:{REPOSITORY}")
    monkeypatch.setenv("TRACES", str(traces))
    recipes = ("--recipe", recipe, "--prune-recipe", recipe, "--qat-recipe", recipe)
    workers = ("-o", "Distributed.dp_degree=2", "-o", "Global.micro_batch_size=2")
    run = start(tmp_path, "full", "--corpus", corpus, *recipes, *workers, "--name", "all")
    out, err = run.communicate(timeout=900)
    assert run.returncode == 0, out + err
    sources, seen = Sources(), set()
    for trace in traces.iterdir():
        component = trace.name.partition(".")[0]
        seen.add(component)
        names = set(trace.read_text().split())
        assert names <= sources.reached(component).modules, component
    assert {"prepare", "pretrain", "prune", "analyze", "quantize", "evaluate", "export"} <= seen
