"""Generation from a checkpoint: sampling, greedy search and beam search over left-padded batches.

Strategies and filters are defined as in transformers' `generate`, which gives the same tokens.
"""

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from lathe.model.gpt import GPT
from lathe_base.config.settings import GenerationSettings
from lathe_base.errors import Code, UserError
from lathe_base.progress import Bar


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    eos_id: int | Collection[int] | None = None,
    seed: int = 0,
    progress: Bar | None = None,
) -> list[list[int]]:
    """Continue every prompt; prompts of different lengths are padded on the left.

    Args:
        prompts: token ids, at least one per prompt.
        settings: strategy, limits and filters, as `Generation` of a recipe.
        eos_id: token or tokens that end a row; they are not part of the result.
        progress: advanced by `max_dec_len` in total.

    Returns:
        The new ids only, `num_return_sequences` rows per prompt, in the order of the prompts; those
        of a beam search best first.

    Raises:
        UserError: an empty prompt, one too long for `n_positions`, or more sequences requested than
            the strategy can return.
    """
    _check(prompts, settings, model.config.n_positions)
    model.eval()
    device = model.embedding.weight.device
    is_beam = settings.decode_strategy == "beam_search"
    ends = [] if eos_id is None else [eos_id] if isinstance(eos_id, int) else sorted(eos_id)
    search: BeamSearch | _Draw
    if is_beam:
        search = BeamSearch(len(prompts), settings, ends, device)
    else:
        search = _Draw(settings, ends, torch.Generator(device).manual_seed(seed))
    # Beams of a prompt are rows from the start; samples of a prompt are independent rows.
    copies = settings.num_beams if is_beam else settings.num_return_sequences
    rows = _Rows(model, prompts, copies, settings.max_dec_len)
    for step in range(settings.max_dec_len):
        scores = rows.logits.log_softmax(-1) if is_beam else rows.logits
        # Repetition penalty (Keskar et al. 2019): lowers the scores of seen tokens.
        penalty = settings.repetition_penalty
        lowered = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(rows.seen, lowered, scores)
        if step < settings.min_dec_len:
            scores[:, ends] = -torch.inf  # no text may end yet
        tokens, parents = search.step(scores)
        if search.done:
            break
        if progress:
            progress.advance()
        rows.advance(tokens, parents)
    if progress:
        progress.advance(settings.max_dec_len - step)
    return search.result()


def _check(
    prompts: Sequence[Sequence[int]], settings: GenerationSettings, n_positions: int
) -> None:
    wanted, strategy = settings.num_return_sequences, settings.decode_strategy
    if strategy == "greedy_search" and wanted > 1:
        raise UserError(
            f"Generation.num_return_sequences is {wanted}: greedy_search gives one per prompt",
            "set it to 1, or Generation.decode_strategy to sampling or beam_search",
            Code.CONFLICTING_OPTIONS,
        )
    if strategy == "beam_search" and wanted > settings.num_beams:
        raise UserError(
            f"Generation.num_return_sequences {wanted} is above num_beams {settings.num_beams}",
            f"raise Generation.num_beams to {wanted}, or ask for fewer sequences",
            Code.CONFLICTING_OPTIONS,
        )
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise UserError(
                f"prompt {number} is empty", "give at least one token", Code.INVALID_VALUE
            )
        room = n_positions - len(prompt)
        if room < settings.max_dec_len:
            raise UserError(
                f"prompt {number} of {len(prompt)} tokens and max_dec_len {settings.max_dec_len} "
                f"exceed the model's {n_positions} positions",
                f"lower Generation.max_dec_len to {room} or less"
                if room > 0
                else f"shorten it to fewer than {n_positions} tokens",
                Code.TOO_LONG,
            )


