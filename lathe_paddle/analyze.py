"""Sensitivity analysis: what INT8 costs in each linear, with PaddleSlim's fake quantization.

The loop is that of `lathe.compress.sensitivity.rank`, because PaddleSlim 2.6.0 sorts the ranking of
its own `AnalysisQAT` in the wrong order.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from lathe.compress.plan import make_plan, quantizable
from lathe.compress.sensitivity.rank import (
    run_analysis,
    validation_batches,
)
from lathe.compress.sensitivity.result import Accumulator, Distribution, SensitivityResult
from lathe.data.tokens import TokenDataset
from lathe.model.architecture import HEAD
from lathe.train.batches import EvalBatches, calibration_batches
from lathe_base.artifacts.journal import Journal
from lathe_base.config.settings import Recipe
from lathe_base.config.settings.types import Format
from lathe_base.errors import Code, UserError
from lathe_paddle import fake_quant
from lathe_paddle.checkpoint import PaddleCheckpoint, load_checkpoint
from lathe_paddle.gpt import GPT, next_token_loss
from lathe_paddle.workers import choose_device

CHUNK_ELEMENTS = 2**24  # of the float64 logits that are held at a time


def analyze(recipe: Recipe, model: Path, data: Path, output: Path) -> SensitivityResult:
    """See `lathe.compress.sensitivity.analyze.analyze`."""
    paddle.set_device(choose_device(recipe))
    checkpoint = load_checkpoint(model)

    def open_model(tokens: TokenDataset, journal: Journal) -> PaddleModel:
        return PaddleModel(recipe, checkpoint, tokens, journal)

    return run_analysis(recipe, model, data, output, checkpoint, open_model)


class PaddleModel:
    """See `lathe.compress.sensitivity.rank.AnalyzedModel`."""

    engine = "paddle"
    forms: Sequence[Format] = ("static_int8",)
    group_size = 0

    def __init__(
        self, recipe: Recipe, checkpoint: PaddleCheckpoint, data: TokenDataset, journal: Journal
    ) -> None:
        validation = validation_batches(recipe, data)
        self.calibration = list(calibration_batches(recipe, data))
        self.model = checkpoint.model
        settings = recipe.Compress.Quantization
        plan = self.model.config.quantization
        if plan is None:  # a float model: its scales have to be calibrated
            plan = make_plan(self.model.config, settings)
            with fake_quant.inserted(self.model, plan):
                scales = journal.recall(
                    "scales", lambda: fake_quant.calibrate(self.model, self.calibration), dict
                )
            plan = plan.with_scales(scales)
        self.plan = plan
        self.names: Sequence[str] = list(self.plan.linears)
        possible = quantizable(self.model.config, settings)
        self.float_already: Sequence[str] = [name for name in possible if name not in self.names]
        self._measure = PaddleBatchMetric(recipe.Sensitivity.metric, validation, self.model)

    def measure(self, formats: Mapping[str, Format]) -> list[float]:
        """The metric of every validation batch, with only these linears in INT8."""
        with fake_quant.inserted(self.model, self.plan.part(formats)):
            return self._measure(self.model)

    def estimates(self) -> dict[Format, dict[str, float]]:
        """The estimate of `lathe.compress.sensitivity.measure`."""
        costs = dict.fromkeys(self.names, 0.0)
        n_tokens = 0

        def watch(name: str, x: Tensor) -> None:
            values = x.detach()
            error = self._rounded_input(name, values) - values

            def add(gradient: Tensor) -> None:
                costs[name] += _half_square(gradient, error)

            x.register_hook(add)

        with _watching(self.model, self.names, watch):
            for tokens in map(paddle.to_tensor, self.calibration):
                targets = tokens[:, 1:].size
                (next_token_loss(self.model, tokens) * targets).backward()
                for name in self.names:
                    weight = linear_weight(self.model, name)
                    error = self._rounded(name, weight) - weight
                    costs[name] += _half_square(weight.grad, error)
                self.model.clear_gradients()
                n_tokens += targets
        return {"static_int8": {name: cost / n_tokens for name, cost in costs.items()}}

    @paddle.no_grad()
    def weights(self) -> dict[str, Distribution]:
        """Statistics of the weights, by the linear's name."""
        distributions = {}
        for name in self.names:
            values = Accumulator(1)
            weight = linear_weight(self.model, name)
            quantized = self._rounded(name, weight)
            _add(values, weight, quantized, channel=0 if name == HEAD else 1)
            distributions[name] = values.distribution()
        return distributions

    @paddle.no_grad()
    def inputs(self) -> dict[str, Distribution]:
        """Statistics of the inputs, by the linear's name."""
        accumulators = {name: Accumulator(len(self.calibration)) for name in self.names}

        def watch(name: str, x: Tensor) -> None:
            x = x.flatten(0, -2)  # (B * T, features)
            quantized = self._rounded_input(name, x)
            _add(accumulators[name], x, quantized, channel=1)

        with _watching(self.model, self.names, watch):
            for tokens in self.calibration:
                self.model(paddle.to_tensor(tokens))
        return {name: values.distribution() for name, values in accumulators.items()}

    def _rounded(self, name: str, weight: Tensor) -> Tensor:
        channel = 0 if name == HEAD else 1
        return fake_quant.fake_quantize_weight(weight, self.plan.linears[name].weight, channel)

    def _rounded_input(self, name: str, x: Tensor) -> Tensor:
        return fake_quant.fake_quantize_input(x, self.plan.activation_scales[name])

    def n_params(self, name: str) -> int:
        """Number of parameters of a linear."""
        if name == HEAD:
            return int(self.model.wte.weight.size)
        return sum(int(p.size) for p in fake_quant.layer_at(self.model, name).parameters())


