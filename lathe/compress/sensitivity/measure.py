"""What a sensitivity analysis measures of a model in torch: a metric on the validation batches, the
cost of quantizing each linear, estimated from gradients, and statistics of weights and inputs.

Shapes: B batch, T tokens, C hidden size, V vocabulary.

`loss` determines perplexity, but what INT8 in one linear adds to it is small compared with its
variation between tokens, so with few tokens the ranking is noise. `kl` compares whole distributions
and is never negative, so it needs far fewer tokens for the same ranking.

`accuracy` is that of the next token at every position, not on cloze passages. It needs one forward
pass instead of many, has a smaller standard error because every position counts, and does not use
the test documents, on which the gate will decide: choosing layers by them would bias it.

Estimates are for all linears and formats at once. A small change d of a model's weights or
activations changes its predictions by KL = 1/2 d'Fd nats per token, F the Fisher information.
Approximating F by its diagonal, and that by squared gradients g, the cost of a linear is

    1/2 * (sum over weights of E[g^2] (w_q - w)^2 + sum over inputs of E[g^2] (x_q - x)^2).

The first-order term, E[g] d, is omitted: for a trained model it is mostly sampling noise, which
would dominate. Sources: the sum over weights and activations is that of FIT (Zandonati et al. 2022,
arXiv:2210.08502); squared gradients for the diagonal, element by element, those of Choi et al.
(2017, arXiv:1612.01543) and SqueezeLLM (Kim et al. 2023, arXiv:2306.07629). HAWQ (Dong et al. 2019,
arXiv:1905.03696) takes the Hessian where this takes the Fisher matrix.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lathe.compress.sensitivity.result import Accumulator, Distribution
from lathe.model.architecture import HEAD
from lathe.model.by_block import backward, hidden_states, on
from lathe.model.fake_quant import round_activation
from lathe.model.gpt import GPT
from lathe.model.integer_weights import fake_quantize_weight
from lathe.model.quantization import ACTIVATION_LEVELS, LinearFormat, QuantizationPlan
from lathe.train.loss import CHUNK_ELEMENTS, head_loss, linear_cross_entropy
from lathe_base.config.settings.types import Format, SensitivityMetric
from lathe_base.errors import Code, UserError


class BatchMetric:
    """`metric(model)` is the metric of every one of `batches` (B, T + 1), a mean over its tokens;
    all batches have equally many, so that the mean of means is the mean over all tokens.

    `kl` is the mean KL(float || model) of the next-token distributions, nats per token. It keeps
    the final hidden states of the float model: C floats per token. Models are measured on the
    batches' device, and may be elsewhere: see `lathe.model.by_block`.
    """

    def __init__(
        self,
        metric: SensitivityMetric,
        batches: Sequence[Tensor],
        float_model: GPT,
    ) -> None:
        self.metric, self.batches = metric, batches
        self.inputs = [tokens[:, :-1] for tokens in batches]
        self.table = float_model.output.weight
        # (B, T, C) each.
        self.reference = hidden_states(float_model, self.inputs) if metric == "kl" else []

    @torch.no_grad()
    def __call__(self, model: GPT) -> list[float]:
        """Measure a model; raises UserError if a value is not finite."""
        states = hidden_states(model, self.inputs)
        with on(self.batches[0].device, model.output, model.head_input):
            values = [self._measure(model, i, x) for i, x in enumerate(states)]
        for value in values:
            if not math.isfinite(value):
                what = f"the model's {self.metric} is {value}"
                raise UserError(what, "use an earlier checkpoint", Code.NOT_FINITE)
        return values

    def _measure(self, model: GPT, i: int, hidden: Tensor) -> float:
        """The metric of batch `i`, given its final hidden states (B, T, C)."""
        device, targets = self.batches[i].device, self.batches[i][:, 1:].flatten()
        hidden = hidden.to(device)
        if self.metric == "loss":
            return float(head_loss(model, hidden, self.batches[i]))
        # Tokens whose logits are in memory at a time: four buffers, in float64.
        rows = max(1, CHUNK_ELEMENTS // (8 * model.config.vocab_size))
        hidden = hidden.flatten(0, 1)
        if self.metric == "accuracy":
            chunks = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
            right = sum(int((model.head(h).argmax(1) == t).sum()) for h, t in chunks)
            return right / len(targets)
        # In float64 from the logits on: float32 rounding of log-probabilities is an error of first
        # order, and KL is of second order in the difference.
        reference, table = self.reference[i].to(device).flatten(0, 1), self.table.to(device)
        total = 0.0
        for h, r in zip(torch.split(hidden, rows), torch.split(reference, rows), strict=True):
            q = model.head(h).double().log_softmax(1)  # (rows, V)
            p = F.linear(r, table).double().log_softmax(1)
            total += float(F.kl_div(q, p, reduction="sum", log_target=True))
        return total / len(targets)


def estimate_costs(
    model: GPT,
    plans: Mapping[Format, QuantizationPlan],
    names: Sequence[str],
    batches: Iterable[Tensor],
) -> dict[Format, dict[str, float]]:
    """Estimated KL(float || this linear alone quantized), nats per token, by format and name.

    Takes one forward and backward pass per batch for all formats; weight gradients are freed as
    soon as they are squared. Computes on the batches' device, one block after the other.

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

    def consume(name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        with torch.no_grad():
            for fmt, plan in plans.items():
                quantized = fake_quantize_weight(weight, plan.linears[name].weight)
                add(fmt, name, weight.grad, quantized - weight)
        weight.grad = None

    def watch_input(name: str, x: Any) -> None:
        if not torch.is_grad_enabled():
            return
        values = x.detach()

        def consume(gradient: Tensor) -> None:
            for fmt, plan in plans.items():
                error = fake_quantize_input(values, plan.linears[name]) - values
                add(fmt, name, gradient, error)

        x.register_hook(consume)

    for name in names:
        if name != HEAD:
            weight: Any = linear_weight(model, name)
            handles.append(weight.register_post_accumulate_grad_hook(partial(consume, name)))
            handles.append(
                model.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, name=name: watch_input(name, *args)
                )
            )
    try:
        for tokens in batches:
            targets = tokens[:, 1:]

            def loss(hidden: Tensor, targets: Tensor = targets) -> Tensor:
                if HEAD in names:
                    watch_input(HEAD, hidden)
                # Of the sum over tokens: its squared gradient grows as their number, since those of
                # single tokens are uncorrelated.
                mean = linear_cross_entropy(hidden, model.output.table(), targets)
                return mean * targets.numel()

            with on(tokens.device, model.output):
                backward(model, tokens[:, :-1], loss)
                if HEAD in names:  # not by a hook: a tied table has the gradient of lookups, too
                    consume(HEAD, linear_weight(model, HEAD))
            n_tokens += targets.numel()
            model.zero_grad(set_to_none=True)  # those of norms and tables
    finally:
        for handle in handles:
            handle.remove()
    return {
        fmt: {n: cost / n_tokens for n, cost in by_name.items()} for fmt, by_name in costs.items()
    }


