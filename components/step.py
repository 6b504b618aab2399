"""What a component declares about its step, whichever pipeline the step is part of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from components.supervise import supervised

Machine = Literal["training", "training node", "gpu", "cpu", "waiting"]


@dataclass(frozen=True)
class Step:
    """Attributes:
    machine: `training`: all GPUs of a machine, or a TrainJob on several; `training node`: all GPUs
        of one machine; `gpu`: one GPU, if there are any; `cpu`: cores of any node; `waiting`: next
        to nothing, for a step that reads figures or waits for others.
    hours: deadline.
    copies: of the model's weights that a step on `gpu` or `cpu` holds in memory at once.
    reads: what it is given of the outputs of the component `inputs`: the corpus, what identifies
        the initial weights, or what identifies the evaluation texts.
    by_engine: whether the engine that the recipe chooses performs it, in that engine's image.
    is_cached: whether another run's result may stand for it.
    retries: None for the usual number.
    trusts: whether it verifies releases, with the public keys of the cluster.
    name: of the step, where it is not the component's.
    seconds: usual duration in the pipeline `full` with its defaults, on two free cores; 0 for a
        step that such a run does not have.
    """

    machine: Machine
    hours: float
    copies: int = 0
    reads: Literal["text", "weights", "scored"] | None = None
    by_engine: bool = False
    is_cached: bool = True
    retries: int | None = None
    trusts: bool = False
    name: str = ""
    seconds: float = 0


def step(machine: Machine, hours: float, **more: Any) -> Callable[[Any], Any]:
    """Decorate a component of KFP: its steps run under the supervisor, and the attribute `step`
    keeps the declaration for the pipelines."""

    def decorate(component: Any) -> Any:
        component.step = Step(machine, hours, **more)
        return supervised(component)

    return decorate
