"""The base class of all groups of settings, and the types of their values, with bounds."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lathe_base.parameters import FIELDS, MAX_INT, Params

MAX_INT32 = 2**31 - 1  # of a whole number, unless a field has a nearer bound

Positive = Annotated[int, Field(gt=0, le=MAX_INT32)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_INT32)]
Processes = Annotated[int, Field(gt=0, le=2**16)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what NumPy's generators take
Port = Annotated[int, Field(ge=0, le=65535)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]  # of logits, which float32 has to hold
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
Milliseconds = Annotated[float, Field(gt=0, le=7 * 24 * 3.6e6)]
Text = Annotated[str, Field(min_length=1)]
Format = Literal[
    "int4", "int8", "static_int8", "weight_only_int8", "dynamic_int8", "token_int8", "float"
]
"""Formats of a linear; `int8` means the kind that `activation_quantize_type` selects."""
Bits = Literal[4, 8]
ActivationFormat = Literal["int8", "dynamic_int8"]


class UndeclaredSetting(LookupError):
    """A step reads a setting that is not declared for it, which is a defect of Lathe."""


class Settings(BaseModel):
    """A group of settings; unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    if not TYPE_CHECKING:  # it would hide misspelled names from the type checker

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:  # absent from an excerpt
                group = type(self).__name__
                raise UndeclaredSetting(f"{group}.{name} is not declared for this step")
            return super().__getattr__(name)

    @model_validator(mode="before")
    @classmethod
    def _empty_means_default(cls, values: Any) -> Any:
        """`dp_degree:` with no value is YAML's null: the default, unless null has a meaning."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            key: value
            for key, value in values.items()
            if value is not None
            or key not in fields
            or type(None) in get_args(fields[key].annotation)
        }

    @field_validator("*", mode="before")
    @classmethod
    def _plain_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Integers and strings are not coerced to booleans, nor booleans to numbers; reject text
        that cannot be written to a file."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        is_boolean = bool in (annotation, *get_args(annotation))
        if is_boolean and not isinstance(value, bool | None):
            raise ValueError("must be True or False")
        if value is False and "off" in get_args(annotation):
            return "off"  # which YAML reads as false
        if isinstance(value, bool) and not is_boolean:
            raise ValueError("must not be a boolean")
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise ValueError("invalid character: NUL or an unpaired surrogate")
        return value


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested groups into full keys, `Group.key`."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flattened |= flat(value, f"{above}{key}.")
        else:
            flattened[f"{above}{key}"] = value
    return flattened


class FormatFacts(NamedTuple):
    """A format of linears: its name for readers, the bits of a weight and the format of the input
    (None: float), and whether groups of inputs have a scale each."""

    title: str
    bits: Bits | None = None
    activation: ActivationFormat | None = None
    is_grouped: bool = False


FORMATS: dict[Format, FormatFacts] = {
    "int4": FormatFacts("INT4", 4, "dynamic_int8", is_grouped=True),
    "static_int8": FormatFacts("INT8, static scales", 8, "int8"),
    "weight_only_int8": FormatFacts("INT8 weights only", 8),
    "token_int8": FormatFacts("INT8, a scale per token", 8, "dynamic_int8"),
    "dynamic_int8": FormatFacts("INT8, dynamic scales", 8, "dynamic_int8", is_grouped=True),
    "float": FormatFacts("kept in float"),
}
"""What each format is, narrowest first."""
FORMAT_BY_BITS: dict[Bits, Format] = {4: "int4", 8: "int8"}
"""The format that `weight_bits` gives every linear that has none of its own."""
ActivationScales = Literal["auto", "moving_average_abs_max", "dynamic", "token", "none"]
LinearName = Literal["qkv", "out", "linear1", "linear2"]  # of a block, as PaddleFleetX has them
EvaluationRuntime = Literal["onnxruntime", "openvino"]
Precision = Literal["float32", "tf32", "bfloat16"]
Recompute = Literal["full", "full_attn", "core_attn"]
"""The part of a block to recompute in the backward pass: all, its attention, or the product of
queries and keys."""
SensitivityMode = Literal["ptq", "qat", "fisher"]
SensitivityMetric = Literal["loss", "accuracy", "kl"]
ShardingStage = Literal[1, 2, 3]
GroupSize = Literal[32, 64, 128]
BlockName = Annotated[str, Field(pattern=r"^block_\d+$")]


def generation_default(name: str) -> Any:
    """A field with the default and the description of a generation parameter."""
    return Field(default=getattr(Params(), name), description=FIELDS[name].meaning)


def generation_bounds(name: str) -> Any:
    """The range of a generation parameter, as a constraint of a type."""
    about = FIELDS[name]
    assert about.range is not None
    le = MAX_INT if about.kind is int and about.range.le is None else about.range.le
    return Field(ge=about.range.ge, gt=about.range.gt, le=le)


def _named(pattern: str, max_characters: int, what: str) -> AfterValidator:
    def check(value: str) -> str:
        if len(value) > max_characters or not re.fullmatch(pattern, value):
            raise ValueError(f"not {what} of at most {max_characters} characters")
        return value

    return AfterValidator(check)


def _format(name: str) -> Any:
    """The name of a text format in the settings reference."""
    return Field(json_schema_extra={"format": name})


PlainName = Annotated[
    str,
    _named(
        r"[A-Za-z0-9][A-Za-z0-9_.-]*", 200, "a plain name, of letters, digits, '.', '-' and '_',"
    ),
    _format("name"),
]
# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/
KubernetesName = Annotated[
    str,
    _named(
        r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*",
        253,
        "a Kubernetes name, of lowercase letters, digits, '-' and '.',",
    ),
    _format("Kubernetes name"),
]
KubernetesLabel = Annotated[
    str,
    _named(
        r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", 63, "a namespace, of lowercase letters, digits and '-',"
    ),
    _format("Kubernetes name"),
]
LabelValue = Annotated[
    str,
    _named(
        r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?",
        63,
        "a Kubernetes label's value, of letters, digits, '.', '-' and '_',",
    ),
    _format("Kubernetes label value"),
]


_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kMGTPE]|[KMGTPE]i)?")


def _is_amount(value: str) -> str:
    match = _AMOUNT.fullmatch(value)
    if not match or not float(match[1]):
        raise ValueError("not an amount of memory, such as 32Gi")
    return value


def parse_bytes(amount: str) -> int:
    """An `Amount` in bytes: `k` is 1000 and `Ki` 1024."""
    match = _AMOUNT.fullmatch(amount)
    assert match
    number, unit = float(match[1]), match[2] or ""
    base = 1024 if unit.endswith("i") else 1000
    return int(number * base ** (" KMGTPE".index(unit[0].upper()) if unit else 0))


Amount = Annotated[str, AfterValidator(_is_amount), _format("bytes, such as 32Gi")]


def split_numbers(value: Any) -> Any:
    """`949,50,1` as numbers."""
    if isinstance(value, list | tuple) and any(isinstance(part, bool) for part in value):
        raise ValueError("must be three numbers")
    return [float(part) for part in value.split(",")] if isinstance(value, str) else value