def fake_quantize_input(x: Tensor, fmt: LinearFormat) -> Tensor:
    """The fake-quantized input of a linear."""
    if fmt.activation is None:
        return x
    if fmt.activation == "dynamic_int8":
        return round_activation(x, fmt.weight.group_size)
    low, high = -ACTIVATION_LEVELS - 1, ACTIVATION_LEVELS
    return torch.fake_quantize_per_tensor_affine(x, fmt.activation_scale, 0, low, high)


def linear_weight(model: GPT, name: str) -> Tensor:
    """The weight (out, in) of a linear; for a tied head the embedding table."""
    path = model.config.tables[-1] if name == HEAD else name
    return model.get_parameter(f"{path}.weight")


@torch.no_grad()
def weight_distributions(
    model: GPT, plan: QuantizationPlan, names: Sequence[str], device: torch.device
) -> dict[str, Distribution]:
    """Statistics of the weights (out, in) of `names`, by name, computed on a device."""
    distributions = {}
    for name in names:
        weight = linear_weight(model, name).to(device)
        values = Accumulator(1)
        _add(values, weight, fake_quantize_weight(weight, plan.linears[name].weight), channel=0)
        distributions[name] = values.distribution()
    return distributions


@torch.no_grad()
def input_distributions(
    model: GPT, plan: QuantizationPlan, names: Sequence[str], batches: Sequence[Tensor]
) -> dict[str, Distribution]:
    """Statistics of the inputs of the linears `names` of a float model, by name.

    Args:
        plan: the scales of `names`.
        batches: tokens (B, T) each.
    """
    accumulators = {name: Accumulator(len(batches)) for name in names}

    def watch(name: str, x: Tensor) -> None:
        x = x.flatten(0, -2)  # (B * T, features)
        _add(accumulators[name], x, fake_quantize_input(x, plan.linears[name]), channel=1)

    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: watch(name, *args)
        )
        for name in names
        if name != HEAD
    ]
    try:
        for hidden in hidden_states(model, batches):
            if HEAD in names:
                watch(HEAD, hidden.to(batches[0].device))
    finally:
        for handle in handles:
            handle.remove()
    return {name: values.distribution() for name, values in accumulators.items()}


def _add(values: Accumulator, x: Tensor, quantized: Tensor, channel: int) -> None:
    """Add `x` and its quantized values, both (rows, columns), with channels in dimension
    `channel`."""
    flat, index = x.flatten(), values.chosen(x.numel())
    sample = flat if index is None else flat[torch.from_numpy(index).to(x.device)]
    values.add(
        sample.float().cpu().numpy(),
        x.amin(1 - channel).float().cpu().numpy(),
        x.amax(1 - channel).float().cpu().numpy(),
        float(x.double().square().sum()),
        float((quantized - x).double().square().sum()),
        x.abs().amax(1).float().cpu().numpy() if channel == 1 else None,
    )
