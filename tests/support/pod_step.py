"""A component as a pod runs it: Pipelines' own command, with the input that its launcher writes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class PodStep:
    """A step of a component, whose artifacts are in `folder`.

    Attributes:
        command: as the pod has it.
        outputs: paths of the output artifacts by name.
    """

    def __init__(self, component: Any, folder: Path, given: Mapping[str, Any]) -> None:
        spec = component.component_spec
        self._kinds = {n: part.type for n, part in {**spec.inputs, **spec.outputs}.items()}
        files = {n: folder / n for n in spec.outputs or {}}
        self.outputs = {n: path for n, path in files.items() if self._is_artifact(n)}
        inputs = {n: v for n, v in given.items() if self._is_artifact(n)}
        executor_input = {
            "inputs": {
                "parameterValues": {n: v for n, v in given.items() if n not in inputs},
                "artifacts": {n: self._artifacts(n, v) for n, v in inputs.items()},
            },
            "outputs": {
                "parameters": {
                    n: {"outputFile": str(path)}
                    for n, path in files.items()
                    if n not in self.outputs
                },
                "artifacts": {n: self._artifacts(n, path) for n, path in self.outputs.items()},
                "outputFile": str(folder / "executor_output.json"),
            },
        }
        container = spec.implementation.container
        text = json.dumps(executor_input)
        self.command = [
            text if part == "{{$}}" else part for part in [*container.command, *container.args]
        ]

    def _is_artifact(self, name: str) -> bool:
        return str(self._kinds[name]).startswith("system.")

    def _artifacts(self, name: str, paths: Path | list[Path]) -> dict[str, Any]:
        title, _, version = str(self._kinds[name]).partition("@")
        kind = {"schemaTitle": title, "schemaVersion": version}
        some = paths if isinstance(paths, list) else [paths]
        return {
            "artifacts": [
                {"name": name, "type": kind, "uri": str(path), "metadata": {}} for path in some
            ]
        }
