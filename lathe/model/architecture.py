"""The architecture of a model family: names, shapes and roles of its modules, for the packages
that handle modules without computing them.

A block consists of residual branches. Each has a norm, a linear that computes units (attention
heads or FFN channels) from the hidden state, and a linear that reads the units and adds to the
hidden state. Pruning removes units, and tensor parallelism divides them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Units = Literal["heads", "channels"]
HEAD = "lm_head"
"""The output layer; its weight is the token embedding."""


@dataclass(frozen=True)
class Linear:
    """A linear layer that every block has, with a bias.

    Attributes:
        name: module path within the block.
        units: what one side of its weight consists of; the other side is the hidden state.
        style: how tensor parallelism divides it (Megatron-LM's names): a `column` linear computes
            units from the hidden state, a `row` linear reads them and adds to the hidden state.
        parts: number of matrices side by side in a column linear: 3 for query, key and value.
        skip_name: its name in `skip_tensor_map` of a recipe.
    """

    name: str
    units: Units
    style: Literal["column", "row"]
    skip_name: str
    parts: int = 1

    def shape(self, hidden: int, width: int) -> tuple[int, int]:
        """(in, out) of the weight for units that are `width` wide in total."""
        return (hidden, self.parts * width) if self.style == "column" else (width, hidden)

    def n_params(self, hidden: int, width: float) -> float:
        """Parameters of the weight and the bias; `width` may be one process's share."""
        if self.style == "column":
            return (hidden + 1) * self.parts * width
        return (width + 1) * hidden


@dataclass(frozen=True)
class Architecture:
    """A model family; the sizes of one model are in its `GPTConfig`.

    Modules have Hugging Face's names, blocks are `h.0`, `h.1` and so on.

    Attributes:
        prefix: prefix of the tensor names in Hugging Face's files.
        not_weights: suffixes of tensor names in those files that are buffers or duplicates.
        linears: the linears of a block, in the order of computation.
        block_norms, final_norm: LayerNorms with a bias.
        embeddings: the token embedding, tied to the head, and the position embedding.
        fleetx_names: module path -> PaddleFleetX's name.
    """

    prefix: str
    not_weights: tuple[str, ...]
    linears: tuple[Linear, ...]
    block_norms: tuple[str, ...]
    final_norm: str
    embeddings: tuple[str, str]
    fleetx_names: Mapping[str, str]

    @property
    def table(self) -> str:
        """Name of the parameter that is both the token embedding and the head's weight."""
        return f"{self.embeddings[0]}.weight"

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
        module = name.rpartition(".")[0].rpartition(".")[2]
        return module in (*self.block_norms, self.final_norm)

    def is_fused(self, name: str) -> bool:
        """Whether a parameter holds several matrices. Hugging Face's files store them one after
        the other, Lathe's models head by head."""
        linear = self.linear_of(name)
        return linear is not None and linear.parts > 1

    def is_conv1d(self, name: str) -> bool:
        """Whether a parameter is a Conv1D's in Hugging Face's files, stored as (in, out)."""
        return name.endswith(".weight") and self.linear_of(name) is not None


GPT2 = Architecture(
    prefix="transformer.",
    not_weights=(".attn.bias", ".attn.masked_bias", "lm_head.weight"),
    linears=(
        Linear("attn.c_attn", "heads", "column", "qkv", parts=3),
        Linear("attn.c_proj", "heads", "row", "out"),
        Linear("mlp.c_fc", "channels", "column", "linear1"),
        Linear("mlp.c_proj", "channels", "row", "linear2"),
    ),
    block_norms=("ln_1", "ln_2"),
    final_norm="ln_f",
    embeddings=("wte", "wpe"),
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
