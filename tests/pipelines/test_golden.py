"""Compiled pipelines match the golden files, and have the intended graph."""

import contextlib
import copy
import functools
import operator
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.compiler.compile import FUNCTIONS, MACHINES, built, write
from tests.support.outline import outlines, read, text

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return {path.stem: path for path in write(tmp_path_factory.mktemp("build"))}


@pytest.fixture(scope="module")
def outlined(compiled):
    return outlines({name: read(path) for name, path in compiled.items()})


@pytest.mark.parametrize("name", [*FUNCTIONS, "steps"])
def test_no_drift(outlined, name):
    golden = GOLDEN / f"{name}.yaml"
    assert text(outlined[name]) == golden.read_text(), (
        f"pipeline {name} differs from {golden}: "
        "if that is intended, run `make golden` and review the diff"
    )


@pytest.mark.slow
def test_tests_compile_as_a_user_does(compiled, tmp_path):
    """In a process without `quick_kfp`, which replaces parts of KFP here."""
    script = "import pathlib, sys; from pipelines.compiler.compile import write; "
    script += "write(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    for name, path in compiled.items():
        assert read(tmp_path / f"{name}.yaml") == read(path)


def test_an_outline_shows_every_change(compiled):
    documents = read(compiled["prune"])
    outline = outlines({"prune": documents})
    paths = [path for path in leaves(documents) if not is_derived(documents, path)]
    for path in random.sample(paths, 50):
        other = copy.deepcopy(documents)
        *parents, last = path
        functools.reduce(operator.getitem, parents, other)[last] = "another"
        with contextlib.suppress(AssertionError, KeyError, ValueError):  # no compiled pipeline
            assert outlines({"prune": other}) == outline
            pytest.fail(f"{path} is not in the outline")


def leaves(value, path=()):
    """Where a document has values that are not collections."""
    if not isinstance(value, dict | list | tuple):
        yield path
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(part, (*path, key))


def is_derived(documents, path):
    """Whether a value is left out of outlines: of the interface of a subgraph, what it hands
    through, or a name that only the compiled file has."""
    part, *rest = path[1:]
    if part == "components" and rest[1] in ("inputDefinitions", "outputDefinitions"):
        return "dag" in documents[0]["components"][rest[0]]
    return any(f"{key}".startswith("pipelinechannel--") for key in rest)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_output_of_a_step_is_described(compiled, name):
    spec = next(yaml.load_all(compiled[name].read_text(), yaml.CSafeLoader))
    bare = [
        (step, output)
        for step, component in spec["components"].items()
        if "executorLabel" in component and step != "comp-importer"
        for kind in component.get("outputDefinitions", {}).values()
        for output, definition in kind.items()
        if not definition.get("description")
    ]
    assert not bare


@pytest.mark.parametrize("name", ["qat", "full"])
def test_a_model_goes_live_only_where_releases_are_named_and_the_gate_passes_it(compiled, name):
    spec = load(compiled[name])
    judge = dag_tasks(spec, body(spec)["judge"])
    named = {task["taskInfo"]["name"]: task for task in judge.values()}
    outer = named["to-production"]
    (last,) = dag_tasks(spec, outer).values()
    condition = "inputs.parameter_values['pipelinechannel--gate-Output'] == true"
    assert outer["triggerPolicy"]["condition"] == condition
    given = named["gate"]["inputs"]["parameters"]["production"]
    assert given == {"componentInputParameter": "production"}
    assert last["taskInfo"]["name"] == "release"
    assert "enableCache" not in last["cachingOptions"]
    assert not last.get("retryPolicy", {}).get("maxRetryCount")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_of_a_run_fits_on_a_screen(compiled, name):
    """The UI draws a node for each task and artifact, and an edge for each use of an artifact and
    each dependency. It identifies an edge by the artifact's name and the reading task: it would
    draw only one of two artifacts with the same name."""
    tasks = body(load(compiled[name]))
    lines = {
        (output["producerTask"], output["outputArtifactKey"], reader)
        for reader, task in tasks.items()
        for given in task["inputs"].get("artifacts", {}).values()
        if (output := given.get("taskOutputArtifact"))
    }
    assert len(tasks) <= 6 and len(lines) <= 12
    assert len({line[1:] for line in lines}) == len(lines)
    waits = sum(len(task.get("dependentTasks", [])) for task in tasks.values())
    assert waits <= len(tasks) + 1


