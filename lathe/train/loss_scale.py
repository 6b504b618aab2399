"""Loss scaling, which keeps float16 gradients from underflowing."""

from dataclasses import dataclass

from lathe.config.settings import MixPrecision

GROWTH_INTERVAL = 2000  # updates without overflow before the loss scale doubles
PATIENCE = 20  # consecutive overflows allowed with a static loss scale


@dataclass
class LossScale:
    """Loss scaling as in mixed precision training (Micikevicius et al. 2018, arXiv:1710.03740).

    An update that overflows is skipped. A dynamic scale is then halved, and doubled after
    `GROWTH_INTERVAL` updates without overflow.
    """

    value: float
    dynamic: bool
    good_steps: int = 0
    failed_steps: int = 0  # in a row
    skipped_steps: int = 0

    @classmethod
    def of(cls, precision: MixPrecision) -> "LossScale":
        """The initial loss scale of a run; disabled except for float16."""
        value = precision.scale_loss if precision.dtype == "float16" else 1.0
        return cls(value, precision.use_dynamic_loss_scaling)

    @property
    def exhausted(self) -> bool:
        """Whether another overflow cannot be due to the scale: a dynamic one is at its minimum, or
        a fixed one has failed `PATIENCE` times."""
        if self.dynamic:
            return self.value == 1.0
        return self.failed_steps >= PATIENCE

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step; raises if overflows persist."""
        self.good_steps = self.good_steps + 1 if finite else 0
        self.failed_steps = 0 if finite else self.failed_steps + 1
        self.skipped_steps += not finite
        if not self.dynamic:
            return
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps % GROWTH_INTERVAL == 0:
            self.value *= 2
