"""The shape of a GPT and its JSON form, which is HF's `config.json` for an unpruned model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lathe.artifacts.kinds import checked, read_json
from lathe.errors import UserError
from lathe.model.architecture import GPT2, HEAD, Architecture, Units
from lathe.model.chat_template import read_chat_template
from lathe.model.quantization import PlanJson, QuantizationPlan

MOST_LAYERS = 100_000
_Size = Annotated[int, Field(gt=0, lt=2**31)]


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
    chat_template: str | None = None
    """Jinja that makes a prompt of messages, as Hugging Face's tokenizers have it."""

    @property
    def architecture(self) -> Architecture:
        """The description of the model family."""
        return GPT2

    @property
    def n_layer(self) -> int:
        """Number of Transformer blocks."""
        return len(self.n_head)

    @property
    def is_uniform(self) -> bool:
        """Whether HF's GPT-2 can represent the model: no heads removed, and one FFN width."""
        full = self.n_embd // self.head_dim
        return set(self.n_head) == {full} and len(set(self.n_inner)) == 1

    def n_params(self) -> int:
        """Number of parameters, with biases and both embeddings; the tied head counts once."""
        return sum(math.prod(shape) for _, shape in self.tensor_shapes())

    def unit_size(self, units: Units) -> int:
        """Width of one head or FFN channel."""
        return self.head_dim if units == "heads" else 1

    def widths(self, units: Units) -> list[int]:
        """Total width of the heads, or of the FFN channels, of every layer."""
        counts = self.n_head if units == "heads" else self.n_inner
        return [self.unit_size(units) * count for count in counts]

    def linear_names(self) -> list[str]:
        """Paths of every block linear, first layer first."""
        names = [linear.name for linear in self.architecture.linears]
        return [f"h.{i}.{name}" for i in range(self.n_layer) for name in names]

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every parameter; linears are (in, out)."""
        C, family = self.n_embd, self.architecture
        for name, rows in zip(family.embeddings, (self.vocab_size, self.n_positions), strict=True):
            yield f"{name}.weight", (rows, C)
        widths = {linear.units: self.widths(linear.units) for linear in family.linears}
        for i in range(self.n_layer):
            for linear in family.linears:
                n_in, n_out = linear.shape(C, widths[linear.units][i])
                yield f"h.{i}.{linear.name}.weight", (n_in, n_out)
                yield f"h.{i}.{linear.name}.bias", (n_out,)
        norms = [f"h.{i}.{norm}" for i in range(self.n_layer) for norm in family.block_norms]
        for name in (*norms, family.final_norm):
            yield f"{name}.weight", (C,)
            yield f"{name}.bias", (C,)

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs (multiplications and additions) of a forward and a backward pass per token of a
        sequence of `seq_len` tokens; recomputed operations do not count.

        The convention of PaLM (Chowdhery et al. 2022, appendix B): 6 per weight of a matrix product
        (the tied head once, embedding lookups not at all), and 12 * heads * head_dim * seq_len per
        layer for attention scores and the sums that they weight. This counts the full square of
        scores. A causal kernel may skip half of it, but published figures count all of it, and a
        count that depended on the kernel could not be compared with them.
        """
        linears = sum(
            math.prod(linear.shape(self.n_embd, sum(self.widths(linear.units))))
            for linear in self.architecture.linears
        )
        head = self.vocab_size * self.n_embd
        return 6.0 * (linears + head) + 12.0 * sum(self.widths("heads")) * seq_len

    def to_json(self) -> dict[str, Any]:
        """HF's GPT2Config keys, and a group `lathe` for what these keys cannot express."""
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
                "quantization": self.quantization.to_json() if self.quantization else None,
                "chat_template": self.chat_template,
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
                    f"{source}: {key} is {values[key]!r}, but Lathe supports {wanted[0]!r} only",
                    "give a checkpoint of the plain GPT-2 architecture",
                )
        hint = "give the folder of a checkpoint"
        C, L, H, inner = (values.get(key) for key in ("n_embd", "n_layer", "n_head", "n_inner"))
        own = values.get("lathe")
        if own is None:
            whole = checked({"C": C, "L": L, "H": H}, _HFShape, source, hint)
            own = {
                "head_dim": whole.C // whole.H,
                "n_head": [whole.H] * whole.L,
                "n_inner": [inner or 4 * whole.C] * whole.L,
            }
        elif not isinstance(own, dict):
            raise UserError(f"{source}: lathe is a {type(own).__name__}, not an object", hint)
        keys = ("vocab_size", "n_positions", "n_embd", "layer_norm_epsilon")
        found = {key: values[key] for key in keys if key in values}
        shape = checked({**own, **found}, _Shape, source, hint)
        plan = shape.quantization
        return cls(
            vocab_size=shape.vocab_size,
            n_positions=shape.n_positions,
            n_embd=shape.n_embd,
            head_dim=shape.head_dim,
            n_head=tuple(shape.n_head),
            n_inner=tuple(shape.n_inner),
            layer_norm_epsilon=shape.layer_norm_epsilon,
            quantization=plan.plan() if plan else None,
            chat_template=shape.chat_template,
        )

    def with_quantization(self, plan: QuantizationPlan | None) -> "GPTConfig":
        """A copy with this plan, or without one."""
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
    if not path.exists():
        raise UserError(f"{folder}: no config.json", "give the folder of a checkpoint")
    values = read_json(path, "copy the checkpoint again")
    config = GPTConfig.from_json(values, str(path))
    if "lathe" not in values:
        return replace(config, chat_template=read_chat_template(folder))
    return config


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())


class _HFShape(_Part):
    """HF's `n_embd`, `n_layer` and `n_head`."""

    C: _Size
    L: Annotated[int, Field(gt=0, le=MOST_LAYERS)]
    H: _Size

    @model_validator(mode="after")
    def _heads_divide(self) -> "_HFShape":
        if self.C % self.H:
            raise ValueError(f"n_embd {self.C} is not a multiple of n_head {self.H}")
        return self


class _Shape(_Part):
    vocab_size: _Size
    n_positions: _Size
    n_embd: _Size
    head_dim: _Size
    n_head: Annotated[list[_Size], Field(min_length=1, max_length=MOST_LAYERS)]
    n_inner: list[_Size]
    layer_norm_epsilon: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 1e-5
    quantization: PlanJson | None = None
    chat_template: str | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "_Shape":
        if len(self.n_inner) != len(self.n_head):
            raise ValueError(f"n_head has {len(self.n_head)} layers, n_inner {len(self.n_inner)}")
        if self.n_embd % self.head_dim or max(self.n_head) * self.head_dim > self.n_embd:
            raise ValueError(
                f"{max(self.n_head)} heads of {self.head_dim} do not fit n_embd {self.n_embd}"
            )
        if self.quantization is not None:
            linears = [linear.name for linear in GPT2.linears]
            names = {f"h.{i}.{name}" for i in range(len(self.n_head)) for name in linears}
            found = self.quantization.plan().linears.keys()
            if unknown := found - names - {HEAD}:
                raise ValueError(
                    f"quantization has {min(unknown)}, which is not a linear of the model"
                )
        return self
