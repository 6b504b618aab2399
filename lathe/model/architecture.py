"""The architecture of a model family: names, shapes and roles of its modules, for the packages
that handle modules without computing them, and the words of its `config.json`.

A block consists of residual branches. Each has a norm, a linear that computes units (attention
heads or FFN channels) from the hidden state, and a linear that reads the units and adds to the
hidden state. Pruning removes units, and tensor parallelism divides them.

Query heads may share keys and values: the heads of a layer are divided into groups of equal size,
each with one key-value head. Where every head has its own, a group is one head.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Units = Literal["heads", "channels"]
Parts = Literal["heads", "kv_heads", "channels"]
HEAD = "lm_head"
"""The output layer; its weight is the token embedding where the two are tied."""


@dataclass(frozen=True)
class Linear:
    """A linear layer that every block has.

    Attributes:
        name: module path within the block.
        units: what one side of its weight consists of; the other side is the hidden state.
        style: how tensor parallelism divides it (Megatron-LM's names): a `column` linear computes
            units from the hidden state, a `row` linear reads them and adds to the hidden state.
        skip_name: its name in `skip_tensor_map` of a recipe.
        parts: of a column linear, what its matrices compute: query heads, keys and values of
            key-value heads, or channels. A model holds their rows group by group, and channel by
            channel, so that a slice of rows is a slice of units.
        files: module paths of those matrices in Hugging Face's files, where each is a tensor of
            its own; empty where the files have one tensor, with one matrix after the other.
    """

    name: str
    units: Units
    style: Literal["column", "row"]
    skip_name: str
    parts: tuple[Parts, ...] = ()
    files: tuple[str, ...] = ()

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
        own_type, own_class: the same of a model that transformers cannot compute.
        title: the family's name in prose.
        keys: key in Hugging Face's `config.json` -> name in `GPTConfig`, or none where it states
            a part of `arithmetic`; in the order in which they are written.
        arithmetic: key in `config.json` -> values that Lathe computes; the first one is written,
            and assumed where the key is absent.
        defaults: key in `config.json` -> what transformers takes where the key is absent, if Lathe
            would take something else.
        norm: LayerNorm with a bias, or RMSNorm without one; `epsilon` is its default.
        activation: of the FFN; gated where its column linear has two parts.
        prefix: prefix of the tensor names in Hugging Face's files; the head has none.
        not_weights: suffixes of tensor names in those files that are buffers.
        transposed: whether those files store the weights of block linears as (in, out).
        blocks: path of the list of blocks.
        linears: the linears of a block, in the order of computation.
        block_norms: the norm before attention, and the one before the FFN.
        head_norms: norms of each query head and of each key head before rotary embedding.
        final_norm: the norm before the head.
        embeddings: the token embedding and, if positions are learned, the position embedding.
        ties: whether head and token embedding are one matrix where `config.json` does not say.
        always_biased: linears that have a bias in every model of the family.
        biases: key in `config.json` -> linears that have one where it is true.
        fleetx_names: module path -> PaddleFleetX's name.
    """

    model_type: str
    class_name: str
    own_type: str
    own_class: str
    title: str
    keys: Mapping[str, str] = field(hash=False)
    arithmetic: Mapping[str, tuple[Any, ...]] = field(hash=False)
    norm: Literal["layer_norm", "rms_norm"]
    epsilon: float
    activation: Literal["gelu_tanh", "silu"]
    prefix: str
    not_weights: tuple[str, ...]
    transposed: bool
    blocks: str
    linears: tuple[Linear, ...]
    block_norms: tuple[str, str]
    final_norm: str
    embeddings: tuple[str, ...]
    ties: bool
    head_norms: tuple[str, ...] = ()
    always_biased: tuple[str, ...] = ()
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fleetx_names: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def table(self) -> str:
        """Name of the token embedding's parameter, the head's weight too where they are tied."""
        return f"{self.embeddings[0]}.weight"

    @property
    def positions(self) -> Literal["learned", "rotary"]:
        """How a model knows the positions of tokens."""
        return "learned" if len(self.embeddings) > 1 else "rotary"

    @property
    def gated(self) -> bool:
        """Whether a channel of the FFN is the product of two, one of them activated."""
        return len(self.column("channels").parts) > 1

    @property
    def has_head_dim(self) -> bool:
        """Whether the size of a head need not be hidden size / heads."""
        return "head_dim" in self.keys

    def key(self, name: str) -> str:
        """The key in Hugging Face's `config.json` of a name in `GPTConfig`."""
        return next(key for key, own in self.keys.items() if own == name)

    def block(self, index: int) -> str:
        """Path of a block."""
        return f"{self.blocks}.{index}"

    def column(self, units: Units) -> Linear:
        """The linear that computes the units."""
        return next(x for x in self.linears if x.units == units and x.style == "column")

    def row(self, units: Units) -> Linear:
        """The linear that reads the units."""
        return next(x for x in self.linears if x.units == units and x.style == "row")

    def linear_of(self, name: str) -> Linear | None:
        """The linear that a module or parameter path belongs to, None if it is not a linear's; the
        path starts at the model or at a block."""
        path = f".{name.removesuffix('.weight').removesuffix('.bias')}"
        return next((x for x in self.linears if path.endswith(f".{x.name}")), None)

    def is_norm(self, name: str) -> bool:
        """Whether a parameter is a norm's."""
        module = name.rpartition(".")[0]
        norms = (*self.block_norms, *self.head_norms, self.final_norm)
        return f".{module}".endswith(tuple(f".{norm}" for norm in norms))

    def is_fused(self, name: str) -> bool:
        """Whether a parameter holds several matrices. Hugging Face's files store them one after
        the other, or apart; Lathe's models group by group."""
        linear = self.linear_of(name)
        return linear is not None and len(linear.parts) > 1

    def is_conv1d(self, name: str) -> bool:
        """Whether a parameter is a Conv1D's in Hugging Face's files, stored as (in, out)."""
        return self.transposed and name.endswith(".weight") and self.linear_of(name) is not None

    def stored_names(self, name: str) -> list[str]:
        """Names, without the prefix, of the tensors in Hugging Face's files that hold a
        parameter: one, or one for each part of a fused linear."""
        linear = self.linear_of(name)
        if linear is None or not linear.files:
            return [name]
        block, kind = name.split(f".{linear.name}.")
        return [f"{block}.{file}.{kind}" for file in linear.files]

    def stored_name(self, name: str) -> str:
        """Whole name of a tensor in Hugging Face's files."""
        return name if name.startswith(f"{HEAD}.") else self.prefix + name


GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    own_type="lathe-gpt",
    own_class="LatheGPT",
    title="GPT-2",
    keys={
        "vocab_size": "vocab_size",
        "n_positions": "n_positions",
        "n_ctx": "n_positions",
        "n_embd": "n_embd",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_inner": "n_inner",
        "activation_function": "",
        "layer_norm_epsilon": "layer_norm_epsilon",
    },
    arithmetic={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "tie_word_embeddings": (True,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    norm="layer_norm",
    epsilon=1e-5,
    activation="gelu_tanh",
    prefix="transformer.",
    not_weights=(".attn.bias", ".attn.masked_bias"),
    transposed=True,
    blocks="h",
    linears=(
        Linear("attn.c_attn", "heads", "column", "qkv", parts=("heads", "kv_heads", "kv_heads")),
        Linear("attn.c_proj", "heads", "row", "out"),
        Linear("mlp.c_fc", "channels", "column", "linear1", parts=("channels",)),
        Linear("mlp.c_proj", "channels", "row", "linear2"),
    ),
    block_norms=("ln_1", "ln_2"),
    final_norm="ln_f",
    embeddings=("wte", "wpe"),
    ties=True,
    always_biased=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    fleetx_names={
        "wte": "embeddings.word_embeddings",
        "wpe": "embeddings.position_embeddings",
        "ln_f": "decoder.norm",
        "ln_1": "norm1",
        "ln_2": "norm2",
        "attn.c_attn": "self_attn.qkv_proj",
        "attn.c_proj": "self_attn.out_proj",
        "mlp.c_fc": "linear1",
        "mlp.c_proj": "linear2",
    },
)

_ATTENTION = ("self_attn.qkv_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_up_proj", "mlp.down_proj")


def _like_llama(model_type: str, title: str, class_stem: str, **changes: Any) -> Architecture:
    """A family that differs from Llama in `changes`; its `arithmetic` is added, and stated."""
    stated: dict[str, tuple[Any, ...]] = changes.pop("arithmetic", {})
    values: dict[str, Any] = {
        "keys": {
            "vocab_size": "vocab_size",
            "max_position_embeddings": "n_positions",
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_key_value_heads": "n_kv_head",
            "head_dim": "head_dim",
            "intermediate_size": "n_inner",
            "hidden_act": "",
            "rms_norm_eps": "layer_norm_epsilon",
            **dict.fromkeys(stated, ""),
        },
        "norm": "rms_norm",
        "epsilon": 1e-6,
        "activation": "silu",
        "prefix": "model.",
        "not_weights": (".rotary_emb.inv_freq",),
        "transposed": False,
        "blocks": "layers",
        "linears": (
            Linear(
                _ATTENTION[0],
                "heads",
                "column",
                "qkv",
                ("heads", "kv_heads", "kv_heads"),
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ),
            Linear(_ATTENTION[1], "heads", "row", "out"),
            Linear(
                _MLP[0],
                "channels",
                "column",
                "linear1",
                ("channels", "channels"),
                ("mlp.gate_proj", "mlp.up_proj"),
            ),
            Linear(_MLP[1], "channels", "row", "linear2"),
        ),
        "block_norms": ("input_layernorm", "post_attention_layernorm"),
        "final_norm": "norm",
        "embeddings": ("embed_tokens",),
        "ties": False,
    }
    arithmetic: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "pretraining_tp": (1, None),
        **dict.fromkeys(
            (
                *("quantization_config", "num_experts", "num_local_experts", "vision_config"),
                *("audio_config", "text_config", "attn_logit_softcapping"),
                *("final_logit_softcapping", "logits_scaling", "embedding_multiplier"),
            ),
            (None,),
        ),
    }
    return Architecture(
        model_type=model_type,
        class_name=f"{class_stem}ForCausalLM",
        own_type=f"lathe-{model_type}",
        own_class=f"Lathe{class_stem}",
        title=title,
        arithmetic=arithmetic | stated,
        **(values | changes),
    )


_WHOLE_CONTEXT = {"use_sliding_window": (False, None)}
_QWEN_DEFAULTS = {"intermediate_size": 22_016, "num_key_value_heads": 32}
LLAMA = _like_llama(
    "llama",
    "Llama",
    "Llama",
    biases={"attention_bias": _ATTENTION, "mlp_bias": _MLP},
    defaults={"intermediate_size": 11_008},
)
MISTRAL = _like_llama(
    "mistral",
    "Mistral",
    "Mistral",
    arithmetic={"sliding_window": (None,)},
    defaults={
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)
QWEN2 = _like_llama(
    "qwen2",
    "Qwen2",
    "Qwen2",
    always_biased=_ATTENTION[:1],
    arithmetic=_WHOLE_CONTEXT,
    defaults=_QWEN_DEFAULTS,
)
QWEN3 = _like_llama(
    "qwen3",
    "Qwen3",
    "Qwen3",
    biases={"attention_bias": _ATTENTION},
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    arithmetic=_WHOLE_CONTEXT,
    defaults=_QWEN_DEFAULTS | {"head_dim": 128},
)
ARCHITECTURES = {x.model_type: x for x in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3)}
"""Every family by its `model_type`, which is also its name in a recipe."""


def architecture_of(model_type: Any) -> Architecture | None:
    """The family with this `model_type`, Hugging Face's or Lathe's; None if there is none."""
    found: Iterable[Architecture] = ARCHITECTURES.values()
    return next((x for x in found if model_type in (x.model_type, x.own_type)), None)
