"""The quantization plan: which linears of a model are quantized, and to which formats. Training,
sensitivity analysis, export and verification all read this plan."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lathe.model.architecture import HEAD
from lathe_base.config.settings.types import ActivationFormat, Bits, GroupSize

WeightQuantizeType = Literal["abs_max", "channel_wise_abs_max", "group_wise"]

ACTIVATION_LEVELS = 127
"""Largest integer of a quantized activation; the smallest is -128."""

_Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class WeightFormat:
    """The format of a weight: signed integers.

    Attributes:
        quantize_type: one scale for the whole weight, for each output channel, or for every
            `group_size` consecutive inputs of an output channel.
        bits: 8 for the first two (checkpoints of an earlier version may have 4, stored in a byte
            each); 8 or 4, packed two per byte, for groups.
        group_size: 0 without groups.
        zero_points: whether every group has a zero point, another integer, of 4 bits; it is 0
            elsewhere.
    """

    quantize_type: WeightQuantizeType = "channel_wise_abs_max"
    bits: Bits = 8
    group_size: int = 0
    zero_points: bool = False

    @property
    def levels(self) -> int:
        """The largest integer: 127 for 8 bits, 7 for 4."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def range(self) -> tuple[int, int]:
        """The lowest and the highest integer: symmetric, or all of them with groups."""
        return (-self.levels - 1 if self.group_size else -self.levels), self.levels

    @classmethod
    def grouped(cls, group_size: int, bits: Bits, zero_points: bool = False) -> "WeightFormat":
        """Integers from -8 to 7, or from -128 to 127: a group's entry of largest magnitude is the
        lowest integer times the group's scale, which is negative if that entry is positive. With
        zero points, its lowest entry is the lowest integer, and its highest the highest."""
        return cls("group_wise", bits, group_size, zero_points)

    @classmethod
    def int4(cls, group_size: int) -> "WeightFormat":
        """`grouped`, with 4 bits."""
        return cls.grouped(group_size, 4)


INT8 = WeightFormat()


@dataclass(frozen=True)
class LinearFormat:
    """The quantization format of one linear.

    Attributes:
        weight: format of the weight.
        activation: format of the input. `int8` is `clip(round(x / s), -128, 127) * s`;
            `dynamic_int8` is the same with scales of every token, its largest magnitude / 127: one
            for every group of the weight, or else one for the token; None leaves the input in
            float.
        activation_scale: the scale s of `int8`; 0 means not known yet.
    """

    weight: WeightFormat = INT8
    activation: ActivationFormat | None = "int8"
    activation_scale: float = 0.0

    def __str__(self) -> str:
        """For model cards: `INT8 per channel, INT8 inputs, static scale`."""
        scales = {
            "abs_max": "per tensor",
            "channel_wise_abs_max": "per channel",
            "group_wise": f"per group of {self.weight.group_size}"
            + (" with zero points" if self.weight.zero_points else ""),
        }
        inputs = {
            None: "float inputs",
            "int8": "INT8 inputs, static scale",
            "dynamic_int8": "INT8 inputs, "
            + ("dynamic scales" if self.weight.group_size else "a dynamic scale per token"),
        }
        return (
            f"INT{self.weight.bits} {scales[self.weight.quantize_type]}, {inputs[self.activation]}"
        )


