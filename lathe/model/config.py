"""The shape of a model and its JSON form, which is HF's `config.json` for an unpruned model."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lathe.data.chat_template import read_chat_template
from lathe.model.architecture import (
    FULL,
    HEAD,
    SLIDING,
    Architecture,
    AttentionKind,
    Linear,
    Parts,
    Rope,
    Units,
)
from lathe.model.config_json import parse, read_end_ids, rope_json
from lathe.model.families import GPT2
from lathe.model.quantization import QuantizationPlan
from lathe_base.artifacts.kinds import read_json
from lathe_base.artifacts.sampling import UNSET, SamplingDefaults, read_sampling_defaults
from lathe_base.errors import Code, UserError

COMPRESSED_TENSORS = "compressed-tensors"
"""The `quant_method` of folders that `lathe import` reads."""
QUANTIZED_HINT = (
    "give the float checkpoint that it was made from, or a compressed-tensors folder or GGUF file "
    "of the model, which lathe import reads"
)
QUANTIZED_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of quantized folders whose `config.json` may not say so, and their methods."""


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a model; heads and FFN widths may differ from layer to layer.

    Attributes:
        kv_heads: key-value heads of each layer; empty if every head has its own.
        biases: keys of `config.json` that are true and give linears a bias.
        rope: rotary embedding, if positions are rotary; that of layers without a window if the two
            kinds of layers differ.
        attention: kind of attention of each layer; empty if all have full attention and `rope`.
        score_scalar: attention scores are divided by its square root; None: the head size.
        chat_template: Jinja template that turns messages into a prompt, as in Hugging Face's
            tokenizers.
        end_ids: ids that end a text, in addition to the tokenizer's end-of-document token.
        prefix_tokens: tokens before every text, whose keys and values are in the checkpoint.
            `n_positions`, the maximum length of a text, does not include them.
        architecture: the description of the model family.
        sampling: recommended sampling parameters, for other engines.
    """

    vocab_size: int
    n_positions: int
    n_embd: int
    head_dim: int
    n_head: tuple[int, ...]
    n_inner: tuple[int, ...]
    layer_norm_epsilon: float = 1e-5
    quantization: QuantizationPlan | None = None
    chat_template: str | None = None
    architecture: Architecture = GPT2
    kv_heads: tuple[int, ...] = ()
    biases: tuple[str, ...] = ()
    rope: Rope | None = None
    tie_word_embeddings: bool = True
    end_ids: tuple[int, ...] = ()
    prefix_tokens: tuple[int, ...] = ()
    attention: tuple[AttentionKind, ...] = ()
    score_scalar: int | None = None
    sampling: SamplingDefaults = UNSET

    @property
    def n_prefix(self) -> int:
        """Number of tokens before every text."""
        return len(self.prefix_tokens)

    @property
    def n_layer(self) -> int:
        """Number of Transformer blocks."""
        return len(self.n_head)

    @property
    def n_kv_head(self) -> tuple[int, ...]:
        """Key-value heads of each layer."""
        return self.kv_heads or self.n_head

    @cached_property  # it writes to __dict__, which `frozen` allows
    def kinds(self) -> tuple[AttentionKind, ...]:
        """Kind of attention of each layer."""
        return self.attention or (AttentionKind(self.rope),) * self.n_layer

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        return float((self.score_scalar or self.head_dim) ** -0.5)

    @property
    def embedding_scale(self) -> float:
        """Factor of token embeddings."""
        return math.sqrt(self.n_embd) if self.architecture.scales_embedding else 1.0

    @cached_property
    def per_group(self) -> tuple[int, ...]:
        """Query heads per key-value head, of each layer."""
        return tuple(h // g for h, g in zip(self.n_head, self.n_kv_head, strict=True))

    @property
    def has_equal_layers(self) -> bool:
        """Whether all layers have the same numbers of heads and channels."""
        return len({*zip(self.n_head, self.n_kv_head, self.n_inner, strict=True)}) == 1

    @property
    def is_uniform(self) -> bool:
        """Whether HF's class can represent the model: all layers are equal, the number of heads is
        supported, rotary embedding rotates whole heads, and there is no prefix."""
        if self.prefix_tokens:  # HF's caches begin empty
            return False
        is_partial = self.rope is not None and self.rope.partial_rotary_factor < 1
        if is_partial and not self.architecture.rotates_part:
            return False
        if not self.has_equal_layers:
            return False
        if self.architecture.has_head_dim:
            return self.n_embd % self.n_head[0] == 0
        return self.n_embd == self.n_head[0] * self.head_dim

    @property
    def n_position_rows(self) -> int:
        """Rows of a position embedding."""
        return self.architecture.position_offset + self.n_prefix + self.n_positions

    @property
    def biased(self) -> tuple[str, ...]:
        """The linears of a block that have a bias."""
        family = self.architecture
        return family.always_biased + tuple(x for key in self.biases for x in family.biases[key])

    @property
    def tables(self) -> tuple[str, ...]:
        """Paths of the token embedding and, last, of the head's table; only one if they are
        tied."""
        embedding = self.architecture.embeddings[0]
        return (embedding,) if self.tie_word_embeddings else (embedding, HEAD)

    @cached_property
    def n_params(self) -> int:
        """Number of parameters, with biases and embeddings; a tied head counts once."""
        return sum(math.prod(shape) for _, shape in self.parameter_shapes())

    @cached_property
    def n_linear_weights(self) -> int:
        """Number of weights of the blocks' linears, without biases."""
        return sum(
            math.prod(self.linear_shape(linear, layer))
            for layer in range(self.n_layer)
            for linear in self.architecture.linears
        )

    def widths(self, part: Parts) -> list[int]:
        """Total width of the heads, of the key-value heads, or of the FFN channels, of every
        layer."""
        return [self.layer_widths(layer)[part] for layer in range(self.n_layer)]

    def layer_widths(
        self, layer: int, groups: int | None = None, channels: int | None = None
    ) -> dict[Parts, int]:
        """`widths` of one layer, or of what is left of it with `groups` key-value heads (and their
        query heads) and `channels` FFN channels."""
        kv_heads = self.n_kv_head[layer] if groups is None else groups
        heads = kv_heads * self.per_group[layer]
        return {
            "heads": self.head_dim * heads,
            "kv_heads": self.head_dim * kv_heads,
            "channels": self.n_inner[layer] if channels is None else channels,
        }

    def groups(self, linear: Linear, layer: int) -> int:
        """Number of groups of rows of a layer's fused linear: key-value heads or channels."""
        return (self.n_kv_head if linear.units == "heads" else self.n_inner)[layer]

    def head_norm_sizes(self, layer: int) -> tuple[int, int]:
        """Sizes of a layer's query and key norms, if the family has them."""
        if not self.architecture.norms_whole:
            return self.head_dim, self.head_dim
        widths = self.layer_widths(layer)
        return widths["heads"], widths["kv_heads"]

    def unit_linears(self, units: Units) -> tuple[Linear, Linear]:
        """The linear of a block that computes the units, and the one that reads them."""
        return self.architecture.column(units), self.architecture.row(units)

    def linear_shape(self, linear: Linear, layer: int) -> tuple[int, int]:
        """(in, out) of a layer's linear."""
        return linear.shape(self.n_embd, self.layer_widths(layer))

    def linear_names(self) -> list[str]:
        """Paths of every block linear, first layer first."""
        family = self.architecture
        blocks = (family.block(i) for i in range(self.n_layer))
        return [f"{block}.{linear.name}" for block in blocks for linear in family.linears]

    def cached_parts(self) -> list[str]:
        """Paths of the modules through which keys and values pass into the KV cache, first layer
        first."""
        layers = range(self.n_layer)
        return [name for i in layers for name in self.architecture.cached_parts(i)]

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor in a checkpoint's files: HF's, names without the prefix,
        the keys and values of `prefix_tokens`, and the scales of an INT8 KV cache."""
        yield from self.parameter_shapes()
        if self.prefix_tokens:
            for i, groups in enumerate(self.n_kv_head):
                name = f"{self.architecture.attention(i)}.prefix"
                yield name, (2, groups, self.n_prefix, self.head_dim)
        if self.quantization and self.quantization.kv_cache_bits:
            for i, groups in enumerate(self.n_kv_head):
                for part in self.architecture.cached_parts(i):
                    yield f"{part}.scale", (groups, self.head_dim)

    def parameter_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor in HF's files, names without the prefix."""
        C, family = self.n_embd, self.architecture
        n_rows = self.vocab_size, self.n_position_rows
        for name, rows in zip(family.embeddings, n_rows, strict=False):  # one if rotary
            yield f"{name}.weight", (rows, C)
        if not self.tie_word_embeddings:
            yield f"{HEAD}.weight", (self.vocab_size, C)
        for i in range(self.n_layer):
            for linear in family.linears:
                n_in, n_out = self.linear_shape(linear, i)
                outs = [n_out]
                if len(linear.files) > 1:  # a tensor for each matrix that the model has fused
                    outs = [self.layer_widths(i)[part] for part in linear.parts]
                path = f"{family.block(i)}.{linear.name}"
                for name, out in zip(family.stored_names(f"{path}.weight"), outs, strict=True):
                    yield name, (n_in, out) if family.transposed else (out, n_in)
                if linear.name in self.biased:
                    names = family.stored_names(f"{path}.bias")
                    yield from zip(names, ((out,) for out in outs), strict=True)
            for name, size in zip(family.head_norms, self.head_norm_sizes(i), strict=False):
                yield f"{family.block(i)}.{name}.weight", (size,)
        of_block = (*family.block_norms, *family.output_norms)
        norms = [f"{family.block(i)}.{name}" for i in range(self.n_layer) for name in of_block]
        for name in (*norms, family.final_norm):
            yield f"{name}.weight", (C,)
            if family.norm == "layer_norm":
                yield f"{name}.bias", (C,)

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs (multiplications and additions) of a forward and a backward pass per token of a
        sequence of `seq_len` tokens; recomputed operations do not count.

        The convention of PaLM (Chowdhery et al. 2022, appendix B): 6 per weight of a matrix product
        (the head once, embedding lookups not at all), and 12 * heads * head_dim * seq_len per
        layer for attention scores and the sums that they weight. This counts the full square of
        scores. A causal kernel may skip half of it, but published figures count all of it, and a
        count that depended on the kernel could not be compared with them.
        """
        head = self.vocab_size * self.n_embd
        return 6.0 * (self.n_linear_weights + head) + 12.0 * sum(self.widths("heads")) * seq_len

    def to_json(self) -> dict[str, Any]:
        """HF's keys, and a group `lathe` for what these keys cannot express."""
        family, is_uniform = self.architecture, self.is_uniform
        is_hf = is_uniform and self.quantization is None
        states_heads = is_uniform and family.has_head_dim
        # Where layers differ, HF's keys have what fits the hidden size, or null; `lathe` has the
        # numbers of every layer.
        sizes = {
            **{name: getattr(self, name) for name in family.keys.values() if name},
            "n_head": self.n_head[0] if states_heads else self.n_embd // self.head_dim,
            "n_kv_head": self.n_kv_head[0] if is_uniform else None,
            "n_inner": self.n_inner[0] if is_uniform else None,
            "score_scalar": self.score_scalar or self.head_dim,
        }
        stated = {k: sizes[n] if n else family.arithmetic[k][0] for k, n in family.keys.items()}
        ends = self.end_ids[0] if len(self.end_ids) == 1 else list(self.end_ids) or None
        tokens = {"bos_token_id": None, "eos_token_id": ends, "pad_token_id": None}
        return {
            # transformers would compute a quantized model in float, without a word.
            "model_type": family.model_type if is_hf else family.lathe_type,
            "architectures": [family.class_name if is_hf else family.lathe_class],
            **stated,
            **{key: key in self.biases for key in family.biases},
            **self._attention_json(),
            **(rope_json(self.rope, family.rope_keys) if self.rope else {}),
            **(tokens if family is not GPT2 else {}),
            "tie_word_embeddings": self.tie_word_embeddings,
            "lathe": {
                "head_dim": self.head_dim,
                "n_head": list(self.n_head),
                **({"n_kv_head": list(self.kv_heads)} if self.kv_heads else {}),
                "n_inner": list(self.n_inner),
                "quantization": self.quantization.to_json() if self.quantization else None,
                "chat_template": self.chat_template,
                **({"prefix_tokens": list(self.prefix_tokens)} if self.prefix_tokens else {}),
                **({"sampling": sampling} if (sampling := self.sampling.to_json()) else {}),
            },
        }

    def _attention_json(self) -> dict[str, Any]:
        """HF's keys of the layers' kinds of attention."""
        family, kinds = self.architecture, self.kinds
        fields: dict[str, Any] = {}
        if family.is_rotated is not None:
            fields["no_rope_layers"] = [int(kind.rope is not None) for kind in kinds]
        if family.layer_types is None:
            return fields
        windows = [kind.window for kind in kinds]
        local = next((kind for kind in kinds if kind.window), None)
        fields["sliding_window"] = local.window if local else None
        if family.lists_layer_types:
            fields["layer_types"] = [SLIDING if window else FULL for window in windows]
        if "use_sliding_window" in family.defaults:
            fields["use_sliding_window"] = local is not None
        if family.local_theta and local and local.rope:
            fields[family.local_theta] = local.rope.theta
        return fields

    @classmethod
    def from_json(cls, values: dict[str, Any], source: str = "config.json") -> "GPTConfig":
        """Read Lathe's form or a plain HF one.

        Raises:
            UserError: an unsupported family, or a variant that Lathe would compute differently.
        """
        shape = parse(values, source)
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
            architecture=shape.architecture,
            kv_heads=tuple(shape.n_kv_head),
            biases=tuple(shape.biases),
            rope=shape.rope,
            tie_word_embeddings=shape.tie_word_embeddings,
            end_ids=tuple(shape.end_ids),
            prefix_tokens=tuple(shape.prefix_tokens),
            attention=tuple(shape.attention),
            score_scalar=shape.score_scalar,
            sampling=shape.sampling,
        )

    def with_quantization(self, plan: QuantizationPlan | None) -> "GPTConfig":
        """A copy with this plan, or without one."""
        return replace(self, quantization=plan)

    def with_chat_template(self, template: str) -> "GPTConfig":
        """A copy with this chat template."""
        return replace(self, chat_template=template)


