"""Runs components as their pods do: with KFP's own command and the input its launcher writes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from components.plan import SHARED, plan
from components.step import NAMES, component
from tests.support.chats import write_conversations, write_model
from tests.support.micro_run import write_corpus, write_recipe
from tests.support.tokenizers import byte_tokenizer

RUN = "9fed934b-5541-4cd9-87fd-64364ad2c765"
SECONDS = 600
POD = {
    "POD_NAME": "full-x7k2p-system-container-impl-1",
    "POD_NAMESPACE": "lathe",
    "POD_UID": "edf7d8cc-017e-45fa-b3c9-225582d2deba",
    "KFP_RUN_ID": RUN,
    "HOME": "/nonexistent",  # read-only in the image
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
}
Run = Callable[..., dict[str, Path]]


class PodStep:
    """A step that runs a component, with its artifacts in `folder`.

    Attributes:
        command: command of the pod.
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


EXPLICIT = (
    *("inputs", "prepare", "tokenizer", "tokenize", "join", "pretrain", "prune", "analyze"),
    *("quantize", "evaluate", "export", "gate", "deploy", "report", "finetune"),
)
LORA = ("Finetune.lora.rank=2", "Finetune.lora.dropout=0.1", "Finetune.samples=1")
VALUES = {"kills": 1, "target": "bytes=0.99", "budget": "perplexity=99", "trials": 1}
"""Values of inputs that are not artifacts."""


def _needs(name: str) -> set[str]:
    """Required inputs of a component, except those that all components have."""
    inputs = component(name).component_spec.inputs
    required = {key for key, part in inputs.items() if not part.optional}
    return required - {"recipe", "overrides"}


def _finetune(folder: Path, given: Mapping[str, Any], run: Run) -> None:
    """Finetune a model for chats, with the settings of a run on conversations."""
    model = write_model(folder / "chat", byte_tokenizer(), family="llama", kv_heads=(2, 2))
    chat = str(write_conversations(folder / "c.jsonl"))
    given = {**given, "overrides": [*given["overrides"], *LORA]}
    planned = plan(**given, has_chats=True)
    data = run("prepare", corpus=chat, model=model, planned=planned)["data"]
    run("finetune", model=model, data=data, planned=planned)


def run_all(folder: Path, run: Run) -> None:
    """Run every component on the outputs of earlier ones.

    A component that is not called explicitly gets the outputs and values that are named like its
    inputs.

    Args:
        run: called as `run(name, **given)`; returns the component's outputs.
    """
    given: dict[str, Any] = {
        "recipe": str(write_recipe(folder)),
        "overrides": ["Production.burst_seconds=1"],
    }
    planned = plan(**given)

    def declared(name: str, planned: Any = planned, **given: Any) -> dict[str, Path]:
        """Run a component with the settings that it declares, as in a pipeline."""
        if name in ("inputs", "notify"):
            return run(name, **given)
        others = {"prune_recipe": "prune", "qat_recipe": "quantize"}
        given |= {key: planned[of] for key, of in others.items() if key in given}
        given["recipe"] = planned[SHARED.get(name, name)]
        return run(name, **{key: v for key, v in given.items() if key != "overrides"})

    corpus = {"corpus": str(write_corpus(folder))}
    declared("inputs", **given, **corpus)
    data = declared("prepare", **given, **corpus)["data"]
    vocabulary = declared("tokenizer", **given, **corpus)["vocabulary"]
    numbers = {"shard": 1, "of": 1, "tokenizer": vocabulary}
    tokens = declared("tokenize", **given, **corpus, **numbers)["tokens"]
    declared("join", **given, shards=[tokens], finished=[])
    dense = declared("pretrain", **given, data=data)["model"]
    pruned = declared("prune", **given, model=dense, data=data)["pruned"]
    sensitivity = declared("analyze", **given, model=pruned, data=data)["sensitivity"]
    made: dict[str, Any] = {"model": pruned, "data": data, "sensitivity": sensitivity}
    int8 = declared("quantize", **given, **made)["quantized"]
    found: dict[str, Any] = {"sensitivity": sensitivity}
    for name, model in {"dense": dense, "int8": int8}.items():
        scored = declared("evaluate", **given, model=model, data=data)["evaluation"]
        exported = declared("export", **given, model=model, data=data)["exported"]
        found |= {f"{name}_model": model, f"{name}_evaluation": scored, f"{name}_export": exported}
    compared = {"baseline": found["dense_evaluation"], "candidate": found["int8_evaluation"]}
    verdict = declared("gate", **given, **compared)["verdict"]
    rehearsed = {"exported": found["int8_export"], "model": int8, "data": data}
    deployed = declared("deploy", **given, **rehearsed)["deployed"]
    declared("report", **given, **found, deployed=deployed)
    made = found | {"model": dense, "data": data, "exported": found["dense_export"], **VALUES}
    made |= {"prune_recipe": given["recipe"], "qat_recipe": given["recipe"]}
    last = {*EXPLICIT, "choose", "release", "notify"}
    while ready := [name for name in NAMES if name not in last and _needs(name) <= made.keys()]:
        last |= set(ready)
        for name in ready:
            made |= declared(name, **given, **{key: made[key] for key in _needs(name)})
    _finetune(folder, given, declared)
    goal = {name: made[name] for name in ("target", "budget", "designs")}
    chosen = goal | {name: found[name] for name in ("dense_evaluation", "dense_export")}
    chosen |= {"models": [int8], "evaluations": [found["int8_evaluation"]]}
    declared("choose", **given, **chosen, exports=[found["int8_export"]])
    live = {"deployed": deployed, "evaluation": found["int8_evaluation"], "gate": verdict}
    live |= {"production": f"file://{folder}/nowhere", "model": int8, "data": data}
    declared("release", **given, **live)
    ended = {"state": "COMPLETE", "error": {}, "pipelineJobResourceName": RUN}
    declared("notify", pipeline="full", is_wanted=True, status=ended)
