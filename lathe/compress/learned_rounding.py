"""Rounding that is learned block by block, after GPTQ.

Integers and scales of a Transformer block's linears are trained until the block's output is close
to that of the float weights. GPTQ makes the output of every linear right by itself. Within a block,
errors of one linear can cancel those of another, and some do not matter, such as those of a gate
that is closed. The integer of a weight is the nearest to a latent value, which starts at the float
weight and is trained with straight-through gradients, together with the scale of its group; no
other block needs to be in memory. An error counts relative to the size of the token's hidden state,
which the next norm divides by.

Sources: Cheng et al. 2023, "Optimize Weight Rounding via Signed Gradient Descent for the
Quantization of LLMs" (AutoRound, arXiv:2309.05516), where rounding starts from the nearest; Chen et
al. 2024, "EfficientQAT" (arXiv:2407.11062), section 3.2.

Shapes: N texts, T tokens, C hidden size, O output channels and I inputs of a linear, G groups of a
row.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lathe.model.block import Block
from lathe.model.fake_quant import FakeQuantLinear
from lathe.model.integer_weights import QuantizedWeight, split, weight_rounding

STEP_TOKENS = 2048  # of a step of learning
TRAVEL = 1.2
"""Learning rate of the latent integers at the first step, times the number of steps: it decays
linearly, so no integer moves further than half of that."""
SCALE_TRAVEL = 0.12  # the same for scales, relative
MARGIN = 0.05  # the least distance of a latent integer from the next one's, when it starts
BETAS = 0.9, 0.95
LATENTS = 14
"""Memory while a block's rounding is learned, in multiples of the weights whose rounding it is."""


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Latent(QuantizedWeight):
    """The weight of a linear as a function of trained parameters.

    Attributes:
        integers: latent ones (O, G, size).
        change: of the scales (O, G, 1), relative.
    """

    def __init__(self, linear: FakeQuantLinear, before: Tensor) -> None:
        super().__init__(linear.quantized.fmt)
        self.low, self.high = self.fmt.range
        self.scale, self.zero = weight_rounding(self.fmt).grid(linear.weight)
        groups = split(linear.weight, self.fmt.group_size)
        rounded = (groups / self.scale).round() + self.zero
        # From one entry of every group, which keeps the lowest integer, the scale is computed
        # again; with zero points, from the highest one too, unless the group ends at zero.
        self.pinned = torch.zeros_like(rounded, dtype=torch.bool)
        self.pinned.scatter_(-1, rounded.argmin(-1, keepdim=True), True)
        if self.fmt.zero_points:
            self.pinned &= groups < 0
            highest = torch.zeros_like(self.pinned)
            highest.scatter_(-1, rounded.argmax(-1, keepdim=True), True)
            self.pinned |= highest & (groups > 0)
        self.pins = rounded
        # The float weight, at most this far from GPTQ's integer: learning begins at its rounding.
        near = 0.5 - MARGIN
        wanted = split(before, self.fmt.group_size) / self.scale + self.zero
        self.integers = nn.Parameter(wanted.clamp(rounded - near, rounded + near))
        self.change = nn.Parameter(torch.zeros_like(self.scale))

    def __call__(self, weight: Tensor) -> Tensor:
        rounded: Tensor = _Round.apply(self.integers)  # type: ignore[no-untyped-call]
        levels = torch.where(self.pinned, self.pins, rounded) - self.zero
        values = levels * (self.scale * (1 + self.change))
        return values.flatten(-2)[:, : weight.shape[1]]

    @torch.no_grad()
    def clamp(self) -> None:
        """Keep the integers within the format's range."""
        self.integers.clamp_(self.low, self.high)

    @torch.no_grad()
    def freeze(self) -> None:
        """Round the scales to those that files can store."""
        scale = weight_rounding(self.fmt).storable(self.scale * (1 + self.change))
        self.scale, self.change = scale, nn.Parameter(torch.zeros_like(scale))


def learn_rounding(
    block: Block,
    before: Mapping[FakeQuantLinear, Tensor],
    inputs: Tensor,
    targets: Tensor,
    steps: int,
    device: torch.device,
) -> tuple[float, float]:
    """Train the rounding of a block whose weights GPTQ has rounded, in place. Rounding the result
    to nearest, as fake quantization and export do, changes nothing.

    Args:
        before: the float weights of the linears with 4-bit groups.
        inputs: hidden states (N, T, C) that the quantized blocks before it compute.
        targets: those that the block should compute from them.
        device: the block's, to which the rows of a step are moved.

    Returns:
        The mean squared error of the output before and after, relative to the targets. If it has
        not fallen, the weights are as before.
    """
    latents = {linear: _Latent(linear, weight) for linear, weight in before.items()}
    # bfloat16 where it is faster; errors are still summed in float32.
    in_half = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def error(rows: Tensor) -> Tensor:
        wanted = targets[rows].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=in_half):
            outputs = block(inputs[rows].to(device))
        importance = 1 / wanted.square().mean(-1, keepdim=True).clamp_(min=1e-12)
        errors: Tensor = (outputs.float() - wanted).square() * importance
        return errors.mean()

    def total() -> float:
        parts = torch.split(torch.arange(len(inputs)), size)
        with torch.no_grad():
            return sum(float(error(part)) * len(part) for part in parts) / len(inputs)

    size = max(1, STEP_TOKENS // inputs.shape[1])
    parameters = [x for latent in latents.values() for x in (latent.integers, latent.change)]
    groups = [
        {"params": parameters[0::2], "lr": TRAVEL / steps},
        {"params": parameters[1::2], "lr": SCALE_TRAVEL / steps},
    ]
    optimizer = torch.optim.Adam(groups, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    generator = torch.Generator().manual_seed(0)
    first = total()
    replaced = {linear: linear.quantized for linear in latents}
    # Texts are drawn without replacement: each counts as often as the others, up to one.
    queue = torch.empty(0, dtype=torch.int64)
    try:
        for linear, latent in latents.items():
            linear.quantized = latent
        for _ in range(steps):
            if len(queue) < size:
                queue = torch.cat((queue, torch.randperm(len(inputs), generator=generator)))
            rows, queue = queue[:size], queue[size:]
            with torch.enable_grad():
                gradients = torch.autograd.grad(error(rows), parameters)
            # Not backward(), which would fill in gradients of norms and biases too.
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            schedule.step()
            for latent in latents.values():
                latent.clamp()
        for latent in latents.values():
            latent.freeze()  # judged with the scales that files will have
        last = total()
        if last < first:
            for linear, latent in latents.items():
                linear.weight.copy_(latent(linear.weight))
    finally:
        for linear, quantized in replaced.items():
            linear.quantized = quantized
    return first, min(first, last)