def require_gpt2(
    config: GPTConfig, folder: Path | str, what: str, hint: str = "give a GPT-2 checkpoint"
) -> None:
    """Raise UserError unless a model is a GPT-2 without a prefix, which `what` requires."""
    if config.architecture != GPT2:
        title = config.architecture.title
        raise UserError(
            f"{folder}: is a {title} model, and {what} supports GPT-2 only", hint, Code.UNSUPPORTED
        )
    if config.prefix_tokens:
        raise UserError(
            f"{folder}: has a prefix of {config.n_prefix} tokens, which {what} does not support",
            "quantize its parent with Compress.Quantization.prefix=none",
            Code.UNSUPPORTED,
        )


def write_config(folder: Path, config: GPTConfig) -> None:
    """Write `folder/config.json`, which `read_config` reads back unchanged."""
    text = json.dumps(config.to_json(), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def read_config(folder: Path) -> GPTConfig:
    """Read `folder/config.json`.

    Raises:
        UserError: the folder has none, or it is broken.
    """
    path = folder / "config.json"
    if not path.exists():
        raise UserError(
            f"{folder}: no config.json", "give the folder of a checkpoint", Code.NOT_FOUND
        )
    values = read_json(path, "copy the checkpoint again")
    # Another tool may have quantized the weights, and said so here or in a file of its own.
    quantization = values.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    methods = [x for file, x in QUANTIZED_BESIDE.items() if (folder / file).is_file()]
    if quantization is not None or methods:
        method = method or next(iter(methods), "an unnamed method")
        raise UserError(
            f"{path}: quantization_config is of {method}, whose weights Lathe does not compute "
            "with",
            f"convert it first: lathe import {folder} --output FOLDER"
            if method == COMPRESSED_TENSORS
            else QUANTIZED_HINT,
            Code.UNSUPPORTED,
        )
    config = GPTConfig.from_json(values, str(path))
    # Hugging Face has these in files beside `config.json`; Lathe's has all of them.
    if "lathe" not in values:
        has_end_ids = config.architecture is not GPT2 and read_end_ids(folder)
        return replace(
            config,
            chat_template=read_chat_template(folder),
            end_ids=has_end_ids or config.end_ids,
            sampling=read_sampling_defaults(folder),
        )
    return config
