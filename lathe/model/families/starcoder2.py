"""StarCoder2: LayerNorm, biases, a plain FFN, rotary positions, grouped-query attention, and a
sliding window in every layer."""

from lathe.model.architecture import Linear
from lathe.model.families.llama import ATTENTION, OUT, QKV, like_llama
from lathe.model.families.windows import every_layer

_MLP = ("mlp.c_fc", "mlp.c_proj")
STARCODER2 = like_llama(
    "starcoder2",
    "StarCoder2",
    "Starcoder2",
    keys={"norm_epsilon": "layer_norm_epsilon"},
    arithmetic={"hidden_act": ("gelu_pytorch_tanh", "gelu_new")},
    biases={"use_bias": (*ATTENTION, *_MLP)},
    norm="layer_norm",
    epsilon=1e-5,
    activation="gelu_tanh",
    linears=(
        QKV,
        OUT,
        Linear(_MLP[0], "channels", "column", "linear1", ("channels",)),
        Linear(_MLP[1], "channels", "row", "linear2"),
    ),
    ties=True,
    layer_types=every_layer,
    lists_layer_types=False,
    defaults={"intermediate_size": 12_288, "num_key_value_heads": 2, "use_bias": True},
)
