"""Estimate the cost of quantizing each linear from gradients, for all linears and formats at once.

A small change d of a model's weights or activations changes its predictions by
KL = 1/2 d'Fd nats per token, F the Fisher information. Approximating F by its
diagonal, and that by squared gradients g, the cost of a linear is

    1/2 * (sum over weights of E[g^2] (w_q - w)^2 + sum over inputs of E[g^2] (x_q - x)^2).

Sources: the sum over weights and activations is that of FIT (Zandonati et al. 2022,
arXiv:2210.08502); squared gradients for the diagonal, element by element, those of Choi et al.
(2017, arXiv:1612.01543) and SqueezeLLM (Kim et al. 2023, arXiv:2306.07629). HAWQ (Dong et al.
2019, arXiv:1905.03696) takes the Hessian where this takes the Fisher matrix.

The first-order term, E[g] d, is omitted: for a trained model it is mostly sampling noise, which
would dominate.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lathe.compress.sensitivity.statistics import (
    fake_quantize_input,
    linear_weight,
)
from lathe.model.architecture import HEAD
from lathe.model.gpt import GPT
from lathe.model.integer_weights import fake_quantize_weight
from lathe.model.quantization import QuantizationPlan
from lathe.train.loss import linear_cross_entropy
from lathe_base.config.settings.types import Format


def estimate_costs(
    model: GPT,
    plans: Mapping[Format, QuantizationPlan],
    names: Sequence[str],
    batches: Iterable[Tensor],
) -> dict[Format, dict[str, float]]:
    """Estimated KL(float || this linear alone quantized), nats per token, by format and name.

    Takes one forward and backward pass per batch for all formats; weight gradients are freed as
    soon as they are squared.

    Args:
        model: in float; its parameters' gradients are None afterwards.
        plans: the formats and scales of `names`, by format name.
        batches: tokens (B, T + 1) each.
    """
    costs = {fmt: dict.fromkeys(names, 0.0) for fmt in plans}
    n_tokens = 0
    handles: list[Any] = []

    def add(fmt: Format, name: str, gradient: Tensor, error: Tensor) -> None:
        costs[fmt][name] += float((gradient * error).square().sum(dtype=torch.float64)) / 2

    def watch_weight(name: str) -> None:
        def consume(weight: Tensor) -> None:
            assert weight.grad is not None
            with torch.no_grad():
                for fmt, plan in plans.items():
                    quantized = fake_quantize_weight(weight, plan.linears[name].weight)
                    add(fmt, name, weight.grad, quantized - weight)
            weight.grad = None

        weight: Any = linear_weight(model, name)
        handles.append(weight.register_post_accumulate_grad_hook(consume))

    def watch_input(name: str, x: Any) -> None:
        values = x.detach()

        def consume(gradient: Tensor) -> None:
            for fmt, plan in plans.items():
                error = fake_quantize_input(values, plan.linears[name]) - values
                add(fmt, name, gradient, error)

        x.register_hook(consume)

    for name in names:
        watch_weight(name)
        if name != HEAD:
            handles.append(
                model.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, name=name: watch_input(name, *args)
                )
            )
    try:
        for tokens in batches:
            hidden, targets = model.hidden(tokens[:, :-1]), tokens[:, 1:]
            if HEAD in names:
                watch_input(HEAD, hidden)
            loss: Any = linear_cross_entropy(hidden, model.output.table(), targets)
            # Of the sum over tokens: its squared gradient grows as their number, since those of
            # single tokens are uncorrelated.
            (loss * targets.numel()).backward()
            n_tokens += targets.numel()
            model.zero_grad(set_to_none=True)
    finally:
        for handle in handles:
            handle.remove()
    return {
        fmt: {n: cost / n_tokens for n, cost in by_name.items()} for fmt, by_name in costs.items()
    }
