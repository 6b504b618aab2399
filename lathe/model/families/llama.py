"""Llama, and what similar families share with it: rotary positions, RMSNorm, a gated FFN, and query
heads that share keys and values."""

from typing import Any

from lathe.model.architecture import Architecture, Linear

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


def like_llama(model_type: str, title: str, class_stem: str, **changes: Any) -> Architecture:
    """A family that differs from Llama in `changes`. Its `arithmetic` and `keys` are added to
    Llama's; keys replace those of the same name in `GPTConfig`."""
    stated: dict[str, tuple[Any, ...]] = changes.pop("arithmetic", {})
    keys: dict[str, str] = changes.pop("keys", {})
    inherited = {key: name for key, name in KEYS.items() if not name or name not in keys.values()}
    values: dict[str, Any] = {
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
        **UNSUPPORTED,
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


UNSUPPORTED: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        *("quantization_config", "num_experts", "num_local_experts", "vision_config"),
        *("audio_config", "text_config", "attn_logit_softcapping"),
        *("final_logit_softcapping", "logits_scaling", "embedding_multiplier"),
    ),
    (None,),
)
"""Keys of `config.json` for features that Lathe supports in no family."""

LLAMA = like_llama(
    "llama",
    "Llama",
    "Llama",
    biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
    defaults={"intermediate_size": 11_008},
)
