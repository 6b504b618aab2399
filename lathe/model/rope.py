"""What a configuration says of rotary position embeddings (Su et al. 2021, arXiv:2104.09864)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are changed for texts longer than those of the first training.

    Attributes:
        rope_type: `linear` divides every frequency by `factor` (Chen et al. 2023,
            arXiv:2306.15595). `llama3` does so to those with fewer than `low_freq_factor` periods
            in `original_max_position_embeddings`, keeps those with more than `high_freq_factor`,
            and interpolates between (Llama 3.1, Dubey et al. 2024, arXiv:2407.21783).
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a model.

    Attributes:
        theta: base of the geometric series of frequencies.
        partial_rotary_factor: share of a head's features that is rotated, the first ones.
        scaling: of the frequencies, or None.
    """

    theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    scaling: RopeScaling | None = None

    def n_rotated(self, head_dim: int) -> int:
        """Number of a head's features that are rotated."""
        return int(head_dim * self.partial_rotary_factor)
