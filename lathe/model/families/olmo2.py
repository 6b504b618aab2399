"""OLMo 2: norms after attention and FFN; one norm over all queries and one over all keys."""

from lathe.model.families.llama import ATTENTION, HEAD_NORMS, like_llama

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
