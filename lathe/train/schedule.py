"""PaddleFleetX's cosine schedule with linear warm-up, and which parameters have weight decay."""

import math

from lathe.config.settings import LearningRate
from lathe.model.architecture import Architecture

PACT_LR_FACTOR = 1000.0  # PaddleSlim's learning rate of a clipping bound, relative to weights


def is_decayed(name: str, architecture: Architecture) -> bool:
    """Whether a parameter has weight decay: all but biases, norms and clipping bounds do."""
    return not name.endswith(("bias", "alpha")) and not architecture.is_norm(name)


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
