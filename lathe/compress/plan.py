"""Chooses the format of every linear: the recipe's default, unless an analysis or the recipe names
another (`make_plan`); by measured cost, which linears stay float, and which need more bits or
dynamic scales (`choose`); and, before anything is measured, by what quantization without training
cost another model (`choose_expectation`).

`expectations.json` holds rows of `benchmarks/quality.py`: SmolLM2-135M-Instruct on WikiText, with
weights that lie on no grid. Larger models lose less.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np
import scipy  # type: ignore[import-untyped]
from numpy.typing import NDArray
from pydantic import TypeAdapter

from lathe.compress.sensitivity.result import LinearScore, read_analysis
from lathe.model.architecture import HEAD
from lathe.model.config import GPTConfig
from lathe.model.quantization import (
    INT8,
    LinearFormat,
    QuantizationPlan,
    WeightFormat,
)
from lathe_base.config.settings import QuantizationSettings, SensitivitySettings
from lathe_base.config.settings.types import FORMAT_BY_BITS, FORMATS, ActivationScales, Format
from lathe_base.errors import Code, UserError

log = logging.getLogger("lathe")

INT8_FORMATS: Mapping[ActivationScales, Sequence[Format]] = {
    "auto": ("static_int8", "dynamic_int8"),
    "moving_average_abs_max": ("static_int8",),
    "dynamic": ("dynamic_int8",),
    "token": ("token_int8",),
    "none": ("weight_only_int8",),
}
"""The formats that `int8` stands for; for `auto` both, the default first."""
SKIPS = (
    "the costs of individual linears are assumed to be additive; the most expensive stay float, "
    "one by one, until the predicted cost of the rest is at most Sensitivity.budget (with additive "
    "costs, no smaller choice exists), or Sensitivity.max_skips are float"
)
FEWEST_BYTES = (
    "the costs of individual linears are assumed to be additive; of all ways to assign one of the "
    "formats or, to at most Sensitivity.max_skips, float to every linear, the one with the fewest "
    "bytes, including scales, whose predicted cost is at most Sensitivity.budget; if there is "
    "none, the one with the lowest cost"
)
LOWEST_COST = (
    "the costs of individual linears are assumed to be additive; of all ways to assign one of the "
    "formats or, to at most Sensitivity.max_skips, float to every linear, the one with the lowest "
    "predicted cost whose weights, with scales of 32 bits, have at most "
    "Sensitivity.bits_per_weight bits on average"
)
Matrix = NDArray[np.float64]  # of (linears, formats)
Target = Literal["bytes", "loss"]


def quantizable(config: GPTConfig, settings: QuantizationSettings) -> list[str]:
    """Paths of all quantizable linears; the tied head only together with the embedding."""
    head = [HEAD] if settings.quantize_embedding else []
    return config.linear_names() + head


def formats(
    settings: QuantizationSettings, int8: Sequence[Format] = (), named: bool = True
) -> list[Format]:
    """The formats that a linear may have, the narrowest first.

    Args:
        int8: the INT8 formats to choose from; by default all that the recipe allows.
        named: whether to include those that the recipe sets for individual linears.
    """
    offered = {"float", *(int8 or INT8_FORMATS[settings.activation_quantize_type])}
    offered |= {FORMAT_BY_BITS[settings.weight_bits]} - {"int8"}
    offered |= settings.named if named else set()
    return [fmt for fmt in FORMATS if fmt in offered]


def make_plan(
    config: GPTConfig, settings: QuantizationSettings, formats: Mapping[str, Format] | None = None
) -> QuantizationPlan:
    """A plan for every quantizable linear, with unknown scales (0); `auto` activation scales are
    static (see `lathe.compress.activation`).

    Args:
        formats: those of individual linears; the others follow `weight_bits`.
    """
    usual = FORMAT_BY_BITS[settings.weight_bits]
    chosen = {name: (formats or {}).get(name, usual) for name in quantizable(config, settings)}
    in_float = settings.activation_quantize_type == "none"  # also the inputs of INT4 linears

    def linear(name: str, fmt: Format) -> LinearFormat:
        if fmt == "int8":
            fmt = INT8_FORMATS[settings.activation_quantize_type][0]
        facts = FORMATS[fmt]
        if facts.bits and facts.is_grouped:
            has_zeros = settings.zero_points and facts.bits == 4
            weight = WeightFormat.grouped(settings.group_size, facts.bits, has_zeros)
        else:
            weight = INT8 if name == HEAD else WeightFormat(settings.weight_quantize_type)
        return LinearFormat(weight, None if in_float and facts.bits != 8 else facts.activation)

    return QuantizationPlan({n: linear(n, fmt) for n, fmt in chosen.items() if fmt != "float"})


def named_formats(
    config: GPTConfig, settings: QuantizationSettings, sensitivity: Path | None
) -> dict[str, Format]:
    """Formats of individual linears: those chosen by a sensitivity analysis, overridden by the
    recipe's.

    Raises:
        UserError: a linear or a block that the model does not have.
    """
    # What the analysis chose, as far as the recipe allows it,
    known, named = quantizable(config, settings), dict[str, Format]()
    if sensitivity is not None:
        analysis = read_analysis(sensitivity)
        allowed = formats(settings)
        named.update({name: fmt for name, fmt in analysis.formats.items() if fmt in allowed})
        named.update(dict.fromkeys(analysis.skip, "float"))
        if unknown := named.keys() - {*known, HEAD}:
            raise UserError(
                f"{sensitivity}: chooses formats for {sorted(unknown)}, which this model does not "
                "have",
                "analyze this model instead",
                Code.MISMATCH,
            )
    # then the recipe's own words, which override it: skips, formats, and the head's.
    by_name = {linear.skip_name: linear.name for linear in config.architecture.linears}
    in_float: Format = "float"
    skipped = {b: dict.fromkeys(x, in_float) for b, x in settings.skip_tensor_map.items()}
    for key, blocks in (("skip_tensor_map", skipped), ("formats", settings.formats)):
        for block, linears in blocks.items():
            index = int(block.removeprefix("block_"))
            if linears and index >= config.n_layer:
                raise UserError(
                    f"Compress.Quantization.{key} names {block!r}",
                    f"the model's blocks are block_0 to block_{config.n_layer - 1}",
                    Code.UNKNOWN_NAME,
                )
            path = config.architecture.block(index)
            named.update({f"{path}.{by_name[x]}": fmt for x, fmt in linears.items()})
    if settings.head_format is not None:
        if not settings.quantize_embedding:
            raise UserError(
                f"Compress.Quantization.head_format is {settings.head_format}, but the output "
                "layer is the token embedding, which is not quantized",
                "set Compress.Quantization.quantize_embedding=True",
                Code.CONFLICTING_OPTIONS,
            )
        named[HEAD] = settings.head_format
    return named


@dataclass(frozen=True)
class FormatChoice:
    """The formats of all linears, the predicted cost of the quantized ones, and the rule."""

    formats: dict[str, Format]
    predicted: float
    rule: str

    @property
    def skip(self) -> list[str]:
        """The linears that stay float."""
        return [name for name, fmt in self.formats.items() if fmt == "float"]

    @property
    def quantized(self) -> dict[str, Format]:
        """The formats of the quantized linears."""
        return {name: fmt for name, fmt in self.formats.items() if fmt != "float"}


def choose(
    ranked: Sequence[LinearScore],
    forms: Sequence[Format],
    settings: SensitivitySettings,
    group_size: int,
) -> FormatChoice:
    """Choose among `forms` and float for linears sorted worst first; warns if the budget is
    exceeded.

    Negative scores are noise, not gains, and count as zero.

    Raises:
        UserError: no choice has as few bits as `Sensitivity.bits_per_weight`.
    """
    bits = settings.bits_per_weight
    if len(forms) > 1 or bits is not None:
        costs = {x.name: [x.scores.get(fmt, x.score) for fmt in forms] for x in ranked}
        sizes = {x.name: x.n_params for x in ranked}
        max_bytes = None if bits is None else bits / 8 * sum(sizes.values())
        limits = settings.budget, settings.max_skips, max_bytes
        chosen, predicted = choose_formats(costs, forms, sizes, group_size, *limits)
        choice = FormatChoice(chosen, predicted, FEWEST_BYTES if bits is None else LOWEST_COST)
    else:
        choice = choose_skips(ranked, forms[0], settings)
    if bits is None and choice.predicted > settings.budget:
        log.warning(
            "predicted cost of quantization %.2g is above Sensitivity.budget %.2g, with "
            "Sensitivity.max_skips %d linears in float",
            choice.predicted,
            settings.budget,
            settings.max_skips,
        )
    return choice


def choose_skips(
    ranked: Sequence[LinearScore], fmt: Format, settings: SensitivitySettings
) -> FormatChoice:
    """Apply the rule `SKIPS`."""
    costs = [max(linear.score, 0.0) for linear in ranked]
    for n in range(len(ranked) + 1):  # the first n stay float
        predicted = math.fsum(costs[n:])
        if predicted <= settings.budget or n == settings.max_skips:
            break
    in_float: Format = "float"
    formats = {x.name: in_float if i < n else fmt for i, x in enumerate(ranked)}
    return FormatChoice(formats, predicted, SKIPS)


def bytes_per_weight(fmt: Format, group_size: int) -> float:
    """Bytes per weight, including its share of the group scales."""
    facts = FORMATS[fmt]
    return (facts.bits or 32) / 8 + (4 / group_size if facts.is_grouped else 0.0)


def choose_formats(
    costs_by_linear: Mapping[str, Sequence[float]],
    forms: Sequence[Format],
    sizes: Mapping[str, int],
    group_size: int,
    budget: float,
    max_float: int,
    max_bytes: float | None = None,
) -> tuple[dict[str, Format], float]:
    """Apply the rule `FEWEST_BYTES` or, with `max_bytes`, `LOWEST_COST`: an integer program with a
    0 or 1 for each linear and format.

    Args:
        costs_by_linear: by linear, in each of `forms`; float costs nothing.
        sizes: numbers of weights.

    Returns:
        The format of every linear, and the total cost.

    Raises:
        UserError: all choices have more than `max_bytes`.
    """
    forms = [*forms, "float"]
    names, n = list(costs_by_linear), len(forms)
    costs = np.array([[*costs_by_linear[name], 0.0] for name in names], float).clip(0)
    n_bytes = np.outer(
        [sizes[name] for name in names], [bytes_per_weight(x, group_size) for x in forms]
    )
    # The variables are the entries of a (linears, formats) matrix, row by row; in every row one is
    # 1, and at most `max_float` of those in the last column.
    one_each = np.kron(np.eye(len(names)), np.ones(n))
    n_float = np.tile(np.eye(n)[-1], len(names))
    limits = [
        scipy.optimize.LinearConstraint(one_each, 1, 1),
        scipy.optimize.LinearConstraint(n_float, 0, max_float),
    ]
    unit = budget or 1.0  # the solver's tolerance is absolute
    within = scipy.optimize.LinearConstraint(costs.ravel() / unit, 0, budget / unit)

    def solve(goal: Matrix, *constraints: object) -> Matrix | None:
        solution = scipy.optimize.milp(
            goal.ravel(),
            integrality=np.ones(goal.size),
            bounds=scipy.optimize.Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 0.0},
        )
        return None if solution.x is None else solution.x.reshape(goal.shape)

    # Of equal costs the fewest bytes.
    size, cheapest = n_bytes / n_bytes.max(), costs / (costs.max() or 1.0)
    if max_bytes is not None:
        small = scipy.optimize.LinearConstraint(n_bytes.ravel() / max_bytes, 0, 1)
        chosen = solve(cheapest + 1e-6 * size, *limits, small)
        if chosen is None:
            least = 8 * n_bytes.min(1).sum() / sum(sizes.values())
            raise UserError(
                f"Sensitivity.bits_per_weight is {8 * max_bytes / sum(sizes.values()):g}, but the "
                f"smallest formats have {least:.3g}",
                "allow more, or smaller formats, such as Compress.Quantization.weight_bits=4",
                Code.INVALID_VALUE,
            )
    else:
        chosen = solve(size, *limits, within)
        if chosen is None:  # the budget cannot be met
            chosen = solve(cheapest + 1e-6 * size, *limits)
    assert chosen is not None
    taken = chosen.argmax(1)
    predicted = math.fsum(costs[np.arange(len(names)), taken])
    return {name: forms[i] for name, i in zip(names, taken, strict=True)}, predicted


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
        settings = QuantizationSettings.model_validate(self.settings)
        return make_plan(config, settings, named_formats(config, settings, None))

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
            # Scales as float32, as in the graph; of whole rows they are few.
            of_group = 4 + (fmt.weight.bits / 8 if fmt.weight.zero_points else 0)
            size = fmt.weight.bits / 8 + (of_group / groups if groups else 0)
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


def choose_expectation(target: Target, limit: float, config: GPTConfig) -> Expectation:
    """The way with the smallest loss of those with at most so many bytes, or with the fewest bytes
    of those that are expected to lose at most so much.

    Args:
        limit: of `bytes`, as a share of float32; of `loss`, the relative increase of perplexity.

    Raises:
        UserError: nothing meets the target.
    """
    costs = [(x, (x.share(config), x.perplexity_increase)) for x in expectations()]
    limited, wanted = (0, 1) if target == "bytes" else (1, 0)
    feasible = [(x, cost) for x, cost in costs if cost[limited] <= limit]
    if not feasible:
        least = min(cost[limited] for _, cost in costs)
        raise UserError(
            f"--target {target}={limit:g}: untrained, no measured format is below {least:.3f}",
            "train it, with -o Engine.max_steps, or search for a model: lathe compress --target",
            Code.GATE,
        )
    best, _ = min(feasible, key=lambda each: each[1][wanted])
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
