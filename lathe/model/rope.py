"""Configuration of rotary position embeddings (Su et al. 2021, arXiv:2104.09864)."""

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
SCALING_KEYS: dict[RopeType, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": (
        *("factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
        "original_max_position_embeddings",
    ),
    "longrope": (
        *("factor", "attention_factor", "short_factor"),
        "original_max_position_embeddings",
    ),
}
"""The attributes of `RopeScaling` that each type uses."""


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling for texts longer than those of the original training.

    Attributes:
        rope_type: `linear` divides every frequency by `factor` (Chen et al. 2023,
            arXiv:2306.15595). `llama3` does so to those with fewer than `low_freq_factor` periods
            in `original_max_position_embeddings`, keeps those with more than `high_freq_factor`,
            and interpolates between (Llama 3.1, Dubey et al. 2024, arXiv:2407.21783). `yarn` does
            the same along a ramp between features that have `beta_fast` and `beta_slow` periods
            (Peng et al. 2023, arXiv:2309.00071). `longrope` divides each frequency by its
            `short_factor` (Ding et al. 2024, arXiv:2402.13753), and in texts longer than the
            original length by another, which Lathe does not support. `dynamic` only changes texts
            longer than `max_position_embeddings`, which Lathe does not support.
        attention_factor: factor of cosines and sines.
        truncate: whether the ends of YaRN's ramp are rounded to whole features.
    """

    rope_type: RopeType
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a model.

    Attributes:
        theta: base of the geometric series of frequencies.
        partial_rotary_factor: share of a head's features, from the first, that is rotated.
        scaling: frequency scaling, or None.
    """

    theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    scaling: RopeScaling | None = None

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines."""
        return self.scaling.attention_factor if self.scaling else 1.0

    def n_rotated(self, head_dim: int) -> int:
        """Number of a head's features that are rotated."""
        return int(head_dim * self.partial_rotary_factor)