class _Rows:
    """`copies` adjacent rows per prompt, with their cache and the logits of their next tokens.

    Attributes:
        logits: (B, V) float32 of each row's next token.
        seen: (B, V) True for the ids in a row's prompt and continuation.
    """

    def __init__(
        self, model: GPT, prompts: Sequence[Sequence[int]], copies: int, max_len: int
    ) -> None:
        longest = max(map(len, prompts))
        device = model.embedding.weight.device
        self.model, self.cache = model, model.new_cache(len(prompts), longest + max_len)
        self.pad = torch.tensor([longest - len(p) for p in prompts], device=device)  # (B,)
        self.seen = torch.zeros(len(prompts), model.config.vocab_size, dtype=torch.bool).to(device)
        for row, ids in enumerate(prompts):
            self.seen[row, list(ids)] = True
        padded = [[0] * (longest - len(p)) + list(p) for p in prompts]
        # Each prompt is read once; its cache and logits are then copied for every row.
        self.logits = self._forward(torch.tensor(padded, device=device))
        index = torch.arange(len(prompts), device=device).repeat_interleave(copies)
        self.logits = self.logits[index]
        self._reorder(index)

    def advance(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Replace row i by row `parents[i]` (default: itself), extended by `tokens[i]`."""
        if parents is not None:
            self._reorder(parents)
        self.seen[torch.arange(len(tokens)), tokens] = True
        self.logits = self._forward(tokens[:, None])

    def _reorder(self, index: Tensor) -> None:
        self.cache.reorder(index)
        self.pad, self.seen = self.pad[index], self.seen[index]

    def _forward(self, tokens: Tensor) -> Tensor:
        """(B, T) tokens that follow the cached ones -> (B, V) logits after the last of them."""
        # Slots of the cache: the prefix, the row's padding, then its tokens.
        start = self.cache.length
        slots = torch.arange(start + tokens.shape[1], device=tokens.device)
        queries = slots[start:]
        n_prefix = self.model.config.n_prefix
        visible = slots[None, None, :] >= n_prefix + self.pad[:, None, None]
        visible = visible | (slots < n_prefix)  # no query attends to padding,
        visible = visible | (slots[None, None, :] == queries[None, :, None])  # except to itself
        mask = visible & (slots[None, None, :] <= queries[None, :, None])  # (B, T, S)
        positions = (queries[None] - self.pad[:, None]).clamp(min=n_prefix)  # (B, T)
        hidden = self.model.hidden(tokens, positions, mask[:, None], self.cache)
        return self.model.head(hidden[:, -1]).float()


class _Draw:
    """Sampling and greedy search: rows are independent."""

    def __init__(
        self, settings: GenerationSettings, ends: Sequence[int], generator: torch.Generator
    ) -> None:
        self.settings, self.ends, self.generator = settings, ends, generator
        self.end_ids = torch.tensor(ends, dtype=torch.long, device=generator.device)
        self.tokens: list[Tensor] = []  # each (B,)
        self.ended = torch.zeros((), dtype=torch.bool, device=generator.device)

    def step(self, scores: Tensor) -> tuple[Tensor, None]:
        """(B, V) -> the next token (B,) of every row."""
        if self.settings.decode_strategy == "greedy_search":
            chosen = scores.argmax(-1)
        else:
            probabilities = filtered(scores, self.settings).softmax(-1)
            chosen = torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]
        self.tokens.append(chosen)
        self.ended = self.ended | torch.isin(chosen, self.end_ids)
        return chosen, None

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.settings.max_dec_len or bool(self.ended.all())

    def result(self) -> list[list[int]]:
        rows = torch.stack(self.tokens, dim=1).tolist()
        return [list(takewhile(lambda token: token not in self.ends, row)) for row in rows]


def filtered(logits: Tensor, settings: GenerationSettings) -> Tensor:
    """(B, V) logits to sample from: temperature, then top-k, then top-p of the rest (Holtzman et
    al. 2020: the fewest most likely tokens whose total probability reaches p); others are -inf."""
    logits = logits / settings.temperature
    if 0 < settings.top_k < logits.shape[-1]:
        kth = logits.topk(settings.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if settings.top_p < 1.0:
        ordered, index = logits.sort(descending=True)
        probability = ordered.softmax(-1)
        # Subtracting its own probability keeps the token that crosses p.
        beyond = probability.cumsum(-1) - probability >= settings.top_p
        logits = logits.masked_fill(beyond.scatter(1, index, beyond), -torch.inf)
    return logits


class BeamSearch:
    """State of a beam search for P prompts with N = `num_beams` rows each; the caller runs the
    model.

    The rules are those of transformers' `generate` with `early_stopping=False`. There are twice as
    many candidates as beams, and only those among the best `num_beams` may finish. A finished
    continuation scores log-probability / length ** length_penalty, where the length includes the
    final EOS.
    """

    def __init__(
        self, prompts: int, settings: GenerationSettings, ends: Sequence[int], device: torch.device
    ) -> None:
        N = settings.num_beams
        self.settings, self.ends = settings, ends
        self.end_ids = torch.tensor(ends, dtype=torch.long, device=device)
        self.tokens = torch.empty(prompts, N, 0, dtype=torch.long, device=device)
        self.scores = torch.full((prompts, N), -torch.inf, device=device)
        self.scores[:, 0] = 0.0  # the beams start equal: count one
        self.first_row = N * torch.arange(prompts, device=device)[:, None]
        self.ended: list[list[tuple[float, list[int]]]] = [[] for _ in range(prompts)]
        self.is_open = [True] * prompts

    def step(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Extend every beam by a token.

        Args:
            log_probs: (P * N, V) of the next token; the beams of a prompt are adjacent rows.

        Returns:
            The next tokens (P * N,), and the row (P * N,) that each of them extends.
        """
        P, N = self.scores.shape
        V = log_probs.shape[-1]
        totals = self.scores[:, :, None] + log_probs.view(P, N, V)
        scores, best = totals.flatten(1).topk(2 * N)  # (P, 2N), of which at most N end
        beams = best // V
        tokens = torch.cat([_take(self.tokens, beams), (best % V)[:, :, None]], dim=2)
        is_last = tokens.shape[2] == self.settings.max_dec_len
        ends = torch.full_like(best, is_last, dtype=torch.bool)  # (P, 2N)
        ends |= torch.isin(tokens[:, :, -1], self.end_ids)
        # Keep the N best finished continuations of every prompt whose search is still open.
        final = self._with_length(scores, tokens)
        for prompt, rank in ends[:, :N].nonzero().tolist():
            if self.is_open[prompt]:
                self.ended[prompt].append((final[prompt][rank], tokens[prompt, rank].tolist()))
        self.ended = [sorted(e, key=lambda entry: -entry[0])[:N] for e in self.ended]
        self.scores, kept = scores.masked_fill(ends, -torch.inf).topk(N)
        self.tokens = _take(tokens, kept)
        # Close the prompts whose best running beam, if it ended now, would not be among these.
        hopes = self._with_length(self.scores[:, 0], self.tokens)
        for prompt, (hope, ended) in enumerate(zip(hopes, self.ended, strict=True)):
            if len(ended) == N and hope <= ended[-1][0]:
                self.is_open[prompt] = False
        return self.tokens[:, :, -1].flatten(), (self.first_row + beams.gather(1, kept)).flatten()

    @property
    def done(self) -> bool:
        """Whether no running beam can still win."""
        return self.tokens.shape[2] == self.settings.max_dec_len or not any(self.is_open)

    def result(self) -> list[list[int]]:
        """The `num_return_sequences` best continuations of every prompt, best first, without
        EOS."""
        return [
            ids[:-1] if ids[-1] in self.ends else ids
            for ended in self.ended
            for _, ids in ended[: self.settings.num_return_sequences]
        ]

    def _with_length(self, scores: Tensor, tokens: Tensor) -> Any:
        return (scores / tokens.shape[2] ** self.settings.length_penalty).tolist()


def _take(tokens: Tensor, beams: Tensor) -> Tensor:
    """(P, N, T) and (P, K) -> (P, K, T)."""
    return tokens.gather(1, beams[:, :, None].expand(-1, -1, tokens.shape[2]))
