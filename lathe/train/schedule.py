"""PaddleFleetX's cosine schedule with linear warm-up, gradient clipping, and which parameters have
weight decay."""

import math

from lathe.model.architecture import Architecture
from lathe_base.config.settings import GradClip, LearningRate, OptimizerSettings

PACT_LR_FACTOR = 1000.0  # PaddleSlim's learning rate of a clipping bound, relative to weights


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
