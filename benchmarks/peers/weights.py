"""A checkpoint's weights by role, for all model families, from which engines convert."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from lathe.model.architecture import Architecture, Linear
from lathe.model.families import find_architecture

Array = NDArray[np.float32]


class Matrix(NamedTuple):
    """A weight (out, in), and a bias (out,) or None."""

    weight: Array
    bias: Array | None

    @classmethod
    def joined(cls, parts: "list[Matrix]") -> "Matrix":
        """Concatenate several matrices along their outputs."""
        biases = [part.bias for part in parts if part.bias is not None]
        weight = np.concatenate([part.weight for part in parts])
        return cls(weight, np.concatenate(biases) if biases else None)


class Norm(NamedTuple):
    """Weight and bias (C,) of a norm; RMSNorm has no bias."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True)
class Block:
    """A Transformer block; `gate` is the part of a gated FFN with the activation function."""

    attention_norm: Norm
    query: Matrix
    key: Matrix
    value: Matrix
    out: Matrix
    ffn_norm: Norm
    gate: Matrix | None
    up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Weights:
    """A checkpoint folder with a single file of weights.

    Layers must be uniform and the head tied to the embedding, without RoPE scaling or norms of
    heads.

    Attributes:
        tensors: tensors by Hugging Face's names without the family's prefix.
    """

    family: Architecture
    config: dict[str, Any]
    tensors: dict[str, Array]

    @classmethod
    def read(cls, folder: Path) -> "Weights":
        config = json.loads((folder / "config.json").read_text())
        family = find_architecture(config)
        assert family is not None and config["tie_word_embeddings"] and not family.head_norms
        assert not config.get("rope_scaling")
        tensors = load_file(folder / "model.safetensors")
        return cls(family, config, {k.removeprefix(family.prefix): t for k, t in tensors.items()})

    def size(self, name: str) -> Any:
        """Value in `config.json`, by its name in `GPTConfig`."""
        return self.config[self.family.key(name)]

    @property
    def n_layer(self) -> int:
        return int(self.size("n_layer"))

    @property
    def n_head(self) -> int:
        return int(self.size("n_head"))

    @property
    def n_kv_head(self) -> int:
        return int(self.config["lathe"].get("n_kv_head", [self.n_head])[0])

    @property
    def head_dim(self) -> int:
        return int(self.config["lathe"]["head_dim"])

    @property
    def n_inner(self) -> int:
        return int(self.config["lathe"]["n_inner"][0])

    @property
    def epsilon(self) -> float:
        return float(self.size("layer_norm_epsilon"))

    @property
    def theta(self) -> float | None:
        """Base of the rotary embedding; None for learned positions."""
        return self.config.get("rope_theta")

    @property
    def table(self) -> Array:
        """Token embedding and head (V, C)."""
        return self.tensors[self.family.table]

    @property
    def positions(self) -> Array | None:
        """Learned position embedding (positions, C), if any."""
        names = self.family.embeddings[1:]
        return self.tensors[f"{names[0]}.weight"] if names else None

    @property
    def final_norm(self) -> Norm:
        return self._norm(self.family.final_norm)

    def block(self, index: int) -> Block:
        family, path = self.family, self.family.block(index)
        heads, channels = family.column("heads"), family.column("channels")
        query, key, value = self._matrices(path, heads)
        *gate, up = self._matrices(path, channels)
        first, second = (self._norm(f"{path}.{name}") for name in family.block_norms)
        return Block(
            attention_norm=first,
            query=query,
            key=key,
            value=value,
            out=self._matrices(path, family.row("heads"))[0],
            ffn_norm=second,
            gate=gate[0] if gate else None,
            up=up,
            down=self._matrices(path, family.row("channels"))[0],
        )

    def _norm(self, name: str) -> Norm:
        return Norm(self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _matrices(self, block: str, linear: Linear) -> list[Matrix]:
        """Matrices of a linear's parts; one for a linear without parts."""
        found = []
        for name in self.family.stored_names(f"{block}.{linear.name}.weight"):
            weight, bias = self.tensors[name], self.tensors.get(name.replace(".weight", ".bias"))
            found.append(Matrix(weight.T if self.family.transposed else weight, bias))
        if len(found) == 1 and len(linear.parts) > 1:
            ((weight, bias),) = found
            n = len(linear.parts)
            biases = [None] * n if bias is None else np.split(bias, n)
            found = [Matrix(*part) for part in zip(np.split(weight, n), biases, strict=True)]
        return [Matrix(np.ascontiguousarray(weight), bias) for weight, bias in found]
