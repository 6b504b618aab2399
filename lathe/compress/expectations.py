"""What quantization without training is expected to cost, before it starts.

`expectations.json` holds rows of `benchmarks/quality.py`: SmolLM2-135M-Instruct on WikiText, with
weights that lie on no grid. Larger models lose less.
"""

import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from pydantic import TypeAdapter

from lathe.compress.plan import make_plan
from lathe.model.architecture import HEAD
from lathe.model.config import GPTConfig
from lathe.model.quantization import QuantizationPlan
from lathe_base.config.settings import QuantizationSettings
from lathe_base.errors import Code, UserError

Target = Literal["bytes", "loss"]


@dataclass(frozen=True)
class Expectation:
    """A measured way to quantize.

    Attributes:
        settings: of `Compress.Quantization`.
        perplexity_increase: relative.
        kl: from the float model, in nats per token.
    """

    name: str
    settings: dict[str, bool | int | str]
    perplexity_increase: float
    kl: float

    def plan(self, config: GPTConfig) -> QuantizationPlan:
        """The formats that it gives to a model."""
        return make_plan(config, QuantizationSettings.model_validate(self.settings))

    def share(self, config: GPTConfig) -> float:
        """Bytes of the quantized weights, relative to float32."""
        family, sizes = config.architecture, dict[str, int]()
        for layer in range(config.n_layer):
            for linear in family.linears:
                shape = config.linear_shape(linear, layer)
                sizes[f"{family.block(layer)}.{linear.name}"] = math.prod(shape)
        sizes[HEAD] = len(config.tables) * config.vocab_size * config.n_embd
        saved = 0.0
        for name, fmt in self.plan(config).linears.items():
            groups = fmt.weight.group_size
            size = fmt.weight.bits / 8 + (4 / groups if groups else 0)
            saved += (1 - size / 4) * sizes[name]
        return 1 - saved / config.n_params

    def overrides(self) -> list[str]:
        """The recipe's settings that it stands for."""
        values = {f"Compress.Quantization.{key}": x for key, x in self.settings.items()}
        return [f"{key}={x}" for key, x in {"Engine.max_steps": 0, **values}.items()]


def expectations() -> list[Expectation]:
    """All measured ways to quantize."""
    text = files("lathe.compress").joinpath("expectations.json").read_text(encoding="utf-8")
    return TypeAdapter(list[Expectation]).validate_json(text)


def choose(target: Target, limit: float, config: GPTConfig) -> Expectation:
    """The way with the smallest loss of those with at most so many bytes, or with the fewest bytes
    of those that are expected to lose at most so much.

    Args:
        limit: of `bytes`, as a share of float32; of `loss`, the relative increase of perplexity.

    Raises:
        UserError: nothing meets the target.
    """
    figures = [(x, (x.share(config), x.perplexity_increase)) for x in expectations()]
    limited, wanted = (0, 1) if target == "bytes" else (1, 0)
    found = [(x, figure) for x, figure in figures if figure[limited] <= limit]
    if not found:
        least = min(figure[limited] for _, figure in figures)
        raise UserError(
            f"--target {target}={limit:g}: untrained, no measured format is below {least:.3f}",
            "train it, with -o Engine.max_steps, or search for a model: lathe compress --target",
            Code.GATE,
        )
    best, _ = min(found, key=lambda each: each[1][wanted])
    return best


def expected(config: GPTConfig) -> Expectation | None:
    """What was to be expected of a quantized model; None if nothing like it was measured."""
    plan = config.quantization
    if plan is None:
        return None
    formats = {name: (x.weight, x.activation) for name, x in plan.linears.items()}
    for known in expectations():
        linears = known.plan(config).linears
        if formats == {name: (x.weight, x.activation) for name, x in linears.items()}:
            return known
    return None
