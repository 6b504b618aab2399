"""The model families that Lathe supports, a description each: Llama and those that differ from it
in a few lines, then GPT-2, GPT-NeoX and OPT; last, which family a `config.json` is of."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lathe.model.architecture import FULL, SLIDING, Architecture, Linear

# `qkv_proj` and `gate_up_proj` are modules of Lathe's; files have their matrices separately.
ATTENTION = ("self_attn.qkv_proj", "self_attn.o_proj")
MLP = ("mlp.gate_up_proj", "mlp.down_proj")
QKV = Linear(
    ATTENTION[0],
    "heads",
    "column",
    "qkv",
    ("heads", "kv_heads", "kv_heads"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
)
OUT = Linear(ATTENTION[1], "heads", "row", "out")
GATE_UP = Linear(
    MLP[0],
    "channels",
    "column",
    "linear1",
    ("channels", "channels"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
DOWN = Linear(MLP[1], "channels", "row", "linear2")
KEYS = {
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
}
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")

UNSUPPORTED_FEATURES: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        *("quantization_config", "num_experts", "num_local_experts", "vision_config"),
        *("audio_config", "text_config", "attn_logit_softcapping"),
        *("final_logit_softcapping", "logits_scaling", "embedding_multiplier"),
    ),
    (None,),
)
"""Keys of `config.json` for features that Lathe supports in no family."""


# Llama: rotary positions, RMSNorm, a gated FFN, and query heads that share keys and values.


def like_llama(model_type: str, title: str, class_stem: str, **changes: Any) -> Architecture:
    """A family that differs from Llama in `changes`. Its `arithmetic` and `keys` are added to
    Llama's; keys replace those of the same name in `GPTConfig`."""
    stated: dict[str, tuple[Any, ...]] = changes.pop("arithmetic", {})
    keys: dict[str, str] = changes.pop("keys", {})
    inherited = {key: name for key, name in KEYS.items() if not name or name not in keys.values()}
    values: dict[str, Any] = {
        # An empty name: the key states arithmetic, and is written with its first supported value.
        "keys": {**inherited, **dict.fromkeys(stated, ""), **keys},
        "norm": "rms_norm",
        "epsilon": 1e-6,
        "activation": "silu",
        "prefix": "model.",
        "not_weights": (".rotary_emb.inv_freq",),
        "transposed": False,
        "blocks": "layers",
        "linears": (QKV, OUT, GATE_UP, DOWN),
        "block_norms": ("input_layernorm", "post_attention_layernorm"),
        "final_norm": "norm",
        "embeddings": ("embed_tokens",),
        "ties": False,
    }
    arithmetic: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "pretraining_tp": (1, None),
        **UNSUPPORTED_FEATURES,
    }
    return Architecture(
        model_type=model_type,
        class_name=f"{class_stem}ForCausalLM",
        lathe_type=f"lathe-{model_type}",
        lathe_class=f"Lathe{class_stem}",
        title=title,
        arithmetic=arithmetic | stated,
        **(values | changes),
    )


def every_layer(_: Mapping[str, Any], n_layer: int) -> list[str]:
    """All layers have a sliding window."""
    return [SLIDING] * n_layer


def last_layers(values: Mapping[str, Any], n_layer: int) -> list[str]:
    """The layers from `max_window_layers` on have a sliding window."""
    return [
        FULL if i < values.get("max_window_layers", n_layer) else SLIDING for i in range(n_layer)
    ]


LLAMA = like_llama(
    "llama",
    "Llama",
    "Llama",
    biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
    defaults={"intermediate_size": 11_008},
)

