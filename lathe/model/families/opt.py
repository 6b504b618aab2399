"""OPT: GPT-2 with ReLU, and a position embedding that begins with two unused rows."""

from lathe.model.architecture import Architecture, Linear
from lathe.model.families.llama import QKV, UNSUPPORTED

_LINEARS = (
    QKV,
    Linear("self_attn.out_proj", "heads", "row", "out"),
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
        **UNSUPPORTED,
    },
    norm="layer_norm",
    epsilon=1e-5,
    activation="relu",
    prefix="model.decoder.",
    not_weights=(),
    transposed=False,
    blocks="layers",
    linears=_LINEARS,
    block_norms=("self_attn_layer_norm", "final_layer_norm"),
    final_norm="final_layer_norm",
    embeddings=("embed_tokens", "embed_positions"),
    position_offset=2,
    ties=True,
    always_biased=tuple(linear.name for linear in _LINEARS),
    defaults={"ffn_dim": 3072},
)
