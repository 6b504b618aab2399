"""What of a recipe the Paddle engine does not do, told before it begins; needs no paddle."""

from collections.abc import Mapping
from typing import Any

from lathe.errors import UserError
from lathe.settings import PruneSettings, Recipe

CRITERIA = ("l1_norm", "l2_norm")
CURE = "change it, or use Compress.engine=torch"


def require_trainable(recipe: Recipe) -> None:
    """Raise UserError for what this engine's training does not have."""
    settings = recipe.Distributed
    divided = settings.mp_degree > 1
    refused = {
        "Compress.Distill: the Paddle engine does not distil": recipe.Compress.Distill.teacher,
        "Model.sequence_parallel: the Paddle engine does not have it": (
            recipe.Model.sequence_parallel
        ),
        f"Distributed.pp_degree is {settings.pp_degree}, and the Paddle engine has no pipeline": (
            settings.pp_degree > 1
        ),
        "Distributed.sharding.sharding_stage 3: the Paddle engine does not divide weights": (
            settings.sharding.sharding_degree > 1 and settings.sharding.sharding_stage == 3
        ),
        "Distributed.sharding.sharding_offload: the Paddle engine does not have it": (
            settings.sharding.sharding_offload
        ),
        "activation_preprocess_type PACT: its bounds are not divided by Distributed.mp_degree": (
            divided and recipe.Compress.Quantization.activation_preprocess_type
        ),
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise UserError(what, CURE)


def require_prunable(settings: PruneSettings) -> None:
    """Raise UserError for what PaddleSlim's filter pruners do not do."""
    wanted: Mapping[str, tuple[Any, Any]] = {
        "scope": (settings.scope, "uniform"),
        "layers": (settings.layers, 0),
        "rounds": (settings.rounds, 1),
        "channel_multiple": (settings.channel_multiple, 1),
    }
    if settings.criterion not in CRITERIA:
        raise _beyond_pruners("criterion", settings.criterion, " or ".join(CRITERIA))
    for key, (found, possible) in wanted.items():
        if found != possible:
            raise _beyond_pruners(key, found, possible)


def _beyond_pruners(key: str, found: Any, possible: Any) -> UserError:
    what = f"Compress.Prune.{key} is {found}: PaddleSlim's pruners have {possible}"
    return UserError(what, CURE)