class PaddleBatchMetric:
    """`metric(model)` is the metric of each of `batches`, a mean over its tokens.

    For `kl`, the final hidden states of the float model are kept: C floats per token.
    """

    def __init__(self, metric: str, batches: EvalBatches, float_model: GPT) -> None:
        self.metric, self.batches = metric, batches
        self.table = float_model.wte.weight.detach()
        self.reference: list[Tensor] = []  # a batch (B * T, C) each
        if metric == "kl":
            with paddle.no_grad():
                self.reference = [_hidden(float_model, tokens) for tokens in self._tokens()]

    @paddle.no_grad()
    def __call__(self, model: GPT) -> list[float]:
        """The metric of each batch; raises UserError if one is not finite."""
        values = []
        for i, tokens in enumerate(self._tokens()):
            hidden, targets = _hidden(model, tokens), tokens[:, 1:].flatten()
            # In chunks of the tokens, because a float64 copy of all logits would be too large.
            total, n = 0.0, max(1, CHUNK_ELEMENTS // model.config.vocab_size)
            for start in range(0, len(targets), n):
                part = slice(start, start + n)
                logits = model.head(hidden[part])  # (n, V)
                if self.metric == "loss":
                    total += float(F.cross_entropy(logits, targets[part], reduction="sum"))
                elif self.metric == "accuracy":
                    total += int((logits.argmax(1) == targets[part]).sum())
                else:
                    r = paddle.matmul(self.reference[i][part], self.table, transpose_y=True)
                    p, q = _log_softmax(r), _log_softmax(logits)
                    total += float((p.exp() * (p - q)).sum())
            value = total / len(targets)
            if not math.isfinite(value):
                what = f"the model's {self.metric} is {value}"
                raise UserError(what, "use an earlier checkpoint", Code.NOT_FINITE)
            values.append(value)
        return values

    def _tokens(self) -> list[Tensor]:
        """(B, T + 1) each."""
        return [paddle.to_tensor(self.batches[i]) for i in range(len(self.batches))]


def _log_softmax(logits: Tensor) -> Tensor:
    """Over the last axis, in float64; Paddle's own is forty times slower on a CPU."""
    wide = logits.astype("float64")
    return wide - paddle.logsumexp(wide, -1, keepdim=True)


def _hidden(model: GPT, tokens: Tensor) -> Tensor:
    return model.hidden(tokens[:, :-1]).flatten(0, 1)


@contextmanager
def _watching(
    model: GPT, names: Sequence[str], watch: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call `watch(name, x)` with the input of each linear in `names`, which may include the
    head."""

    def before(name: str) -> Callable[..., None]:
        return lambda _, inputs: watch(name, inputs[0])

    def after(_: Any, inputs: Any, output: Tensor) -> None:
        watch(HEAD, output)

    hooks = [
        fake_quant.layer_at(model, name).register_forward_pre_hook(before(name))
        for name in names
        if name != HEAD
    ]
    # The head has no layer of its own: its weight is the embedding, its input what the last norm
    # puts out.
    if HEAD in names:
        hooks.append(model.ln_f.register_forward_post_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def linear_weight(model: GPT, name: str) -> Tensor:
    """The weight (in, out) of a linear; for the tied head, the embedding (V, C)."""
    return model.wte.weight if name == HEAD else fake_quant.layer_at(model, name).weight


def _half_square(gradient: Tensor, error: Tensor) -> float:
    return 0.5 * float((gradient * error).astype("float64").square().sum())


def _add(values: Accumulator, x: Tensor, quantized: Tensor, channel: int) -> None:
    """Add x (rows, columns) and its quantized form; dimension `channel` has the channels."""
    flat, index = x.flatten(), values.chosen(int(x.size))
    sample = flat if index is None else flat[paddle.to_tensor(index)]
    wide, error = x.astype("float64"), (quantized - x).astype("float64")
    values.add(
        sample.numpy(),
        x.min(axis=1 - channel).numpy(),
        x.max(axis=1 - channel).numpy(),
        float(wide.square().sum()),
        float(error.square().sum()),
    )
