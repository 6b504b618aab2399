"""The description of a model family: names, shapes and roles of its modules, and the keys of its
`config.json`. The families are in `lathe.model.families`.

A block consists of residual branches. Each has a norm before or after it, or both, a linear that
computes units (attention heads or FFN channels) from the hidden state, and a linear that reads the
units and adds to the hidden state. Pruning removes units, and tensor parallelism divides them.

Query heads may share keys and values: the heads of a layer are divided into groups of equal size,
each with one key-value head. If every head has its own, a group is one head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Units = Literal["heads", "channels"]
Parts = Literal["heads", "kv_heads", "channels"]
Layers = Callable[[Mapping[str, Any], int], Sequence[Any]]
"""Derives a value for each layer from a `config.json` and the number of layers."""
HEAD = "lm_head"
"""The output layer; its weight is the token embedding if they are tied."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Hugging Face's `layer_types`: attention to all earlier tokens, or to a sliding window."""
RopeType = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
SCALING_KEYS: dict[RopeType, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),  # no effect on texts of Lathe's lengths, but kept in `config.json`
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": (
        *("factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
        "original_max_position_embeddings",
    ),
    "longrope": (
        *("factor", "attention_factor", "short_factor"),
        "original_max_position_embeddings",
    ),
}
"""The attributes of `RopeScaling` that each type uses."""


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling for texts longer than those of the original training.

    Attributes:
        rope_type: `linear` divides every frequency by `factor` (Chen et al. 2023,
            arXiv:2306.15595). `llama3` does so to those with fewer than `low_freq_factor` periods
            in `original_max_position_embeddings`, keeps those with more than `high_freq_factor`,
            and interpolates between (Llama 3.1, Dubey et al. 2024, arXiv:2407.21783). `yarn` does
            the same along a ramp between features that have `beta_fast` and `beta_slow` periods
            (Peng et al. 2023, arXiv:2309.00071). `longrope` divides each frequency by its
            `short_factor` (Ding et al. 2024, arXiv:2402.13753), and in texts longer than the
            original length by another, which Lathe does not support. `dynamic` only changes texts
            longer than `max_position_embeddings`, which Lathe does not support.
        attention_factor: factor of cosines and sines.
        truncate: whether the ends of YaRN's ramp are rounded to whole features.
    """

    rope_type: RopeType
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a model.

    Attributes:
        theta: base of the geometric series of frequencies.
        partial_rotary_factor: share of a head's features, from the first, that is rotated.
        scaling: frequency scaling, or None.
    """

    theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    scaling: RopeScaling | None = None

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines."""
        return self.scaling.attention_factor if self.scaling else 1.0

    def n_rotated(self, head_dim: int) -> int:
        """Number of a head's features that are rotated."""
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class AttentionKind:
    """The kind of attention in a layer.

    Attributes:
        rope: rotary embedding of queries and keys, or None.
        window: number of tokens that a query attends to, including itself; None: all earlier ones.
    """

    rope: Rope | None = None
    window: int | None = None


@dataclass(frozen=True)
class Linear:
    """A linear layer that every block has.

    Attributes:
        name: module path within the block.
        units: the units on one side of its weight; the other side is the hidden state.
        style: how tensor parallelism divides it (Megatron-LM's names): a `column` linear computes
            units from the hidden state, a `row` linear reads them and adds to the hidden state.
        skip_name: its name in `skip_tensor_map` of a recipe.
        parts: what the matrices of a column linear compute: query heads, keys and values of
            key-value heads, or channels. In a model their rows are ordered group by group, and
            channel by channel, so that a slice of rows is a slice of units.
        files: module paths of those matrices in Hugging Face's files, if they are separate tensors,
            or the path of the one tensor if it is not `name`; empty if the files have one tensor
            called `name`. One tensor has one matrix after the other,
        is_grouped: or has the rows group by group, as the model does.
    """

    name: str
    units: Units
    style: Literal["column", "row"]
    skip_name: str
    parts: tuple[Parts, ...] = ()
    files: tuple[str, ...] = ()
    is_grouped: bool = False

    def shape(self, hidden: int, widths: Mapping[Parts, int]) -> tuple[int, int]:
        """(in, out) of the weight for units that are `widths` wide in total."""
        if self.style == "column":
            return hidden, sum(widths[part] for part in self.parts)
        return widths[self.units], hidden

    def n_params(self, hidden: int, widths: Mapping[Parts, float], bias: bool) -> float:
        """Parameters of the weight and the bias; `widths` may be one process's share."""
        if self.style == "column":
            return (hidden + bias) * sum(widths[part] for part in self.parts)
        return (widths[self.units] + bias) * hidden