@dataclass(frozen=True)
class QuantizationPlan:
    """The quantization of a model: enough to rebuild the integer model from float weights.

    Attributes:
        linears: module path (`h.0.attn.c_attn`, `lm_head`) -> its format; the others are float.
            `lm_head` stands for the tied embedding too: one scale per vocabulary row.
        position_embedding: whether the position embedding is `INT8`, with a scale for every
            position.
        kv_cache_bits: bits of cached keys and values, whose scales, one for every channel, are
            tensors of the checkpoint (`h.0.attn.cached_key.scale`); None if the cache is float.
    """

    linears: dict[str, LinearFormat] = field(default_factory=dict)
    position_embedding: bool = False
    kv_cache_bits: Literal[8] | None = None

    @classmethod
    def w8a8(cls, scales: Mapping[str, float], weight: WeightFormat = INT8) -> "QuantizationPlan":
        """Integer weights, and INT8 activations with these scales; the head's weight is always
        `INT8`."""
        return cls(
            {
                name: LinearFormat(INT8 if name == HEAD else weight, "int8", scale)
                for name, scale in scales.items()
            }
        )

    @property
    def quantize_embedding(self) -> bool:
        """Whether the tied embedding is quantized."""
        return HEAD in self.linears

    @property
    def activation_scales(self) -> dict[str, float]:
        """Module path -> input scale, of the linears with static scales."""
        int8 = {name: x for name, x in self.linears.items() if x.activation == "int8"}
        return {name: x.activation_scale for name, x in int8.items()}

    @property
    def integer_linears(self) -> list[str]:
        """Module paths of the linears with quantized inputs, which multiply integers."""
        return [name for name, x in self.linears.items() if x.activation]

    @property
    def weight_bits(self) -> Bits:
        """Bits of the narrowest weights."""
        return min((x.weight.bits for x in self.linears.values()), default=8)

    def with_scales(self, scales: Mapping[str, float]) -> "QuantizationPlan":
        """This plan with new scales for all quantized inputs."""
        known = {name: scales[name] for name in self.activation_scales}
        changed = {n: replace(self.linears[n], activation_scale=s) for n, s in known.items()}
        return replace(self, linears=self.linears | changed)

    def part(self, names: Iterable[str]) -> "QuantizationPlan":
        """The part of the plan for the linears `names`."""
        wanted = frozenset(names)
        return QuantizationPlan({name: x for name, x in self.linears.items() if name in wanted})

    def to_json(self) -> dict[str, Any]:
        """The keys of a W8A8 plan with one weight format for all block linears, and a key `linears`
        for the linears that these keys cannot describe."""
        # These keys came first: a plan that they can describe is written as it was before groups
        # and formats of single linears.
        blocks = (x.weight for name, x in self.linears.items() if name != HEAD)
        common = next((weight for weight in blocks if not weight.group_size), INT8)
        plain = QuantizationPlan.w8a8(self.activation_scales, common).linears
        others = {name: x for name, x in self.linears.items() if plain.get(name) != x}
        scales = {n: s for n, s in self.activation_scales.items() if n not in others}
        values: dict[str, Any] = {
            "weight_quantize_type": common.quantize_type,
            "weight_bits": common.bits,
            "activation_bits": 8,
            "quantize_embedding": self.quantize_embedding,
            "activation_scales": scales,
        }
        if others:
            values["linears"] = {name: asdict(x) for name, x in others.items()}
        if self.position_embedding:
            values["position_embedding"] = True
        if self.kv_cache_bits:
            values["kv_cache_bits"] = self.kv_cache_bits
        return values


class _PlanPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _WeightJson(_PlanPart):
    quantize_type: WeightQuantizeType
    bits: Bits
    group_size: GroupSize | Literal[0] = 0
    zero_points: bool = False

    @model_validator(mode="after")
    def _groups_have_a_size(self) -> "_WeightJson":
        if (self.quantize_type == "group_wise") != (self.group_size > 0):
            raise ValueError("group_wise and group_size go together")
        if self.zero_points and not (self.group_size and self.bits == 4):
            raise ValueError("only 4-bit groups have zero_points")
        return self


class _LinearJson(_PlanPart):
    weight: _WeightJson
    activation: ActivationFormat | None
    activation_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _has_its_scale(self) -> "_LinearJson":
        if (self.activation == "int8") != (self.activation_scale > 0):
            raise ValueError("activation int8 and activation_scale go together")
        if self.activation == "int8" and self.weight.group_size:
            raise ValueError("activation int8 and group_size exclude each other")
        return self


class PlanJson(_PlanPart):
    """The JSON that `QuantizationPlan.to_json` writes, with all scales known."""

    weight_quantize_type: Literal["abs_max", "channel_wise_abs_max"] = "channel_wise_abs_max"
    weight_bits: Bits = 8
    activation_bits: Literal[8] = 8
    quantize_embedding: bool = False
    activation_scales: dict[str, _Scale] = {}
    linears: dict[str, _LinearJson] = {}
    position_embedding: bool = False
    kv_cache_bits: Literal[8] | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "PlanJson":
        if twice := self.activation_scales.keys() & self.linears.keys():
            raise ValueError(f"{min(twice)} is in activation_scales and in linears")
        if self.quantize_embedding != self.plan().quantize_embedding:
            raise ValueError(f"quantize_embedding and a format of {HEAD} go together")
        return self

    def plan(self) -> QuantizationPlan:
        """The plan that this JSON describes."""
        common = WeightFormat(self.weight_quantize_type, self.weight_bits)
        plain = QuantizationPlan.w8a8(self.activation_scales, common).linears
        others = {
            name: LinearFormat(
                WeightFormat(**x.weight.model_dump()), x.activation, x.activation_scale
            )
            for name, x in self.linears.items()
        }
        return QuantizationPlan({**plain, **others}, self.position_embedding, self.kv_cache_bits)
