"""Golden files of the compiled pipelines: `python -m tests.support.outline FOLDER` writes them.

A compiled pipeline repeats the definition of a step wherever it is used. Here every definition is
written once: `steps.yaml` has the interfaces, containers and pods of all steps, and `NAME.yaml` a
pipeline's parameters and its graph, a line for each input of a task. Left out is only what follows
from the rest: the interfaces of subgraphs, and the code of a step, which is that of its component.
"""

import copy
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from pipelines.compiler.compile import write
from tests.support.rendered import ROOT

Node = dict[str, Any]
CHANNEL = "pipelinechannel--"
PARAMETER = re.compile(rf"{{{{\$\.inputs\.parameters\['{CHANNEL}(\w+(?:-\w+)*)'\]}}}}")
EVERY = "(every step)"
SDK = {"pipelineInfo", "schemaVersion", "sdkVersion", "components", "deploymentSpec", "root"}


def read(path: Path) -> tuple[Node, Node]:
    """A compiled pipeline, and its platform's part."""
    spec, platform = yaml.load_all(path.read_text(), yaml.CSafeLoader)
    return spec, platform


def outlines(compiled: Mapping[str, tuple[Node, Node]]) -> dict[str, Node]:
    """The contents of the golden files, by their names, of compiled pipelines."""
    found: dict[str, Node] = {}
    definitions: dict[str, list[Node]] = {}
    for name, (spec, platform) in compiled.items():
        found[name] = _pipeline(spec)
        for step, definition in _steps(spec, platform):
            if definition not in definitions.setdefault(step, []):
                definitions[step].append(definition)
    steps = {
        step if number == 1 else f"{step} ({number})": definition
        for step, variants in sorted(definitions.items())
        for number, definition in enumerate(variants, 1)
    }
    return found | {"steps": {EVERY: _shared(steps), **steps}}


def text(outline: Node) -> str:
    """What a golden file has of it."""
    return yaml.dump(outline, sort_keys=False, width=100)


def _shared(steps: Mapping[str, Node]) -> Node:
    """Take what all containers have in common, and all pods, out of them; returns it."""
    shared: Node = {}
    for part in ("container", "pod"):
        parts = [step[part] for step in steps.values() if part in step]
        shared[part] = {}
        for key, value in list(parts[0].items()):
            if isinstance(value, list):
                common = [item for item in value if all(item in one.get(key, ()) for one in parts)]
                for one in parts:
                    one[key] = [item for item in one.get(key, ()) if item not in common]
                if common:
                    shared[part][key] = common
            elif all(one.get(key) == value for one in parts):
                shared[part][key] = value
                for one in parts:
                    one[key] = None
        for one in parts:
            for key in [key for key, value in one.items() if not value]:
                del one[key]
    return shared


def _pipeline(spec: Node) -> Node:
    assert spec.keys() == SDK
    root = spec["root"]
    subgraphs = {
        name.removeprefix("comp-"): _graph(component)
        for name, component in spec["components"].items()
        if "dag" in component
    }
    return {
        **spec["pipelineInfo"],
        "versions": f"{spec['sdkVersion']}, schema {spec['schemaVersion']}",
        "parameters": root["inputDefinitions"],
        "graph": _graph(root),
        **subgraphs,
    }


def _graph(component: Node) -> Node:
    assert component.keys() <= {"dag", "inputDefinitions", "outputDefinitions"}
    dag = component["dag"]
    assert dag.keys() <= {"tasks", "outputs"}
    outputs = {
        name: " or ".join(f"{s['producerSubtask']}.{s['outputArtifactKey']}" for s in selectors)
        for name, definition in dag.get("outputs", {}).get("artifacts", {}).items()
        for selectors in [definition["artifactSelectors"]]
    }
    assert dag.get("outputs", {}).keys() <= {"artifacts"}
    tasks = {name: _task(task) for name, task in dag["tasks"].items()}
    return tasks | ({"outputs": outputs} if outputs else {})


def _task(task: Node) -> Node:
    rest = dict(task)
    runs, shown = rest.pop("componentRef")["name"].removeprefix("comp-"), rest.pop("taskInfo")
    inputs = rest.pop("inputs")
    values = {  # others, of subgraphs, only hand a value through
        key: _source(value)
        for kind in inputs
        for key, value in sorted(inputs[kind].items())
        if not key.startswith(CHANNEL)
    }
    assert inputs.keys() <= {"artifacts", "parameters"} and shown.keys() == {"name"}
    found = {
        "runs": runs,
        "name": shown["name"],
        "after": ", ".join(rest.pop("dependentTasks", [])),
        "is cached": rest.pop("cachingOptions", {}).get("enableCache", False),
        "retries": ", ".join(f"{k} {v}" for k, v in rest.pop("retryPolicy", {}).items()),
        "if": rest.pop("triggerPolicy", None),
        "for each": rest.pop("parameterIterator", None),
        "inputs": values,
    }
    assert not rest
    return {key: value for key, value in found.items() if value}


def _source(value: Node) -> Any:
    """Where an input comes from: `name`, `task.output`, `{{name}}` for one that Pipelines inserts
    into the pod, or a constant in quotes."""
    ((kind, given),) = value.items()
    match kind:
        case "componentInputParameter" | "componentInputArtifact":
            return given.removeprefix(CHANNEL)
        case "taskOutputParameter":
            return f"{given['producerTask']}.{given['outputParameterKey']}"
        case "taskOutputArtifact":
            return f"{given['producerTask']}.{given['outputArtifactKey']}"
        case "taskFinalStatus":
            return f"the final status of {given['producerTask']}"
        case "runtimeValue":
            constant = f"{given['constant']}"
            if parameter := PARAMETER.fullmatch(constant):
                return f"{{{{{parameter[1]}}}}}"
            return f"'{constant}'"
    raise AssertionError(kind)


def _steps(spec: Node, platform: Node) -> list[tuple[str, Node]]:
    executors = spec["deploymentSpec"]["executors"]
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    components = spec["components"].items()
    steps = {name: component for name, component in components if "dag" not in component}
    labels = {component["executorLabel"] for component in steps.values()}
    assert labels == executors.keys() >= pods.keys()
    found = []
    for name, component in steps.items():
        label = component["executorLabel"]
        definition = {key: value for key, value in component.items() if key != "executorLabel"}
        definition |= copy.deepcopy(executors[label])
        if "container" in definition:
            *command, code = definition["container"]["command"]
            (function,) = re.findall(r"^def (\w+)\(", code, re.MULTILINE)
            path = ROOT / "components" / function / "component.py"
            assert code.partition(f"def {function}(")[2].strip() in path.read_text()
            definition["container"]["command"] = [
                *command,
                f"the function in {path.relative_to(ROOT)}",
            ]
            definition["pod"] = copy.deepcopy(pods[label])
        found.append((name.removeprefix("comp-"), definition))
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with TemporaryDirectory() as scratch:
        compiled = {path.stem: read(path) for path in write(Path(scratch))}
    for name, outline in outlines(compiled).items():
        (folder / f"{name}.yaml").write_text(text(outline))
