"""Find a prefix: a few tokens before every text, whose keys and values are float constants.

Massive activations (see `lathe.compress.activation`) occur at the first token of a text, whichever
it is, and at a few tokens with little meaning, which serve as attention sinks. If a prefix contains
such tokens, those of the text have no massive activations, and static scales round them well. The
prefix changes the predictions a little, so it only pays for models that must have static scales.

Source: Chen et al. 2024, "PrefixQuant: Static Quantization Beats Dynamic through Prefixed Outliers
in LLMs" (arXiv:2410.05265), without its training.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lathe.model.gpt import GPT

MASSIVE = 100.0
"""Ratio of a token's largest input to the median token's above which its activations count as
massive."""


@torch.no_grad()
def massive_tokens(model: GPT, batches: Sequence[Tensor]) -> list[int]:
    """Tokens with massive activations in a float model, the most frequent first.

    Args:
        batches: tokens (B, T) each.
    """
    counts: Counter[int] = Counter()
    for tokens in batches:
        is_massive = torch.zeros_like(tokens, dtype=torch.bool)

        def observe(_module: object, inputs: tuple[Tensor, ...], seen: Tensor = is_massive) -> None:
            peaks = inputs[0].abs().amax(-1)  # (B, T)
            seen |= peaks > MASSIVE * peaks.median()

        linears = (model.get_submodule(name) for name in model.config.linear_names())
        hooks = [linear.register_forward_pre_hook(observe) for linear in linears]
        try:
            model.eval().hidden(tokens)
        finally:
            for hook in hooks:
                hook.remove()
        counts.update(tokens[is_massive].tolist())
    return [token for token, _ in counts.most_common()]


@contextmanager
def prefixed(model: GPT, tokens: Sequence[int]) -> Iterator[None]:
    """`set_prefix` for the duration of a `with` block; afterwards the model is as before."""
    before = model.config.prefix_tokens
    model.set_prefix(tokens)
    try:
        yield
    finally:
        model.set_prefix(before)
