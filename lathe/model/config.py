"""The shape of a GPT and its JSON form, which is HF's `config.json` for an unpruned model."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lathe.errors import UserError

WeightQuantizeType = Literal["abs_max", "channel_wise_abs_max"]

LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
HEAD = "lm_head"


def largest(bits: int) -> int:
    """Magnitude of a symmetric signed integer: 127 of 8 bits, 7 of 4."""
    return int(2 ** (bits - 1) - 1)


@dataclass(frozen=True)
class QuantizationPlan:
    """What is INT8 and at which scales: enough to rebuild the integer model from float weights.

    Attributes:
        weight_quantize_type: one scale a tensor, or one an output channel.
        weight_bits: of the linears; the embedding's and the head's are 8.
        quantize_embedding: the tied embedding and head are int8, one scale a vocabulary row.
        activation_scales: module path (`h.0.attn.c_attn`, `lm_head`) -> quantum s of its input,
            which is read as `clip(round(x / s), -128, 127)`. A linear not listed is float.
    """

    weight_quantize_type: WeightQuantizeType = "channel_wise_abs_max"
    weight_bits: int = 8
    activation_bits: int = 8
    quantize_embedding: bool = False
    activation_scales: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT-2/3 model; heads and FFN widths may differ from layer to layer."""

    vocab_size: int
    n_positions: int
    n_embd: int
    head_dim: int
    n_head: tuple[int, ...]
    n_inner: tuple[int, ...]
    layer_norm_epsilon: float = 1e-5
    quantization: QuantizationPlan | None = None

    @property
    def n_layer(self) -> int:
        return len(self.n_head)

    @property
    def is_uniform(self) -> bool:
        """True where HF's GPT-2 can hold the model: full heads and one FFN width."""
        full = self.n_embd // self.head_dim
        return set(self.n_head) == {full} and len(set(self.n_inner)) == 1

    def n_params(self) -> int:
        """Parameters, biases and both embeddings counted, the tied head once."""
        C = self.n_embd
        attention = sum(h * self.head_dim * (4 * C + 3) + C for h in self.n_head)
        mlp = sum(f * (2 * C + 1) + C for f in self.n_inner)
        embeddings = (self.vocab_size + self.n_positions) * C
        return embeddings + attention + mlp + (2 * self.n_layer + 1) * 2 * C

    def linear_names(self) -> list[str]:
        """Paths of every block linear, first layer first."""
        return [f"h.{i}.{name}" for i in range(self.n_layer) for name in LINEARS]

    def flops_per_token(self, seq_len: int) -> float:
        """Multiplications and additions of a forward and a backward pass, for each token of a
        sequence of `seq_len`; what recomputation repeats does not count.

        The convention of PaLM (Chowdhery et al. 2022, appendix B): 6 for every weight of a matrix
        product, the tied head once and the embedding look-ups not, and 12 * heads * head_dim *
        seq_len a layer for attention scores and their use. That is the whole square of scores. A
        causal kernel may skip half of it, but published figures count it, and a count that
        followed the kernel would not compare.
        """
        attention_widths = [heads * self.head_dim for heads in self.n_head]
        linears = sum(4 * self.n_embd * width for width in attention_widths)
        linears += sum(2 * self.n_embd * width for width in self.n_inner)
        head = self.vocab_size * self.n_embd
        return 6.0 * (linears + head) + 12.0 * sum(attention_widths) * seq_len

    def to_json(self) -> dict[str, Any]:
        """HF's GPT2Config keys, and the group `lathe` with what HF does not know."""
        return {
            "model_type": "gpt2" if self.is_uniform else "lathe-gpt",
            "architectures": ["GPT2LMHeadModel" if self.is_uniform else "LatheGPT"],
            "vocab_size": self.vocab_size,
            "n_positions": self.n_positions,
            "n_ctx": self.n_positions,
            "n_embd": self.n_embd,
            "n_layer": self.n_layer,
            "n_head": self.n_embd // self.head_dim,
            "n_inner": self.n_inner[0] if self.is_uniform else None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "tie_word_embeddings": True,
            "lathe": {
                "head_dim": self.head_dim,
                "n_head": list(self.n_head),
                "n_inner": list(self.n_inner),
                "quantization": asdict(self.quantization) if self.quantization else None,
            },
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], source: str = "config.json") -> "GPTConfig":
        """Read Lathe's form or a plain HF GPT-2 one.

        Raises:
            UserError: not a GPT-2, or a variant whose arithmetic differs.
        """
        model_type = values.get("model_type")
        if model_type not in ("gpt2", "lathe-gpt"):
            raise UserError(
                f"{source}: model_type is {model_type!r}", "give a GPT-2 family checkpoint"
            )
        for key, wanted in _ARITHMETIC.items():
            if values.get(key, wanted[0]) not in wanted:
                raise UserError(
                    f"{source}: {key} is {values[key]!r}, Lathe computes {wanted[0]!r}",
                    "give a checkpoint of the plain GPT-2 architecture",
                )
        try:
            C, L, H = values["n_embd"], values["n_layer"], values["n_head"]
            own = values.get("lathe") or {
                "head_dim": C // H,
                "n_head": [H] * L,
                "n_inner": [values.get("n_inner") or 4 * C] * L,
            }
            plan = own.get("quantization")
            return cls(
                vocab_size=values["vocab_size"],
                n_positions=values["n_positions"],
                n_embd=C,
                head_dim=own["head_dim"],
                n_head=tuple(own["n_head"]),
                n_inner=tuple(own["n_inner"]),
                layer_norm_epsilon=values.get("layer_norm_epsilon", 1e-5),
                quantization=QuantizationPlan(**plan) if plan else None,
            )
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{source}: not a GPT-2 configuration ({error})", "give the folder of a checkpoint"
            ) from error

    def with_quantization(self, plan: QuantizationPlan | None) -> "GPTConfig":
        return replace(self, quantization=plan)


_ARITHMETIC: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def read_config(folder: Path) -> GPTConfig:
    """Read `folder/config.json`.

    Raises:
        UserError: the folder has none, or it is broken.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder}: no config.json", "give the folder of a checkpoint") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}", "copy the checkpoint again") from None
    return GPTConfig.from_json(values, str(path))