@dataclass(frozen=True)
class Architecture:
    """A model family; the sizes of one model are in its `GPTConfig`.

    Modules have Hugging Face's names.

    Attributes:
        model_type, class_name: what Hugging Face's `config.json` calls the family.
        lathe_type, lathe_class: the same for a model that transformers cannot compute.
        title: the family's name in prose.
        keys: key in Hugging Face's `config.json` -> name in `GPTConfig`, or none where it states
            a part of `arithmetic`; in the order in which they are written.
        arithmetic: key in `config.json` -> values that Lathe supports; the first one is written,
            and assumed if the key is absent.
        defaults: key in `config.json` -> what transformers assumes if the key is absent, if Lathe
            would assume something else.
        norm: LayerNorm with a bias, or RMSNorm without one; `epsilon` is its default.
        norm_offset: what a norm adds to its weight.
        activation: that of the FFN, which is gated if its column linear has two parts.
        prefix: prefix of the tensor names in Hugging Face's files; the head has none,
        head_file: and this name.
        not_weights: suffixes of tensor names in those files that are buffers.
        transposed: whether those files store the weights of block linears as (in, out).
        blocks: path of the list of blocks.
        linears: the linears of a block, in the order of computation.
        block_norms: the norm before attention, and the one before the FFN; empty without them.
        output_norms: the norm after attention, and the one after the FFN, before they are added to
            the hidden state; empty without them.
        is_parallel: whether attention and FFN read the same hidden state, instead of one after the
            other.
        head_norms: norms of queries and of keys before rotary embedding,
        norms_whole: which normalize all heads together, rather than each head.
        final_norm: the norm before the head.
        embeddings: the token embedding and, if positions are learned, the position embedding,
        position_offset: number of its first rows that belong to no position.
        scales_embedding: whether embeddings are multiplied by the square root of their size.
        layer_types: attention of each layer, `FULL` or `SLIDING`, if `config.json` does not list it
            in `layer_types`; None: all are full.
        lists_layer_types: whether Hugging Face's configuration has the list.
        is_rotated: whether each layer rotates queries and keys; None: all do, if positions are
            rotary.
        rope_keys: key in `config.json` -> name in `rope_parameters`, if they differ.
        local_theta: key in `config.json` of the rotary base of sliding layers, if they have a
            different one.
        rotates_part: whether Hugging Face's class supports rotating only a part of each head.
        ties: whether head and token embedding are tied if `config.json` does not say.
        always_biased: linears that have a bias in every model of the family.
        biases: key in `config.json` -> linears that have a bias if it is true.
        fleetx_names: module path -> PaddleFleetX's name.
    """

    model_type: str
    class_name: str
    lathe_type: str
    lathe_class: str
    title: str
    keys: Mapping[str, str] = field(hash=False)  # mappings cannot be hashed
    arithmetic: Mapping[str, tuple[Any, ...]] = field(hash=False)
    norm: Literal["layer_norm", "rms_norm"]
    epsilon: float
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"]
    prefix: str
    not_weights: tuple[str, ...]
    transposed: bool
    blocks: str
    linears: tuple[Linear, ...]
    block_norms: tuple[str, ...]
    final_norm: str
    embeddings: tuple[str, ...]
    ties: bool
    head_norms: tuple[str, ...] = ()
    norms_whole: bool = False
    output_norms: tuple[str, ...] = ()
    is_parallel: bool = False
    norm_offset: float = 0.0
    head_file: str = HEAD
    position_offset: int = 0
    scales_embedding: bool = False
    layer_types: Layers | None = None
    lists_layer_types: bool = True
    is_rotated: Layers | None = None
    rope_keys: Mapping[str, str] = field(default_factory=dict, hash=False)
    local_theta: str = ""
    rotates_part: bool = False
    always_biased: tuple[str, ...] = ()
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fleetx_names: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def table(self) -> str:
        """Name of the token embedding's parameter, which is also the head's weight if they are
        tied."""
        return f"{self.embeddings[0]}.weight"

    @property
    def positions(self) -> Literal["learned", "rotary"]:
        """The position encoding: how a model represents token positions."""
        return "learned" if len(self.embeddings) > 1 else "rotary"

    @property
    def gated(self) -> bool:
        """Whether a channel of the FFN is the product of two, one of them activated."""
        return len(self.column("channels").parts) > 1

    @property
    def has_head_dim(self) -> bool:
        """Whether the head size may differ from hidden size / heads."""
        return "head_dim" in self.keys

    def key(self, name: str) -> str:
        """The key in Hugging Face's `config.json` of a name in `GPTConfig`."""
        return next(key for key, field in self.keys.items() if field == name)

    def block(self, index: int) -> str:
        """Path of a block."""
        return f"{self.blocks}.{index}"

    def attention(self, layer: int) -> str:
        """Path of a layer's attention."""
        return f"{self.block(layer)}.{self.column('heads').name.rpartition('.')[0]}"

    def cached_parts(self, layer: int) -> tuple[str, str]:
        """Paths of the modules through which a layer's keys and values pass into the KV cache."""
        return f"{self.attention(layer)}.cached_key", f"{self.attention(layer)}.cached_value"

    def column(self, units: Units) -> Linear:
        """The linear that computes the units."""
        return next(x for x in self.linears if x.units == units and x.style == "column")

    def row(self, units: Units) -> Linear:
        """The linear that reads the units."""
        return next(x for x in self.linears if x.units == units and x.style == "row")

    def find_linear(self, name: str) -> Linear | None:
        """The linear that a module or parameter path belongs to, None if it is not a linear's; the
        path starts at the model or at a block."""
        # Dots at the ends, so that a name is compared as a whole: no `gate_up_proj` for `up_proj`.
        path = f".{name.removesuffix('.weight').removesuffix('.bias')}"
        return next((x for x in self.linears if path.endswith(f".{x.name}")), None)

    def is_norm(self, name: str) -> bool:
        """Whether a parameter is a norm's."""
        module = name.rpartition(".")[0]
        norms = (*self.block_norms, *self.output_norms, *self.head_norms, self.final_norm)
        return f".{module}".endswith(tuple(f".{norm}" for norm in norms))

    def is_fused(self, name: str) -> bool:
        """Whether a parameter holds several matrices, which Hugging Face's files store one after
        the other or separately, and Lathe's models group by group."""
        linear = self.find_linear(name)
        return linear is not None and len(linear.parts) > 1

    def is_conv1d(self, name: str) -> bool:
        """Whether a parameter is a Conv1D's in Hugging Face's files, stored as (in, out)."""
        return self.transposed and name.endswith(".weight") and self.find_linear(name) is not None

    def stored_names(self, name: str) -> list[str]:
        """Names, without the prefix, of the tensors in Hugging Face's files that hold a
        parameter: one, or one for each part of a fused linear."""
        linear = self.find_linear(name)
        if linear is None or not linear.files:
            return [name]
        block, kind = name.split(f".{linear.name}.")
        return [f"{block}.{file}.{kind}" for file in linear.files]

    def stored_name(self, name: str) -> str:
        """Whole name of a tensor in Hugging Face's files."""
        module, _, kind = name.rpartition(".")
        return f"{self.head_file}.{kind}" if module == HEAD else self.prefix + name

    def parameter_name(self, stored: str) -> str:
        """The inverse of `stored_name`; the prefix may be absent."""
        module, _, kind = stored.rpartition(".")
        return f"{HEAD}.{kind}" if module == self.head_file else stored.removeprefix(self.prefix)
