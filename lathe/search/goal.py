"""The target and budget of a search, and their form on the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lathe_base.errors import Code, UserError

Target = Literal["latency", "prefill", "bytes", "parameters"]
Budget = Literal["accuracy", "perplexity"]

EXACT: tuple[Target, ...] = ("bytes", "parameters")
"""Targets whose measurements do not vary."""

MAX_RELATIVE_INCREASE = 1e6  # of a perplexity, relative


@dataclass(frozen=True)
class Goal:
    """A limit on `target`, as a share of the dense float32 model's, and a quality budget.

    Attributes:
        target: `latency` per decoded token, `prefill` of a prompt, `bytes` of the ONNX file.
        budget: allowed loss of cloze accuracy in points, or relative increase of perplexity.
    """

    target: Target
    at_most: float
    budget: Budget
    allowed: float


def parse_goal(target: str, budget: str) -> Goal:
    """Parse `latency=0.4` and `accuracy=-0.5` (points) or `perplexity=0.05` (relative).

    Raises:
        UserError: an unknown target or budget, not a number, or a number out of range.
    """
    of, share = assignment("--target", target, get_args(Target))
    kind, allowed = assignment("--budget", budget, get_args(Budget))
    if not 0 < share < 1:
        raise UserError(
            f"--target {target}: not a share",
            f"give one below 1, e.g. {of}=0.4",
            Code.INVALID_VALUE,
        )
    loss = -allowed / 100 if kind == "accuracy" else allowed
    if not 0 <= loss <= (1 if kind == "accuracy" else MAX_RELATIVE_INCREASE):
        raise UserError(
            f"--budget {budget}: {'asks for a gain' if loss < 0 else 'not a loss to bear'}",
            "write accuracy=-0.5 to lose half a point, perplexity=0.05 for 5 % more",
            Code.INVALID_VALUE,
        )
    return Goal(of, share, kind, loss)  # type: ignore[arg-type]


def assignment(option: str, text: str, names: Sequence[str]) -> tuple[str, float]:
    """Parse `name=number`, with one of `names`, that `option` is given as `text`.

    Raises:
        UserError: it is not.
    """
    name, _, value = text.partition("=")
    try:
        if name in names:
            return name, float(value)
    except ValueError:
        pass
    raise UserError(
        f"{option} {text}: not understood",
        f"write one of {', '.join(names)}, as {names[0]}=0.4",
        Code.INVALID_VALUE,
    )
