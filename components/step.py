"""A component's declaration of its step, independent of the pipeline, and all components by name.
The settings that a step reads are in `components.plan`."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import docstring_parser

from components.supervise import supervised

FOLDER = Path(__file__).resolve().parent
FUNCTION = "--function_to_execute"
"""KFP's option, in the arguments of a step's container, that names the component."""
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/component.py"))

Machine = Literal["training", "node", "gpu", "cpu", "text", "waiting"]


@dataclass(frozen=True)
class Step:
    """The declaration of a step.

    Attributes:
        machine: `training`: all GPUs of a machine, or a TrainJob on several; `node`: all GPUs of
            one machine; `gpu`: one GPU, if there are any; `cpu`: cores of any node; `text`: the
            same, with less memory; `waiting`: minimal, for a step that reads figures or waits for
            others. `components.machines` says what they request.
        hours: deadline.
        reads: the outputs of the component `inputs` that it is given: the corpus, or the content
            identifiers of the initial weights or evaluation texts.
        by_engine: whether it runs in the recipe's engine, and in that engine's image.
        is_cached: whether another run's result may be reused.
        retries: None means the default.
        trusts: whether it verifies releases with the cluster's public keys.
        name: name of the step, if it differs from the component's.
        seconds: usual duration in the pipeline `full` with its defaults, on two free cores; 0 for
            steps that are not part of it.
    """

    machine: Machine
    hours: float
    reads: Literal["text", "weights", "scored"] | None = None
    by_engine: bool = False
    is_cached: bool = True
    retries: int | None = None
    trusts: bool = False
    name: str = ""
    seconds: float = 0


def step(machine: Machine, hours: float, **more: Any) -> Callable[[Any], Any]:
    """Decorator for a KFP component: its steps run under the supervisor, and the attribute `step`
    has the declaration for the pipelines."""

    def decorate(component: Any) -> Any:
        component.step = Step(machine, hours, **more)
        # KFP takes descriptions from the docstring, but not those of artifacts, nor of one result.
        docstring = docstring_parser.parse(component.python_func.__doc__ or "")
        texts = {described.arg_name: described.description for described in docstring.params}
        texts["Output"] = docstring.returns.description if docstring.returns else None
        for name, output in (component.component_spec.outputs or {}).items():
            if text := texts.get(name):
                output.description = " ".join(text.split())
        return supervised(component)

    return decorate


def component(name: str) -> Any:
    """The component of a stage; its attribute `step` declares its step."""
    return getattr(import_module(f"components.{name}.component"), name)


def step_names() -> list[str]:
    """The steps' names in pipelines, without the name of a model's variant."""
    return sorted({component(name).step.name or name for name in NAMES})
