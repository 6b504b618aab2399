"""Beam search: chooses the beams to extend and collects the finished continuations.

The rules are those of transformers' `generate` with `early_stopping=False`. There are twice as many
candidates as beams, and only those among the best `num_beams` may finish. A finished continuation
scores log-probability / length ** length_penalty, where the length includes the final EOS.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lathe_base.config.settings import GenerationSettings


class BeamSearch:
    """State of the search for P prompts with N = `num_beams` rows each; the caller runs the
    model."""

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
        self._collect(tokens, scores, ends)
        self.scores, kept = scores.masked_fill(ends, -torch.inf).topk(N)
        self.tokens = _take(tokens, kept)
        self._close()
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

    def _collect(self, tokens: Tensor, scores: Tensor, ends: Tensor) -> None:
        """Keep the N best finished continuations of every prompt whose search is still open."""
        N = self.scores.shape[1]
        final = self._with_length(scores, tokens)
        for prompt, rank in ends[:, :N].nonzero().tolist():
            if self.is_open[prompt]:
                self.ended[prompt].append((final[prompt][rank], tokens[prompt, rank].tolist()))
        self.ended = [sorted(e, key=lambda entry: -entry[0])[:N] for e in self.ended]

    def _close(self) -> None:
        """Close prompts whose best running beam, if it ended now, would not be among the N best
        finished continuations."""
        N = self.scores.shape[1]
        hopes = self._with_length(self.scores[:, 0], self.tokens)
        for prompt, (hope, ended) in enumerate(zip(hopes, self.ended, strict=True)):
            if len(ended) == N and hope <= ended[-1][0]:
                self.is_open[prompt] = False

    def _with_length(self, scores: Tensor, tokens: Tensor) -> Any:
        return (scores / tokens.shape[2] ** self.settings.length_penalty).tolist()


def _take(tokens: Tensor, beams: Tensor) -> Tensor:
    """(P, N, T) and (P, K) -> (P, K, T)."""
    return tokens.gather(1, beams[:, :, None].expand(-1, -1, tokens.shape[2]))
