"""Compares an exported graph with the checkpoint's float model.

Verification compares the graph with the fake-quantized model, with limits wide enough for rounding.
This comparison detects a kernel that rounds more coarsely than the plan: it diverges from the float
model more than fake quantization does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lathe.model.gpt import GPT

KL_SHARE = 1.5
"""Maximum KL divergence of the graph from the float model, relative to that of torch's fake
quantization: two computations that round the same values, with different sums, measure 0.9 to
1.1."""
KL_NOISE = 1e-6  # nats per token: what float32 logits can differ by in any order of summation
HALF_NOISE = 1e-4  # and those of float16 weights, whose rounding moves logits by some 0.01


class Logits(Protocol):
    """A function that computes the logits of an exported model."""

    def logits(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits (1, T, V) of tokens (1, T)."""


@dataclass(frozen=True)
class Flip:
    """The position at which a greedy text of the graph diverges from the float model's choice."""

    prompt: int
    step: int
    float_token: int
    onnx_token: int
    margin: float  # the float model's logit of its own token minus that of the other


@dataclass(frozen=True)
class Fidelity:
    """Comparison with the float model.

    Attributes:
        kl: KL(float || graph), nats per token, over all positions of the prompts.
        torch_kl: the same for the fake-quantized model in torch.
        argmax_agreement: share of positions with the float model's most likely token.
        torch_agreement: share of positions with the fake-quantized model's most likely token.
        logit_error: mean error of logits compared with the fake-quantized model's, in standard
            deviations.
        greedy_agreement: share of the greedy texts' tokens that the float model would choose after
            the same text.
        perplexity, float_perplexity: perplexity of the prompts with the graph and with the float
            model.
        flips: the first token of each greedy text that the float model would not choose.
        noise: the divergence that is allowed for a float model.
    """

    kl: float
    torch_kl: float
    argmax_agreement: float
    greedy_agreement: float
    perplexity: float
    float_perplexity: float
    torch_agreement: float
    logit_error: float
    flips: list[Flip] = field(default_factory=list)
    noise: float = KL_NOISE

    @property
    def kl_limit(self) -> float:
        """The largest `kl` that the plan's rounding explains."""
        return KL_SHARE * self.torch_kl + self.noise


def compare_with_float(
    model: GPT,
    plain: GPT,
    engine: Logits,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    noise: float = KL_NOISE,
) -> Fidelity:
    """Measure the fidelity of an exported model in an engine.

    Args:
        model: fake-quantized, or `plain` if nothing is quantized.
        plain: the float model with the same weights.
        engine: runs the exported model.
        texts: its greedy continuations of `prompts`.
        noise: see `Fidelity`.
    """
    n = sum(map(len, prompts))
    kl, torch_kl, same, flips, chosen = 0.0, 0.0, 0, list[Flip](), 0
    loss, float_loss, torch_same, error = 0.0, 0.0, 0, 0.0
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        # In one pass: every token of the text is judged after the same tokens before it.
        whole = torch.tensor([[*prompt, *text]])
        expected = plain(whole)[0]
        tokens = whole[:, : len(prompt)]
        reference = expected[: len(prompt)]
        logits = torch.from_numpy(engine.logits(tokens.numpy()))[0]
        # Each position of the prompt, between three: float, fake-quantized, and the engine's.
        kl += _divergence(reference, logits)
        torch_logits = model(tokens)[0]
        torch_kl += _divergence(reference, torch_logits)
        torch_same += int((logits.argmax(-1) == torch_logits.argmax(-1)).sum())
        error += float(((logits - torch_logits).abs().mean(-1) / spread(torch_logits)).sum())
        loss += _loss(logits, tokens[0])
        float_loss += _loss(reference, tokens[0])
        same += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        steps = expected[len(prompt) - 1 : -1]  # the logits that each token of the text is from
        predicted, theirs = steps.argmax(-1), torch.tensor(text)
        different = (predicted != theirs).nonzero().flatten().tolist()
        chosen += len(text) - len(different)
        for step in different[:1]:
            a, b = int(predicted[step]), text[step]
            flips.append(Flip(i, step, a, b, float(steps[step, a] - steps[step, b])))
    scored = n - len(prompts)
    return Fidelity(
        kl=kl / n,
        torch_kl=torch_kl / n,
        argmax_agreement=same / n,
        torch_agreement=torch_same / n,
        logit_error=error / n,
        greedy_agreement=chosen / sum(map(len, texts)),
        perplexity=math.exp(loss / scored),
        float_perplexity=math.exp(float_loss / scored),
        flips=flips,
        noise=noise,
    )


def spread(logits: Tensor) -> Tensor:
    """Standard deviation of logits (..., V) over the vocabulary, at least their rounding error, so
    that constant logits can be compared too."""
    rounding = torch.finfo(logits.dtype).eps * logits.abs().amax(-1)
    return logits.std(-1).maximum(rounding).clamp_min(torch.finfo(logits.dtype).tiny)


def _loss(logits: Tensor, tokens: Tensor) -> float:
    """Sum of the negative log-likelihoods of tokens (T,), except the first, given logits (T, V)."""
    return float(F.cross_entropy(logits[:-1], tokens[1:], reduction="sum"))


def _divergence(reference: Tensor, actual: Tensor) -> float:
    """Sum of KL(reference || actual) of logits (T, V), in float64 because differences are small."""
    p, q = (logits.double().log_softmax(-1) for logits in (reference, actual))
    return float(F.kl_div(q, p, reduction="sum", log_target=True))
