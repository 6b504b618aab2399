"""Small models with random weights."""

from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT

SERVED = GPTConfig(384, 1024, 64, 16, (4, 4), (96, 96))
"""Config of the model that the tests' server serves."""


def small_config(**changes: object) -> GPTConfig:
    values: dict[str, object] = {
        "vocab_size": 384,
        "n_positions": 64,
        "n_embd": 48,
        "head_dim": 12,
        "n_head": (4, 4),
        "n_inner": (96, 96),
    }
    return GPTConfig(**(values | changes))  # type: ignore[arg-type]


def small_gpt() -> GPT:
    """Make a model with weights large enough for distinct logits."""
    model = GPT(small_config())
    model.initialize(0.2, seed=1)
    return model.eval()
