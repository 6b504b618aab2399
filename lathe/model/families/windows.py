"""Defaults for which layers have a sliding window if `config.json` does not list their kinds."""

from collections.abc import Mapping
from typing import Any

from lathe.model.architecture import FULL, SLIDING


def every_layer(_: Mapping[str, Any], n_layer: int) -> list[str]:
    """All layers have a sliding window."""
    return [SLIDING] * n_layer


def last_layers(values: Mapping[str, Any], n_layer: int) -> list[str]:
    """The layers from `max_window_layers` on have a sliding window."""
    return [
        FULL if i < values.get("max_window_layers", n_layer) else SLIDING for i in range(n_layer)
    ]
