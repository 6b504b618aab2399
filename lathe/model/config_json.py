"""Validate a `config.json`, Hugging Face's or Lathe's, and parse its variants."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, model_validator

from lathe.model.architecture import (
    FULL,
    HEAD,
    SCALING_KEYS,
    SLIDING,
    Architecture,
    AttentionKind,
    Rope,
    RopeScaling,
    RopeType,
)
from lathe.model.families import ARCHITECTURES, GPT2, find_architecture, why_unsupported
from lathe.model.quantization import PlanJson
from lathe_base.artifacts.kinds import checked, read_json
from lathe_base.artifacts.sampling import GENERATION, UNSET, SamplingDefaults
from lathe_base.errors import Code, UserError

log = logging.getLogger("lathe")

MAX_LAYERS = 100_000  # a list of this length is made from one number of a file
HINT = "give the folder of a checkpoint"
ROPE_TYPES = ("default", *get_args(RopeType))
ORIGINAL = "original_max_position_embeddings"
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Size = Annotated[int, Field(gt=0, lt=2**31)]
_Id = Annotated[int, Field(ge=0, lt=2**31)]


_WITH_ORIGINAL = ("llama3", "yarn", "longrope", "su")
"""Types of rotary embedding that depend on the original training length."""


class _ConfigPart(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())  # strict: "12" is not 12


class ShapeJson(_ConfigPart):
    """The contents of a `config.json`, with the names of `GPTConfig`."""

    architecture: InstanceOf[Architecture]
    vocab_size: _Size
    n_positions: _Size
    n_embd: _Size
    head_dim: _Size
    n_head: Annotated[list[_Size], Field(min_length=1, max_length=MAX_LAYERS)]
    n_kv_head: list[_Size] = []
    n_inner: list[_Size]
    layer_norm_epsilon: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    quantization: PlanJson | None = None
    chat_template: str | None = None
    biases: list[str] = []
    rope: Rope | None = None
    tie_word_embeddings: bool
    end_ids: list[_Id] = []
    prefix_tokens: list[_Id] = []
    attention: list[InstanceOf[AttentionKind]] = []
    score_scalar: _Size | None = None
    sampling: SamplingDefaults = UNSET

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "ShapeJson":
        if len(self.n_inner) != len(self.n_head):
            raise ValueError(f"n_head has {len(self.n_head)} layers, n_inner {len(self.n_inner)}")
        if self.architecture.has_head_dim:
            if len(self.n_kv_head) != len(self.n_head):
                raise ValueError(
                    f"n_head has {len(self.n_head)} layers, n_kv_head {len(self.n_kv_head)}"
                )
            for heads, groups in zip(self.n_head, self.n_kv_head, strict=True):
                if heads % groups:
                    raise ValueError(
                        f"{heads} query heads cannot share {groups} key-value heads equally"
                    )
        elif self.n_embd % self.head_dim or max(self.n_head) * self.head_dim > self.n_embd:
            raise ValueError(
                f"{max(self.n_head)} heads of {self.head_dim} do not fit n_embd {self.n_embd}"
            )
        if self.rope is not None and self.rope.n_rotated(self.head_dim) % 2:
            raise ValueError(
                f"rotary embedding of {self.rope.n_rotated(self.head_dim)} features, an odd number"
            )
        if (last := max(self.prefix_tokens, default=0)) >= self.vocab_size:
            raise ValueError(f"prefix_tokens has {last}, beyond vocab_size {self.vocab_size}")
        # The plan has to be one of this model: linears that exist, positions that are learned.
        if self.quantization is not None:
            family = self.architecture
            names = {
                f"{family.block(i)}.{linear.name}"
                for i in range(len(self.n_head))
                for linear in family.linears
            }
            if self.quantization.position_embedding and family.positions == "rotary":
                raise ValueError("quantization has a position embedding, but positions are rotary")
            linear_names = self.quantization.plan().linears.keys()
            if unknown := linear_names - names - {HEAD}:
                raise ValueError(
                    f"quantization has {min(unknown)}, which is not a linear of the model"
                )
        return self


def parse(values: dict[str, Any], source: str) -> ShapeJson:
    """Check Lathe's form or a plain HF one.

    Args:
        source: name of the file, for errors.

    Raises:
        UserError: an unsupported family, a variant that Lathe would compute differently, or an
            invalid value.
    """
    family, reason = find_architecture(values), why_unsupported(values)
    if family is None or reason:
        named = values.get("model_type")
        raise UserError(
            f"{source}: model_type is {named!r}" + (f": {reason}" if reason else ""),
            f"give a checkpoint of one of these: {', '.join(ARCHITECTURES)}",
            Code.UNSUPPORTED,
        )
    lathe_values = values.get("lathe")
    if lathe_values is None:  # Hugging Face's: an absent key has transformers' default
        values = {**family.defaults, **values}
    _require_arithmetic(values, family, source)
    if lathe_values is None:
        lathe_values = _plain(values, family, source)
    elif not isinstance(lathe_values, dict):
        raise UserError(
            f"{source}: lathe is a {type(lathe_values).__name__}, not an object",
            HINT,
            Code.MALFORMED,
        )
    # What both forms state under HF's keys, then what depends on the family.
    names = ("vocab_size", "n_positions", "n_embd", "layer_norm_epsilon", "score_scalar")
    stated = [name for name in names if name in family.keys.values()]
    fields = {name: values[k] for name in stated if (k := family.key(name)) in values}
    rope = _rope(values, family, source) if family.positions == "rotary" else None
    # Some families could have embeddings of another size than hidden states (OPT-350m).
    sizes = {key: values.get(key) for key, name in family.keys.items() if name == "n_embd"}
    hidden = values.get(family.key("n_embd"))
    for key, size in sizes.items():
        if size not in (None, hidden):
            raise UserError(
                f"{source}: {key} is {size}, but Lathe supports {family.key('n_embd')}, {hidden}, "
                "only",
                HINT,
                Code.UNSUPPORTED,
            )
    if "n_positions" in fields:
        fields["n_positions"] = _longest_text(fields["n_positions"], rope, source)
    n_layer = len(lathe_values["n_head"]) if isinstance(lathe_values.get("n_head"), list) else 0
    whole = {
        "layer_norm_epsilon": family.epsilon,
        "tie_word_embeddings": values.get("tie_word_embeddings", family.ties),
        "biases": [key for key in family.biases if values.get(key)],
        "rope": rope,
        "attention": attention_kinds(values, family, n_layer, rope, source),
        "end_ids": end_ids(values, source) if family is not GPT2 else [],
        **lathe_values,
        **fields,
        "architecture": family,
    }
    return checked(whole, ShapeJson, source, HINT)


def _longest_text(n_positions: Any, rope: Rope | None, source: str) -> Any:
    """The maximum length of a text: with LongRoPE, the length for which its short factors hold."""
    if rope is None or rope.scaling is None or rope.scaling.rope_type != "longrope":
        return n_positions
    original = rope.scaling.original_max_position_embeddings
    if not isinstance(n_positions, int) or n_positions <= original:
        return n_positions
    log.warning(
        "%s: LongRoPE is supported only for texts of up to %s, %d tokens",
        source,
        ORIGINAL,
        original,
    )
    return original


def _require_arithmetic(values: dict[str, Any], family: Architecture, source: str) -> None:
    """Raise UserError for a setting that Lathe would compute differently."""
    hint = f"give a checkpoint of the plain {family.title} architecture"
    for key, wanted in family.arithmetic.items():
        if values.get(key, wanted[0]) not in wanted:
            shown = repr(values[key])
            shown = shown if len(shown) < 60 else f"{shown[:57]}..."
            raise UserError(
                f"{source}: {key} is {shown}, but Lathe supports {wanted[0]!r} only",
                hint,
                Code.UNSUPPORTED,
            )


def attention_kinds(
    values: dict[str, Any], family: Architecture, n_layer: int, rope: Rope | None, source: str
) -> list[AttentionKind]:
    """The kind of attention of each layer; empty if all have full attention and `rope`.

    Args:
        values: a `config.json`, with the family's defaults.

    Raises:
        UserError: an unsupported kind of attention, or an invalid value.
    """
    hint = f"give a checkpoint of the plain {family.title} architecture"
    types = values.get("layer_types") or []
    if family.layer_types is not None and not types:
        types = family.layer_types(values, n_layer)
    known = (FULL, SLIDING) if family.layer_types is not None else (FULL,)
    if others := [kind for kind in types if kind not in known]:
        raise UserError(
            f"{source}: layer_types has {others[0]!r}, but Lathe supports "
            f"{' and '.join(map(repr, known))} only",
            hint,
            Code.UNSUPPORTED,
        )
    rotated = [True] * n_layer if family.is_rotated is None else family.is_rotated(values, n_layer)
    for key, flags in (("layer_types", types), ("no_rope_layers", rotated)):
        if flags and (not isinstance(flags, list) or len(flags) != n_layer):
            raise UserError(
                f"{source}: {key} is not a list of {n_layer} layers", HINT, Code.MALFORMED
            )
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    if window is not None:
        window = checked(window, _Size, f"{source}: sliding_window", HINT)
    # An explicit list has to agree with the window. A derived one gives way to a window that is
    # off, unless layers with a window have a rotary base of their own.
    listed = types if family.local_theta else values.get("layer_types") or []
    if window is None and SLIDING in listed:
        raise UserError(
            f"{source}: layer_types has {SLIDING!r}, but the window is off",
            "set sliding_window, and use_sliding_window to true",
            Code.MISMATCH,
        )
    local = rope  # the rotary embedding of layers with a window
    if family.local_theta:
        rope_parameters = values.get("rope_parameters") or {}
        stated = rope_parameters.get(SLIDING) if isinstance(rope_parameters, dict) else None
        theta = {"rope_theta": values[family.local_theta]} if family.local_theta in values else {}
        local = read_rope({**theta, **(stated or {})}, source)
    slides = [window is not None and kind == SLIDING for kind in types] or [False] * n_layer
    kinds = [
        AttentionKind((local if near else rope) if turns else None, window if near else None)
        for near, turns in zip(slides, rotated, strict=True)
    ]
    return kinds if any(kind != AttentionKind(rope) for kind in kinds) else []


def _plain(values: dict[str, Any], family: Architecture, source: str) -> dict[str, Any]:
    """The values that the key `lathe` would have for a plain Hugging Face model."""
    needed = [family.key(name) for name in ("n_embd", "n_layer", "n_head")]
    sizes = checked({key: values.get(key) for key in needed}, dict[str, _Size], source, HINT)
    C, L, H = sizes.values()
    if L > MAX_LAYERS:
        raise UserError(
            f"{source}: {needed[1]} is {L}, more than {MAX_LAYERS}", HINT, Code.TOO_LARGE
        )
    head_dim = values.get(family.key("head_dim")) if family.has_head_dim else None
    if head_dim is None and C % H:
        raise UserError(
            f"{source}: {needed[0]} {C} is not a multiple of {needed[2]} {H}",
            HINT,
            Code.INVALID_VALUE,
        )
    shape = {
        "head_dim": C // H if head_dim is None else head_dim,
        "n_head": [H] * L,
        "n_inner": [values.get(family.key("n_inner")) or 4 * C] * L,  # GPT-2's null is 4 times C
    }
    if family.has_head_dim:
        groups = values.get(family.key("n_kv_head"))
        shape["n_kv_head"] = [H if groups is None else groups] * L
    return shape


class _RopeJson(_ConfigPart):
    """HF's `rope_parameters`, or the older `rope_scaling` with `rope_theta` and so on, in one
    form."""

    rope_type: Literal["default"] | RopeType = "default"
    rope_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10_000.0
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    low_freq_factor: _Positive = 1.0
    high_freq_factor: _Positive = 4.0
    original_max_position_embeddings: _Size = 8192
    attention_factor: _Positive | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: list[_Positive] = []

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "_RopeJson":
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor is not above low_freq_factor")
        if self.rope_type == "longrope" and not self.short_factor:
            raise ValueError("longrope without a short_factor")
        return self

    def rope(self) -> Rope:
        scaling = None
        if self.rope_type != "default":
            keys = SCALING_KEYS[self.rope_type]
            factors = {key: x for key in keys if (x := getattr(self, key)) is not None}
            factors |= {"short_factor": tuple(self.short_factor)} if self.short_factor else {}
            if "attention_factor" in keys and not self.attention_factor:
                # It follows from the frequency factor.
                if self.rope_type == "longrope":
                    original = math.log(self.original_max_position_embeddings)
                    attention_factor = math.sqrt(1 + math.log(self.factor) / original)
                elif self.mscale and self.mscale_all_dim:  # DeepSeek's models weight YaRN's 0.1
                    over, under = (
                        0.1 * weight * math.log(self.factor) + 1.0
                        for weight in (self.mscale, self.mscale_all_dim)
                    )
                    attention_factor = over / under
                else:
                    attention_factor = 0.1 * math.log(self.factor) + 1.0
                factors["attention_factor"] = attention_factor
            scaling = RopeScaling(self.rope_type, **factors)
        return Rope(self.rope_theta, self.partial_rotary_factor, scaling)


def _rope(values: dict[str, Any], family: Architecture, source: str) -> Rope:
    """The rotary embedding, in the form of transformers 5 or of earlier versions; that of layers
    without a window if the two kinds of layers differ."""
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope_parameters = values.get(key) or {}
    if family.local_theta and isinstance(rope_parameters, dict):
        rope_parameters = rope_parameters.get(
            FULL, {} if SLIDING in rope_parameters else rope_parameters
        )
    if not isinstance(rope_parameters, dict) or any(
        isinstance(x, dict) for x in rope_parameters.values()
    ):
        raise UserError(
            f"{source}: {key} is not one object of numbers",
            "give a checkpoint whose layers have one rotary embedding",
            Code.UNSUPPORTED,
        )
    # Base and rotated share may be in the object or, under the family's names, beside it.
    rope_values = dict(rope_parameters)
    for key in ("rope_theta", "partial_rotary_factor"):
        family_key = next((k for k, name in family.rope_keys.items() if name == key), key)
        if values.get(family_key) is not None:
            rope_values.setdefault(key, values[family_key])
    positions = values.get(family.key("n_positions"))
    if values.get(ORIGINAL) is not None:  # Phi-3's is beside the object
        rope_values[ORIGINAL] = values[ORIGINAL]
    # transformers' defaults: the model's own length, and the ratio of the two.
    if (
        positions is not None
        and rope_values.get("rope_type", rope_values.get("type")) in _WITH_ORIGINAL
    ):
        rope_values.setdefault(ORIGINAL, positions)
        if rope_values.get("factor") is None and isinstance(rope_values[ORIGINAL], int):
            rope_values["factor"] = max(1.0, positions / rope_values[ORIGINAL])
    rope = read_rope(rope_values, source)
    if rope.partial_rotary_factor < 1 and not family.rotates_part and "lathe" not in values:
        raise UserError(
            f"{source}: partial_rotary_factor is {rope.partial_rotary_factor:g}, "
            "which transformers ignores in this family",
            "remove it from the file if the model was trained without it",
            Code.UNSUPPORTED,
        )
    return rope


def read_rope(rope_values: dict[str, Any], source: str) -> Rope:
    """The rotary embedding of one object with HF's keys.

    Raises:
        UserError: an unsupported type, or an invalid value.
    """
    kind = rope_values.get("rope_type", rope_values.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # the first Phi-3's name
    if kind not in ROPE_TYPES:
        raise UserError(
            f"{source}: rope_type is {kind!r}, but Lathe supports {', '.join(ROPE_TYPES)} only",
            "give a checkpoint without it",
            Code.UNSUPPORTED,
        )
    known = {key: value for key, value in rope_values.items() if key in _RopeJson.model_fields}
    return checked({**known, "rope_type": kind}, _RopeJson, source, HINT).rope()


def rope_json(rope: Rope, keys: Mapping[str, str]) -> dict[str, Any]:
    """The keys of a rotary embedding in the form that all versions of transformers read.

    Args:
        keys: the family's `rope_keys`.
    """
    scaling: dict[str, Any] | None = None
    beside: dict[str, Any] = {}
    if rope.scaling is not None:
        kind = rope.scaling.rope_type
        scaling = {"rope_type": kind}
        scaling |= {name: getattr(rope.scaling, name) for name in SCALING_KEYS[kind]}
        if kind == "longrope":  # texts that take the long one are longer than Lathe's
            short = list(rope.scaling.short_factor)
            scaling |= {"short_factor": short, "long_factor": short}
            beside = {ORIGINAL: scaling[ORIGINAL]}
    partial = rope.partial_rotary_factor
    fields = {"rope_theta": rope.theta}
    if keys or not math.isclose(partial, 1):
        fields["partial_rotary_factor"] = partial
    family_keys = {name: key for key, name in keys.items()}
    return {
        "rope_scaling": scaling,
        **beside,
        **{family_keys.get(name, name): x for name, x in fields.items()},
    }


def end_ids(values: dict[str, Any], source: str) -> list[int]:
    """`eos_token_id` of a `config.json` or `generation_config.json`: an id, a list, or none."""
    eos = values.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return checked(ids, list[_Id], f"{source}: eos_token_id", HINT)


def read_end_ids(folder: Path) -> tuple[int, ...]:
    """The ids at which `generation_config.json` ends a text; empty without that file.

    Raises:
        UserError: it is broken.
    """
    path = folder / GENERATION
    if not path.is_file():
        return ()
    return tuple(end_ids(read_json(path, "copy the checkpoint again"), str(path)))