MISTRAL = like_llama(
    "mistral",
    "Mistral",
    "Mistral",
    layer_types=every_layer,
    lists_layer_types=False,
    defaults={
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)
"""Mistral: Llama with sliding-window attention in every layer."""

_QWEN_DEFAULTS = {
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN2 = like_llama(
    "qwen2",
    "Qwen2",
    "Qwen2",
    always_biased=ATTENTION[:1],
    layer_types=last_layers,
    defaults=_QWEN_DEFAULTS,
)
QWEN3 = like_llama(
    "qwen3",
    "Qwen3",
    "Qwen3",
    biases={"attention_bias": ATTENTION},
    head_norms=HEAD_NORMS,
    layer_types=last_layers,
    defaults=_QWEN_DEFAULTS | {"head_dim": 128},
)
"""Qwen2, with biases on queries, keys and values, and Qwen3, with query and key norms."""

PHI3 = like_llama(
    "phi3",
    "Phi-3",
    "Phi3",
    epsilon=1e-5,
    linears=(replace(QKV, files=()), OUT, replace(GATE_UP, files=()), DOWN),
    layer_types=every_layer,
    lists_layer_types=False,
    rotates_part=True,
    defaults={"intermediate_size": 8192, "original_max_position_embeddings": 4096},
)
"""Phi-3 and Phi-4-mini: Llama with fused matrices in its files, partial rotary embeddings, and
sliding-window attention in every layer."""


def _smollm3_is_rotated(values: Mapping[str, Any], n_layer: int) -> list[int]:
    # Zero, and thus false, in every `interval`-th layer only.
    interval = values.get("no_rope_layer_interval", 4)
    return values.get("no_rope_layers") or [(i + 1) % interval for i in range(n_layer)]


def _smollm3_layer_types(values: Mapping[str, Any], n_layer: int) -> list[str]:
    return [FULL if rotated else SLIDING for rotated in _smollm3_is_rotated(values, n_layer)]


SMOLLM3 = like_llama(
    "smollm3",
    "SmolLM3",
    "SmolLM3",
    biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
    ties=True,
    layer_types=_smollm3_layer_types,
    is_rotated=_smollm3_is_rotated,
    defaults={
        "intermediate_size": 11_008,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "use_sliding_window": False,
    },
)
"""SmolLM3: Llama with no positions in every fourth layer, and optional sliding windows."""

OLMO2 = like_llama(
    "olmo2",
    "OLMo 2",
    "Olmo2",
    biases={"attention_bias": ATTENTION},
    epsilon=1e-5,
    block_norms=(),
    output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    head_norms=HEAD_NORMS,
    norms_whole=True,
    defaults={"intermediate_size": 11_008},
)
"""OLMo 2: norms after attention and FFN; one norm over all queries and one over all keys."""

_STARCODER2_MLP = ("mlp.c_fc", "mlp.c_proj")
STARCODER2 = like_llama(
    "starcoder2",
    "StarCoder2",
    "Starcoder2",
    keys={"norm_epsilon": "layer_norm_epsilon"},
    arithmetic={"hidden_act": ("gelu_pytorch_tanh", "gelu_new")},
    biases={"use_bias": (*ATTENTION, *_STARCODER2_MLP)},
    norm="layer_norm",
    epsilon=1e-5,
    activation="gelu_tanh",
    linears=(
        QKV,
        OUT,
        Linear(_STARCODER2_MLP[0], "channels", "column", "linear1", ("channels",)),
        Linear(_STARCODER2_MLP[1], "channels", "row", "linear2"),
    ),
    ties=True,
    layer_types=every_layer,
    lists_layer_types=False,
    defaults={"intermediate_size": 12_288, "num_key_value_heads": 2, "use_bias": True},
)
"""StarCoder2: LayerNorm, biases, a plain FFN, rotary positions, grouped-query attention, and a
sliding window in every layer."""


def _gemma3_layer_types(values: Mapping[str, Any], n_layer: int) -> list[str]:
    pattern = values.get("sliding_window_pattern", 6)
    return [SLIDING if (i + 1) % pattern else FULL for i in range(n_layer)]


GEMMA3 = like_llama(
    "gemma3_text",
    "Gemma 3",
    "Gemma3",
    keys={
        "hidden_activation": "",
        "query_pre_attn_scalar": "score_scalar",
    },
    arithmetic={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "hidden_act": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False, None),
    },
    biases={"attention_bias": ATTENTION},
    activation="gelu_tanh",
    norm_offset=1.0,  # weights are stored minus one
    block_norms=("input_layernorm", "pre_feedforward_layernorm"),
    output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    head_norms=HEAD_NORMS,
    scales_embedding=True,
    ties=True,
    layer_types=_gemma3_layer_types,
    local_theta="rope_local_base_freq",
    defaults={
        "intermediate_size": 9216,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
)
"""Gemma 3, text-only: five sliding-window layers with a separate rotary base, then one with full
attention; norms before and after attention and FFN, and of queries and keys, whose weights are
stored minus one; scaled embeddings."""


# GPT-2 and GPT-3: learned positions, LayerNorm, biases, a tied head.
GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    lathe_type="lathe-gpt",
    lathe_class="LatheGPT",
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
    not_weights=(".attn.bias", ".attn.masked_bias"),  # masks, buffers of old versions
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


# GPT-NeoX and Pythia: attention and FFN in parallel or sequential; LayerNorm, biases, partial
# rotary embeddings, and queries, keys and values head by head in the files.
_NEOX_ATTENTION = ("attn.query_key_value", "attn.dense")
_NEOX_MLP = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
GPT_NEOX = Architecture(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    lathe_type="lathe-gpt_neox",
    lathe_class="LatheGPTNeoX",
    title="GPT-NeoX",
    keys={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "n_positions",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "hidden_act": "",
        "layer_norm_eps": "layer_norm_epsilon",
        "use_parallel_residual": "",
    },
    arithmetic={
        "hidden_act": ("gelu",),
        "use_parallel_residual": (True,),
        **UNSUPPORTED_FEATURES,
    },
    norm="layer_norm",
    epsilon=1e-5,
    activation="gelu",
    prefix="gpt_neox.",
    head_file="embed_out",
    not_weights=(
        ".attention.bias",
        ".attention.masked_bias",
        ".rotary_emb.inv_freq",
    ),
    transposed=False,
    blocks="layers",
    linears=(
        Linear(
            _NEOX_ATTENTION[0],
            "heads",
            "column",
            "qkv",
            ("heads", "kv_heads", "kv_heads"),
            ("attention.query_key_value",),
            is_grouped=True,
        ),
        Linear(_NEOX_ATTENTION[1], "heads", "row", "out", files=("attention.dense",)),
        Linear(_NEOX_MLP[0], "channels", "column", "linear1", ("channels",)),
        Linear(_NEOX_MLP[1], "channels", "row", "linear2"),
    ),
    block_norms=("input_layernorm", "post_attention_layernorm"),
    is_parallel=True,
    final_norm="final_layer_norm",
    embeddings=("embed_in",),
    ties=False,
    always_biased=_NEOX_MLP,
    biases={"attention_bias": _NEOX_ATTENTION},
    rope_keys={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    rotates_part=True,
    defaults={"intermediate_size": 24_576, "attention_bias": True, "rotary_pct": 0.25},
)
SEQUENTIAL = replace(
    GPT_NEOX,
    title="GPT-NeoX (sequential)",
    is_parallel=False,
    arithmetic={**GPT_NEOX.arithmetic, "use_parallel_residual": (False,)},
)
"""The sequential variant, in which the FFN reads attention's output, as in Dolly and RedPajama;
`config.json` says so."""


# OPT: GPT-2 with ReLU, and a position embedding that begins with two unused rows.
_OPT_LINEARS = (
    QKV,
    Linear("self_attn.out_proj", "heads", "row", "out"),
    # The files have these two in the block itself; in Lathe's blocks the FFN is a module.
    Linear("mlp.fc1", "channels", "column", "linear1", ("channels",), ("fc1",)),
    Linear("mlp.fc2", "channels", "row", "linear2", files=("fc2",)),
)
OPT = Architecture(
    model_type="opt",
    class_name="OPTForCausalLM",
    lathe_type="lathe-opt",
    lathe_class="LatheOPT",
    title="OPT",
    keys={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "n_positions",
        "hidden_size": "n_embd",
        "word_embed_proj_dim": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "ffn_dim": "n_inner",
        "activation_function": "",
        "do_layer_norm_before": "",
    },
    arithmetic={
        "activation_function": ("relu",),
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
        "tie_word_embeddings": (True,),
        **UNSUPPORTED_FEATURES,
    },
    norm="layer_norm",
    epsilon=1e-5,
    activation="relu",
    prefix="model.decoder.",
    not_weights=(),
    transposed=False,
    blocks="layers",
    linears=_OPT_LINEARS,
    block_norms=("self_attn_layer_norm", "final_layer_norm"),
    final_norm="final_layer_norm",
    embeddings=("embed_tokens", "embed_positions"),
    position_offset=2,
    ties=True,
    always_biased=tuple(linear.name for linear in _OPT_LINEARS),
    defaults={"ffn_dim": 3072},
)


_FAMILIES = (
    *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3),
    *(SMOLLM3, GEMMA3, PHI3, OLMO2, STARCODER2, GPT_NEOX, OPT),
)
ARCHITECTURES = {family.model_type: family for family in _FAMILIES}
"""Every family by its `model_type`, which is also its name in a recipe."""


UNSUPPORTED_TYPES = {
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text", "qwen3_next"),
        "three of four layers are linear attention with a recurrent state (Gated DeltaNet), for "
        "which onnxruntime has no operator and the KV cache no place",
    ),
}
"""Well-known families that Lathe does not support, and why."""


def why_unsupported(values: Mapping[str, Any]) -> str | None:
    """Why Lathe does not support the model of a `config.json`, if it is a well-known one."""
    named = values.get("model_type")
    if named == OPT.model_type and values.get("do_layer_norm_before") is False:
        return (
            "do_layer_norm_before is False, as in OPT-350m, the one size of OPT whose norms follow "
            "the residual sums; Lathe supports norms within the branches only"
        )
    return UNSUPPORTED_TYPES.get(named) if isinstance(named, str) else None


def find_architecture(values: Mapping[str, Any]) -> Architecture | None:
    """The family of a `config.json`, by its `model_type` (Hugging Face's or Lathe's); None if it is
    unknown."""
    named = values.get("model_type")
    family = next((x for x in _FAMILIES if named in (x.model_type, x.lathe_type)), None)
    # The one key that changes the computation: both variants are common, so it names a family.
    if family is GPT_NEOX and values.get("use_parallel_residual") is False:
        return SEQUENTIAL
    return family
