"""What both backends' optimizers share: PaddleFleetX's cosine schedule with linear warm-up, how
gradients are clipped, which weights decay, and the loss scale of float16."""

import math
import sys
from dataclasses import dataclass

from lathe.model.architecture import Architecture
from lathe_base.config.settings import GradClip, LearningRate, MixPrecision, OptimizerSettings

PACT_LR_FACTOR = 1000.0  # PaddleSlim's learning rate of a clipping bound, relative to weights
PATIENCE = 20  # consecutive overflows allowed with a static loss scale


def is_decayed(name: str, architecture: Architecture, settings: OptimizerSettings) -> bool:
    """Whether a parameter has weight decay: with `FusedAdamW` all but biases and norms, with
    `AdamW` all; clipping bounds never."""
    if name.endswith("alpha") or settings.name == "AdamW":
        return not name.endswith("alpha")
    return not name.endswith("bias") and not architecture.is_norm(name)


def clip_factor(norm: float, settings: GradClip) -> float:
    """What gradients of this L2 norm are multiplied by, as in `torch.nn.utils.clip_grad_norm_`."""
    return min(1.0, settings.clip_norm / (norm + 1e-6)) if settings.clip_norm else 1.0


def learning_rate(step: int, settings: LearningRate) -> float:
    """Rate of the `step`-th update (from 1): linear to `max_lr` over `warmup_rate * decay_steps`
    updates, then half a cosine to `min_lr` at `decay_steps`, then flat (Megatron-LM)."""
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.max_lr * step / warmup
    if step >= settings.decay_steps:
        return settings.min_lr
    progress = (step - warmup) / (settings.decay_steps - warmup)
    span = settings.max_lr - settings.min_lr
    return settings.min_lr + span * 0.5 * (1.0 + math.cos(math.pi * progress))


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
            # Other types have no scale to adapt: a window that no run completes, see `adapts`.
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
