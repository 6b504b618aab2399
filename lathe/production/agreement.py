"""Compare served tokens with the checkpoint's own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lathe.config.settings import GenerationSettings
from lathe.model.checkpoint import Checkpoint
from lathe.model.generate import generate
from lathe.runtime.prompt import encode_prompts

GREEDY = GenerationSettings(decode_strategy="greedy_search", min_dec_len=0)


@dataclass(frozen=True)
class Divergence:
    """Where a served continuation diverges from the checkpoint's.

    `gap`: the checkpoint's logit of its own choice minus that of the served token. A gap within the
    export's numeric tolerance is a tie, which the two may break differently.
    """

    position: int
    expected: int
    served: int
    gap: float


def greedy_tokens(checkpoint: Checkpoint, prompt: str, max_tokens: int) -> list[int]:
    """The checkpoint's own greedy continuation, in torch."""
    settings = GREEDY.model_copy(update={"max_dec_len": max_tokens})
    return generate(checkpoint.model, [_ids(checkpoint, prompt)], settings, checkpoint.end_ids)[0]


@torch.inference_mode()
def find_divergence(
    checkpoint: Checkpoint, prompt: str, expected: Sequence[int], served: Sequence[int]
) -> Divergence | None:
    """The first position where two continuations differ, or None; an early end counts as EOS."""
    if list(expected) == list(served):
        return None
    eos = -1 if checkpoint.eos_id is None else checkpoint.eos_id
    pairs = zip([*expected, eos], [*served, eos], strict=False)
    position, (mine, theirs) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    ids = [*_ids(checkpoint, prompt), *expected[:position]]
    logits = checkpoint.model(torch.tensor([ids]))[0, -1]  # (V,)
    return Divergence(position, mine, theirs, float(logits[mine] - logits[theirs]))


@torch.inference_mode()
def clear_choices(
    checkpoint: Checkpoint, prompt: str, tokens: Sequence[int], tolerance: float
) -> int:
    """How many of `tokens`, from the first, the checkpoint prefers to every other token by a logit
    margin above `tolerance`, so that rounding cannot change them."""
    prefix = _ids(checkpoint, prompt)
    logits = checkpoint.model(torch.tensor([[*prefix, *tokens]]))[0, len(prefix) - 1 : -1]  # (n, V)
    best = logits.topk(2)
    gaps = best.values[:, 0] - best.values[:, 1]
    is_clear = (best.indices[:, 0] == torch.tensor(tokens)) & (gaps > tolerance)
    return int(is_clear.int().cumprod(0).sum())


def _ids(checkpoint: Checkpoint, prompt: str) -> list[int]:
    return encode_prompts(checkpoint.tokenizer, [prompt])[0]