def test_full_compresses_the_pruned_model_and_judges_all_three(compiled):
    spec = load(compiled["full"])
    tasks = body(spec)

    def producer(tasks, task, name):
        given = tasks[task]["inputs"]["artifacts"][name]
        return given.get("taskOutputArtifact", {}).get("producerTask")

    assert producer(tasks, "prune", "model") == "pretrain"
    assert producer(tasks, "quantization", "model") == "prune"
    models = {v: producer(tasks, "judge", v) for v in ("dense", "pruned", "int8")}
    assert models == {"dense": "pretrain", "pruned": "prune", "int8": "quantization"}
    judge = dag_tasks(spec, tasks["judge"])
    assert producer(judge, "gate", "baseline") == "evaluate-dense"
    assert producer(judge, "gate", "candidate") == "evaluate-int8"
    assert producer(judge, "rehearse", "exported") == "export-int8"


@pytest.mark.parametrize(
    ("name", "pods"), [("pretrain", 12), ("prune", 15), ("qat", 21), ("compress", 29), ("full", 25)]
)
def test_a_run_starts_so_many_pods_one_after_the_other(compiled, name, pods):
    spec = load(compiled[name])
    assert pods_in_sequence(spec, spec["root"]) == pods


def pods_in_sequence(spec, component):
    """Number of pods on the longest path.

    Pipelines starts one pod for each subgraph (its driver), and two for a step: its driver and the
    step's own pod.
    """
    if "dag" not in component:
        return 2
    tasks, ends = component["dag"]["tasks"], {}

    def end(name):
        if name not in ends:
            before = [end(earlier) for earlier in tasks[name].get("dependentTasks", [])]
            own = spec["components"][tasks[name]["componentRef"]["name"]]
            ends[name] = max(before, default=0) + pods_in_sequence(spec, own)
        return ends[name]

    return 1 + max(map(end, tasks))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_handful_of_parameters_besides_the_machines(name):
    assert len(built(name).component_spec.inputs) - len(MACHINES) <= 10


def load(path):
    return next(yaml.load_all(path.read_text(), yaml.CSafeLoader))


def body(spec):
    """The tasks of a pipeline, without the notification at its end."""
    return dag_tasks(spec, spec["root"]["dag"]["tasks"]["exit-handler-1"])


def dag_tasks(spec, task):
    return spec["components"][task["componentRef"]["name"]]["dag"]["tasks"]


def parameters_in(value: Any) -> Iterator[str]:
    """Yield strings in a constant of a compiled task that refer to parameters."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from parameters_in(part)
    elif isinstance(value, str) and "{{$" in value:
        yield value


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_parameter_is_part_of_a_constant(compiled: Any, name: str) -> None:
    """The launcher of Pipelines 2.17 inserts parameters into the step's JSON without escaping, so a
    step with the input `[recipe]` would fail if the recipe has two lines."""
    spec = load(compiled[name])
    dags = [part["dag"] for part in [spec["root"], *spec["components"].values()] if "dag" in part]
    tasks = [task for dag in dags for task in dag["tasks"].values()]
    given = [task.get("inputs", {}).get("parameters", {}) for task in tasks]
    constants = [
        value.get("runtimeValue")
        for values in given
        for key, value in values.items()
        if key not in AMOUNTS  # of the pod, which are single words
    ]
    assert constants and not list(parameters_in(constants))


AMOUNTS = ("cpu_request", "memory_request", "memory_limit", "accelerator_count")
