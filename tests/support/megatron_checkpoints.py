"""Writes a GPT as Megatron-LM and Megatron-DeepSpeed do: layouts, parts, checkpoint versions."""

import random
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lathe.model.gpt import GPT

NAMES = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attention.query_key_value",
    "attn.c_proj": "self_attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
COLUMN = ("attn.c_attn", "mlp.c_fc")
ROW = ("attn.c_proj.weight", "mlp.c_proj.weight")


def by_version(fused: Tensor, heads: int, version: float) -> Tensor:
    """Rows of a fused qkv that are ordered head by head, in another version's order."""
    parts = fused.reshape(heads, 3, -1, *fused.shape[1:])  # (heads, 3, size, ...)
    if version == 0:
        parts = parts.transpose(0, 1)
    elif version == 1:
        parts = parts.transpose(1, 2)
    return parts.reshape(fused.shape).contiguous()


def part(name: str, tensor: Tensor, rank: int, tp: int, heads: int, version: float) -> Tensor:
    """The share of a tensor-parallel rank; in Lathe's model a qkv is ordered head by head."""
    module = name.rpartition(".")[0]
    if name == "wte.weight" or module in COLUMN:
        share = tensor.chunk(tp)[rank]
        return by_version(share, heads // tp, version) if module == "attn.c_attn" else share.clone()
    return (tensor.chunk(tp, 1)[rank] if name in ROW else tensor).clone()


def training_flags(model: GPT, tp: int, pp: int, **changes: Any) -> Namespace:
    """The flags of the training, as Megatron saves them: an object of argparse."""
    config = model.config
    return Namespace(
        **{
            "num_layers": config.n_layer,
            "hidden_size": config.n_embd,
            "num_attention_heads": config.n_head[0],
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "padded_vocab_size": config.vocab_size,
            "num_experts": [1],
            "params_dtype": torch.float16,
            "layernorm_epsilon": 1e-5,
            **changes,
        }
    )


class Checkpoint:
    """A model's tensors in parts; `dtype` is that of the stored weights."""

    def __init__(
        self, model: GPT, tp: int = 1, pp: int = 1, version: float | None = 3.0, **saved: Any
    ) -> None:
        self.model, self.tp, self.pp, self.version = model, tp, pp, version
        self.dtype: torch.dtype = saved.pop("dtype", torch.float32)
        self.legacy = saved.pop("legacy", False)
        self.flags = training_flags(model, tp, pp, **saved.pop("flags", {}))
        self.saved = saved
        self.state = model.state_dict()

    def tensors(self, prefix: str, rank: int) -> OrderedDict[str, Tensor]:
        """The rank's share of the tensors below a prefix, by their names in Lathe without it."""
        heads, order = self.model.config.n_head[0], self.version or 0
        found: OrderedDict[str, Tensor] = OrderedDict()
        for name, tensor in self.state.items():
            if name.startswith(prefix):
                own = name.removeprefix(prefix)
                found[own] = part(own, tensor, rank, self.tp, heads, order).to(self.dtype)
        return found

    def block(self, layer: int, rank: int) -> OrderedDict[str, Tensor]:
        """The rank's share of a block, by Megatron's names."""
        found: OrderedDict[str, Tensor] = OrderedDict()
        for name, tensor in self.tensors(f"h.{layer}.", rank).items():
            module, _, kind = name.rpartition(".")
            found[f"{NAMES[module]}.{kind}"] = tensor
        return found

    def embeddings(self, rank: int) -> OrderedDict[str, Tensor]:
        own = self.tensors("", rank)
        return OrderedDict(
            {
                "word_embeddings.weight": own["wte.weight"],
                "position_embeddings.weight": own["wpe.weight"],
            }
        )

    def final_norm(self, rank: int) -> OrderedDict[str, Tensor]:
        return self.tensors("ln_f.", rank)

    def tree(self, rank: int, layers: range, encoder: str = "encoder") -> dict[str, Any]:
        """`language_model` of a process that has these layers, counted from 0 in it."""
        n_layer = self.model.config.n_layer
        inner: OrderedDict[str, Tensor] = OrderedDict()
        for i, layer in enumerate(layers):
            for name, tensor in self.block(layer, rank).items():
                inner[f"layers.{i}.{name}"] = tensor
        found: dict[str, Any] = {"language_model": {encoder: inner, "moe_state_dict": {}}}
        words = self.embeddings(rank)
        if 0 in layers:
            found["language_model"]["embedding"] = {
                "word_embeddings": {"weight": words["word_embeddings.weight"]},
                "position_embeddings": {"weight": words["position_embeddings.weight"]},
            }
        if n_layer - 1 in layers:
            inner.update({f"final_layernorm.{k}": v for k, v in self.final_norm(rank).items()})
            if 0 not in layers:
                found["word_embeddings_for_head"] = {"weight": words["word_embeddings.weight"]}
        return found

    def metadata(self) -> dict[str, Any]:
        """What a file has beside the model: flags, random states, objects of other classes."""
        found: dict[str, Any] = {
            "args": self.flags,
            "iteration": 5,
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "ds_version": "0.6.5",
            "optimizer": {"dynamic_loss_scale": True, "fp32_groups_flat": [torch.zeros(3)]},
            **self.saved,
        }
        return found if self.version is None else found | {"checkpoint_version": self.version}

    def save(self, value: Any, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path, _use_new_zipfile_serialization=not self.legacy)

    def deepspeed(self, folder: Path, encoder: str = "encoder") -> Path:
        """`global_step5/mp_rank_XX_model_states.pt`."""
        step = folder / "global_step5"
        layers = range(self.model.config.n_layer)
        for rank in range(self.tp):
            module = {"module": self.tree(rank, layers, encoder)}
            self.save(module | self.metadata(), step / f"mp_rank_{rank:02d}_model_states.pt")
        (folder / "latest").write_text("global_step5")
        (folder / "latest_checkpointed_iteration.txt").write_text("5")
        return step

    def pipeline(self, folder: Path, repeats_head: bool = False) -> Path:
        """`global_step5/layer_XX-model_YY-model_states.pt`, as DeepSpeed's PipelineModule."""
        step, layers = folder / "global_step5", self.model.config.n_layer
        for rank in range(self.tp):
            found = {1: self.embeddings(rank), layers + 4: self.final_norm(rank)}
            found |= {3 + i: self.block(i, rank) for i in range(layers)}
            if repeats_head:
                found[layers + 5] = self.embeddings(rank)
            for number, tensors in found.items():
                name = f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
                self.save(tensors, step / name)
        for process in range(self.tp * self.pp):
            path = step / f"mp_rank_{process:02d}_model_states.pt"
            self.save({"module": None} | self.metadata(), path)
        (folder / "latest").write_text("global_step5\n")
        return step

    def megatron(self, folder: Path, chunks: int = 1, wrapped: bool = False) -> Path:
        """`iter_0000005/mp_rank_XX[_YYY]/model_optim_rng.pt`; several chunks are those of an
        interleaved pipeline."""
        step, count = folder / "iter_0000005", self.model.config.n_layer // (self.pp * chunks)
        for rank in range(self.tp):
            for pipe in range(self.pp):
                models = {}
                for chunk in range(chunks):
                    first = (chunk * self.pp + pipe) * count
                    tree: dict[str, Any] = self.tree(
                        rank, range(first, first + count), "transformer"
                    )
                    models[f"model{chunk}" if chunks > 1 else "model"] = (
                        {"module": tree} if wrapped else tree
                    )
                name = f"mp_rank_{rank:02d}" + (f"_{pipe:03d}" if self.pp > 1 else "")
                self.save(models | self.metadata(), step / name / "model_optim_rng.pt")
        (folder / "latest_checkpointed_iteration.txt").write_text("5")
        return step
