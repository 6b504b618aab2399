"""Loss scaling, which keeps float16 gradients from underflowing."""

import sys
from dataclasses import dataclass

from lathe_base.config.settings import MixPrecision

PATIENCE = 20  # consecutive overflows allowed with a static loss scale


@dataclass
class LossScale:
    """Loss scaling as in mixed precision training (Micikevicius et al. 2018, arXiv:1710.03740).

    An update that overflows is skipped. A dynamic scale is halved after `hysteresis` overflows, and
    doubled after `window` updates without one, as by DeepSpeed's `DynamicLossScaler` without
    `consecutive_hysteresis`. The scale is part of a saved state; fields with a default may be
    absent there.

    Attributes:
        good_steps, failed_steps: updates without overflow, or with one, in a row.
        overflows: overflows since the scale was last doubled.
    """

    value: float
    dynamic: bool
    good_steps: int = 0
    failed_steps: int = 0
    skipped_steps: int = 0
    window: int = 2000
    hysteresis: int = 1
    overflows: int = 0

    @classmethod
    def of(cls, precision: MixPrecision) -> "LossScale":
        """The initial loss scale of a run; always 1 except for float16."""
        is_scaled = precision.dtype == "float16"
        return cls(
            precision.scale_loss if is_scaled else 1.0,
            precision.use_dynamic_loss_scaling,
            window=precision.loss_scale_window if is_scaled else sys.maxsize,
            hysteresis=precision.hysteresis,
        )

    @property
    def adapts(self) -> bool:
        """Whether the value may change."""
        return self.dynamic and self.window < sys.maxsize

    @property
    def exhausted(self) -> bool:
        """Whether another overflow cannot be due to the scale: a dynamic one would be halved but is
        at its minimum, or a fixed one has failed `PATIENCE` times."""
        if self.dynamic:
            return self.value == 1.0 and self.overflows + 1 >= self.hysteresis
        return self.failed_steps >= PATIENCE

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step."""
        self.good_steps = self.good_steps + 1 if finite else 0
        self.failed_steps = 0 if finite else self.failed_steps + 1
        self.skipped_steps += not finite
        self.overflows += not finite
        if not self.dynamic:
            return
        if finite and self.good_steps % self.window == 0:
            self.value *= 2
            self.overflows = 0
        elif not finite and self.overflows >= self.hysteresis:
            self.value = max(1.0, self.value / 2)
