"""Knowledge distillation: a student learns the next-token distribution of a frozen teacher.

Shapes are those of `lathe.train.loss`; the teacher's hidden size may differ, its vocabulary not.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lathe.model.block import Mask
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.train.loss import (
    add_weight_gradient,
    chunk_rows,
    compute_dtypes,
    keep_gradients,
    kept_gradients,
)
from lathe_base.config.settings import DistillSettings
from lathe_base.errors import Code, UserError

BLOCK_ELEMENTS = 2**20
"""Logits per block of elementwise operations on a CPU: 4 MiB per operand in float32, so that all
operands stay in the cache. At V = 49152 that is 21 tokens, and 0.4 of the time that the operations
take on a whole chunk."""


@dataclass(frozen=True)
class Guidance:
    """A teacher's output for a micro-batch: hidden states (B, T, C') and head (V, C')."""

    hidden: Tensor
    table: Tensor
    settings: DistillSettings


def teacher_folder(settings: DistillSettings, parent: Path) -> Path | None:
    """The teacher's checkpoint, or None; `parent` means the model that the stage was given."""
    if settings.teacher is None:
        return None
    return parent if settings.teacher == "parent" else Path(settings.teacher)


class Teacher:
    """A trained model, in evaluation mode and without gradients."""

    def __init__(self, model: GPT, settings: DistillSettings) -> None:
        self.model, self.settings = model.eval().requires_grad_(False), settings

    def check(self, student: GPTConfig) -> None:
        """Raise UserError if teacher and student are not compatible."""
        teacher = self.model.config
        if teacher.vocab_size != student.vocab_size or teacher.n_positions < student.n_positions:
            raise UserError(
                f"the teacher has {teacher.vocab_size} ids and {teacher.n_positions} positions, "
                f"the model {student.vocab_size} and {student.n_positions}",
                "choose a teacher with the same tokenizer and at least as many positions",
                Code.MISMATCH,
            )
        if self.settings.hidden and teacher.n_embd != student.n_embd:
            raise UserError(
                f"hidden states of {teacher.n_embd} (teacher) and {student.n_embd} cannot be "
                "compared",
                "set Compress.Distill.hidden to 0",
                Code.MISMATCH,
            )

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, mask: Mask | None = None, positions: Tensor | None = None
    ) -> Guidance:
        """Run the teacher on ids (B, T), under the caller's autocast.

        Args:
            mask: see `GPT.hidden`.
            positions: (B, T) in the text.
        """
        if positions is not None:
            positions = positions + self.model.config.n_prefix
        hidden = self.model.hidden(tokens, positions, mask)
        if self.model.head_input is not None:
            hidden = self.model.head_input(hidden)
        return Guidance(hidden, self.model.output.table(), self.settings)


def distillation_loss(hidden: Tensor, weight: Tensor, targets: Tensor, guide: Guidance) -> Tensor:
    """Mean over tokens, in nats, of (1 - alpha) cross-entropy + alpha temperature^2 KL(teacher ||
    student), both distributions at the temperature (Hinton et al. 2015, arXiv:1503.02531), and
    `hidden` times 1 - cosine of the two hidden states (DistilBERT, Sanh et al. 2019,
    arXiv:1910.01108).

    Computed in chunks of tokens with gradients in the forward pass, like
    `lathe.train.loss.linear_cross_entropy`.

    Args:
        hidden: (B, T, C) of the student.
        weight: (V, C) its head.
        targets: (B, T) ids.
    """
    settings = guide.settings
    loss: Tensor = _Distillation.apply(  # type: ignore[no-untyped-call]
        *(hidden, weight, targets, guide.hidden, guide.table),
        *(settings.alpha, settings.temperature),
    )
    if settings.hidden:
        away = 1 - F.cosine_similarity(hidden.float(), guide.hidden.float(), dim=2)
        loss = loss + settings.hidden * away.mean()
    return loss


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        alpha: float,
        temperature: float,
    ) -> Tensor:
        dtype, wide = compute_dtypes(hidden)
        h, w = hidden.flatten(0, 1).to(dtype), weight.to(dtype)
        h_teacher, w_teacher = teacher_hidden.flatten(0, 1).to(dtype), teacher_weight.to(dtype)
        N, V = len(h), len(w)
        ids = targets.flatten()[:, None]
        grad_hidden = torch.empty_like(h, dtype=hidden.dtype)
        grad_weight: Tensor | None = None
        loss = torch.zeros((), dtype=wide, device=h.device)
        n = chunk_rows(N, 2 * V)
        logits, wanted = h.new_empty(2, n, V)
        # The rows of a chunk that go through the operations together: on a GPU all of them, as its
        # memory is fast, and its kernels are worth launching for many elements only.
        rows = min(n, max(1, BLOCK_ELEMENTS // V)) if h.device.type == "cpu" else n
        wide_buffers = h.new_empty(3, rows, V, dtype=wide)
        for chunk in (slice(i, min(i + n, N)) for i in range(0, N, n)):
            x = h[chunk]
            # The student's logits, which are replaced by the loss's slope block by block.
            slope = torch.mm(x, w.T, out=logits[: len(x)])
            torch.mm(h_teacher[chunk], w_teacher.T, out=wanted[: len(x)])
            for i in range(0, len(x), rows):
                block = slice(i, min(i + rows, len(x)))
                narrow, target = slope[block], ids[chunk][block]
                p, q, other = wide_buffers[:, : len(narrow)]
                _log_softmax(wanted[block], temperature, out=q)
                _log_softmax(narrow, temperature, out=p)
                # KL(teacher || student) is the sum of q (log q - log p): while both are logarithms,
                # their difference; then q becomes the teacher's probabilities, in its place.
                torch.sub(q, p, out=other)
                loss += alpha * temperature**2 * torch.dot(other.flatten(), q.exp_().flatten())
                hard = p if temperature == 1.0 else _log_softmax(narrow, 1.0, out=other)
                log_hard = hard.gather(1, target)
                loss -= (1 - alpha) * log_hard.sum()
                # d loss / d logits times N: of alpha T^2 KL it is alpha T (p - q), at the
                # temperature T; of the rest (1 - alpha) (p less the target's 1), at temperature 1.
                # The last operation rounds to the logits' type; the target's is computed apart.
                target_slope = p.gather(1, target).exp_() - q.gather(1, target)
                target_slope = alpha * temperature * target_slope
                target_slope = target_slope + (1 - alpha) * (log_hard.exp_() - 1)
                if temperature == 1.0:
                    torch.sub(p.exp_(), q, alpha=alpha, out=narrow)
                else:
                    p.exp_().sub_(q).mul_(alpha * temperature)
                    torch.add(p, hard.exp_(), alpha=1 - alpha, out=narrow)
                narrow.scatter_(1, target, target_slope.to(dtype))
            grad_hidden[chunk] = slope @ w
            grad_weight = add_weight_gradient(grad_weight, slope, x, wide)
        keep_gradients(ctx, grad_hidden, grad_weight, hidden.shape, weight.dtype)
        return loss / N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, grad), None, None, None, None, None


def _log_softmax(logits: Tensor, temperature: float, out: Tensor) -> Tensor:
    """Writes the log-softmax of logits (n, V) / temperature to `out`, in its dtype."""
    if temperature == 1.0:
        return torch.log_softmax(logits, 1, out.dtype, out=out)
    return torch.log_softmax(out.copy_(logits).div_(temperature), 1, out=out)
