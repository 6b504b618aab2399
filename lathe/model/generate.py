"""Generation from a checkpoint: sampling and greedy search over left-padded batches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lathe.errors import UserError
from lathe.model.gpt import GPT, KVCache
from lathe.settings import GenerationSettings


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    eos_id: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Continue every prompt; prompts of different lengths are padded on the left.

    Args:
        prompts: token ids, each at least one.
        settings: strategy, limits and filters, as `Generation` of a recipe.
        eos_id: ends a row, and is left out of its result.

    Returns:
        The new ids alone, `num_return_sequences` rows a prompt, in the prompts' order.

    Raises:
        UserError: an empty prompt, or one that leaves no room within `n_positions`.
    """
    rows = [list(p) for p in prompts for _ in range(settings.num_return_sequences)]
    if not all(rows):
        raise UserError("a prompt is empty", "give at least one token to go on from")
    longest = max(map(len, rows))
    total = longest + settings.max_dec_len
    if total > model.config.n_positions:
        raise UserError(
            f"{longest} prompt tokens and max_dec_len {settings.max_dec_len} exceed the model's "
            f"{model.config.n_positions} positions",
            f"lower Generation.max_dec_len to {max(0, model.config.n_positions - longest)} or less",
        )
    model.eval()
    device = model.wte.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    pad = torch.tensor([longest - len(row) for row in rows], device=device)  # (B,)
    tokens = torch.tensor([[0] * (longest - len(r)) + r for r in rows], device=device)
    cache = KVCache.allocate(model, len(rows), total)
    seen = torch.zeros(len(rows), model.config.vocab_size, dtype=torch.bool, device=device)
    for row, ids in enumerate(rows):
        seen[row, ids] = True
    out: list[list[int]] = [[] for _ in rows]
    alive = torch.ones(len(rows), dtype=torch.bool, device=device)
    step_input = tokens
    for step in range(settings.max_dec_len):
        logits = _last_logits(model, step_input, pad, cache)  # (B, V)
        if eos_id is not None and step < settings.min_dec_len:
            logits[:, eos_id] = -torch.inf
        chosen = _choose(_penalise(logits, seen, settings), settings, generator)  # (B,)
        if eos_id is not None:
            alive &= chosen != eos_id
        for row in torch.nonzero(alive).flatten().tolist():
            out[row].append(int(chosen[row]))
        if not bool(alive.any()):
            break
        seen[torch.arange(len(rows)), chosen] = True
        step_input = chosen[:, None]
    return out


def _last_logits(model: GPT, tokens: Tensor, pad: Tensor, cache: KVCache) -> Tensor:
    T, start = tokens.shape[1], cache.length
    slots = torch.arange(start + T, device=tokens.device)
    queries = slots[start:]
    visible = slots[None, None, :] >= pad[:, None, None]  # padding is never looked at,
    visible = visible | (slots[None, None, :] == queries[None, :, None])  # but by itself
    mask = visible & (slots[None, None, :] <= queries[None, :, None])  # (B, T, S)
    positions = (queries[None] - pad[:, None]).clamp(min=0)  # (B, T)
    hidden = model.hidden(tokens, positions, mask[:, None], cache)
    return model.head(hidden[:, -1]).float()


def _penalise(logits: Tensor, seen: Tensor, settings: GenerationSettings) -> Tensor:
    """Repetition penalty (Keskar et al. 2019): seen tokens' logits shrink towards unlikely."""
    penalty = settings.repetition_penalty
    if penalty == 1.0:
        return logits
    shrunk = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, shrunk, logits)


def _choose(logits: Tensor, settings: GenerationSettings, generator: torch.Generator) -> Tensor:
    """(B, V) -> (B,): the best token, or one drawn after temperature, top-k and top-p."""
    if settings.decode_strategy == "greedy_search":
        return logits.argmax(-1)
    logits = logits / settings.temperature
    if 0 < settings.top_k < logits.shape[-1]:
        kth = logits.topk(settings.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if settings.top_p < 1.0:
        ordered, index = logits.sort(descending=True)
        probability = ordered.softmax(-1)
        beyond = probability.cumsum(-1) - probability >= settings.top_p
        logits = logits.masked_fill(beyond.scatter(1, index, beyond), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
