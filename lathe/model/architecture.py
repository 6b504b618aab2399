"""What a model family is made of: names, shapes and roles of its parts, for every package that
does not itself compute with them.

A block is residual branches, each a norm, a linear that computes units from the hidden state, and a
linear that adds them to it: attention heads and FFN channels. The units are what pruning removes
and what tensor parallelism divides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Units = Literal["heads", "channels"]
HEAD = "lm_head"
"""The output layer, whose weight is the token embedding's."""


@dataclass(frozen=True)
class Linear:
    """A linear of every block, with a bias.

    Attributes:
        name: module path within the block.
        units: what its one side is made of; the other is the hidden state.
        style: how tensor parallelism divides it (Megatron-LM's names): a `column` linear computes
            units from the hidden state, a `row` linear reads them and adds to the hidden state.
        parts: matrices side by side in a column linear, 3 for query, key and value.
        skip_name: what `skip_tensor_map` of a recipe calls it.
    """

    name: str
    units: Units
    style: Literal["column", "row"]
    skip_name: str
    parts: int = 1

    def shape(self, hidden: int, width: int) -> tuple[int, int]:
        """(in, out), where the units are `width` wide."""
        return (hidden, self.parts * width) if self.style == "column" else (width, hidden)

    def n_params(self, hidden: int, width: float) -> float:
        """Of the weight and the bias; of one process's part where `width` is divided."""
        if self.style == "column":
            return (hidden + 1) * self.parts * width
        return (width + 1) * hidden


@dataclass(frozen=True)
class Architecture:
    """A family; the sizes of one model are in its `GPTConfig`.

    Modules have Hugging Face's names, blocks are `h.0`, `h.1` and so on.

    Attributes:
        prefix: what Hugging Face's files put before the names.
        not_weights: endings of tensors in its files that are buffers, or stored twice.
        linears: of a block, in the order in which it computes them.
        block_norms, final_norm: LayerNorms with a bias.
        embeddings: of tokens, tied to the head, and of positions.
        fleetx_names: module path -> PaddleFleetX's.
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
        """The parameter that is the token embedding and the head."""
        return f"{self.embeddings[0]}.weight"

    def column(self, units: Units) -> Linear:
        """The linear that computes the units."""
        return next(x for x in self.linears if x.units == units and x.style == "column")

    def row(self, units: Units) -> Linear:
        """The linear that reads the units."""
        return next(x for x in self.linears if x.units == units and x.style == "row")

    def linear_of(self, name: str) -> Linear | None:
        """The linear at a path of the model or of a block, or whose weight or bias is there."""
        path = f".{name.removesuffix('.weight').removesuffix('.bias')}"
        return next((x for x in self.linears if path.endswith(f".{x.name}")), None)

    def is_norm(self, name: str) -> bool:
        """Whether a parameter is a norm's."""
        module = name.rpartition(".")[0].rpartition(".")[2]
        return module in (*self.block_norms, self.final_norm)

    def is_fused(self, name: str) -> bool:
        """Whether a parameter is of several matrices, which Hugging Face's files have one after
        the other and Lathe's models head by head."""
        linear = self.linear_of(name)
        return linear is not None and linear.parts > 1

    def is_conv1d(self, name: str) -> bool:
        """Whether Hugging Face stores a parameter as its Conv1D does, (in, out)."""
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
