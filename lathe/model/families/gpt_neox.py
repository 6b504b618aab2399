"""GPT-NeoX and Pythia: attention and FFN in parallel or sequential; LayerNorm, biases, partial
rotary embeddings, and queries, keys and values head by head in the files."""

from dataclasses import replace

from lathe.model.architecture import Architecture, Linear
from lathe.model.families.llama import UNSUPPORTED

_ATTENTION = ("attn.query_key_value", "attn.dense")
_MLP = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
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
        **UNSUPPORTED,
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
            _ATTENTION[0],
            "heads",
            "column",
            "qkv",
            ("heads", "kv_heads", "kv_heads"),
            ("attention.query_key_value",),
            is_grouped=True,
        ),
        Linear(_ATTENTION[1], "heads", "row", "out", files=("attention.dense",)),
        Linear(_MLP[0], "channels", "column", "linear1", ("channels",)),
        Linear(_MLP[1], "channels", "row", "linear2"),
    ),
    block_norms=("input_layernorm", "post_attention_layernorm"),
    is_parallel=True,
    final_norm="final_layer_norm",
    embeddings=("embed_in",),
    ties=False,
    always_biased=_MLP,
    biases={"attention_bias": _ATTENTION},
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
