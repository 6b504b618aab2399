"""Run a training command in this process or in the worker processes that its recipe asks for."""

import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from lathe_base.console import show

if TYPE_CHECKING:
    from lathe.train.result import TrainResult
    from lathe_base.config.settings import Recipe


def train(settings: "Recipe", stage: Callable[[], "TrainResult"]) -> None:
    """Run a training stage here, or rerun the whole command in the worker processes that it asks
    for."""
    from lathe.backends import start_workers

    if start_workers(sys.argv[1:], settings):
        return
    result = stage()
    if os.environ.get("RANK", "0") != "0":
        return
    removed = {
        "removed_layers": result.removed_layers,
        "removed_heads": _percent(result.removed_heads),
        "removed_channels": _percent(result.removed_channels),
    }
    if not result.step:
        show(
            model=result.folder,
            parameters=result.n_params,
            perplexity=result.eval_perplexity,
            **removed,
        )
        return
    show(
        model=result.folder,
        steps=result.step,
        parameters=result.n_params,
        loss=result.loss,
        first_perplexity=result.first_eval_perplexity,
        perplexity=result.eval_perplexity,
        best_perplexity=_known(result.best_perplexity),
        tokens_per_second=result.tokens_per_second,
        samples_per_second=_known(result.samples_per_second),
        mfu=_percent(result.mfu),
        **removed,
    )


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _known(figure: float) -> float | None:
    """A figure to show; None if it is NaN, as in checkpoints of earlier versions."""
    return None if math.isnan(figure) else figure
