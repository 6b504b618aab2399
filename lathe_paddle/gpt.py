"""The GPT of `lathe.model.gpt` in Paddle, with the same parameters, names and logits.

Shapes: B batch, T tokens, C hidden size, H heads of this layer, D head size, F FFN width, V
vocabulary. Linears are (in, out), as in Paddle and in HF's files. The columns of `c_attn` are
ordered head by head, each head's q, k and v together: PaddleFleetX's fused qkv, and the only order
in which PaddleSlim's pruner finds whole heads.
"""

from collections.abc import Callable
from typing import Any, Literal

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn.quant.quant_layers import FakeQuantMovingAverageAbsMax

from lathe.model.config import GPTConfig

MASKED = -1e9


def recomputed(
    layer: nn.Layer, function: Callable[..., Tensor], *inputs: Tensor, is_random: bool
) -> Tensor:
    """The result of `function`, which belongs to `layer`; its activations are not stored.

    Args:
        is_random: whether it has dropout; the second pass then has to drop the same units, which
            Paddle supports on GPUs only.
    """
    needs_grad = paddle.is_grad_enabled() and not all(x.stop_gradient for x in inputs)
    if not (layer.training and needs_grad):
        return function(*inputs)

    def run(*inputs: Tensor) -> Tensor:
        if not paddle.is_grad_enabled():  # the first pass
            return function(*inputs)
        # In the second pass, observers must not count the same input in their ranges once more.
        observers = [
            part for part in layer.sublayers() if isinstance(part, FakeQuantMovingAverageAbsMax)
        ]
        for observer in observers:
            observer.training = False
        try:
            return function(*inputs)
        finally:
            for observer in observers:
                observer.training = True

    result: Tensor = recompute(run, *inputs, preserve_rng_state=is_random)
    return result


class Attention(nn.Layer):
    """Causal self-attention; its width `n_head * head_dim` may be smaller than C.

    Every layer makes its own mask: PaddleSlim follows shared tensors, and with a shared mask it
    would prune the heads of all layers together.
    """

    def __init__(self, config: GPTConfig, layer: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.n_head[layer] * config.head_dim
        self.c_attn = nn.Linear(config.n_embd, 3 * width)
        self.c_proj = nn.Linear(width, config.n_embd)
        self.dropout = dropout
        self.recomputes_core = False

    def forward(self, x: Tensor) -> Tensor:
        """Causal self-attention of x (B, T, C)."""
        qkv = self.c_attn(x)
        if self.recomputes_core:
            y = recomputed(self, self._core, qkv, is_random=self.dropout > 0)
        else:
            y = self._core(qkv)
        return self.c_proj(y)

    def _core(self, qkv: Tensor) -> Tensor:
        """(B, T, 3HD) -> (B, T, HD)."""
        T = paddle.shape(qkv)[1]
        qkv = paddle.reshape(qkv, [0, 0, -1, 3 * self.head_dim])  # (B, T, H, 3D)
        q, k, v = paddle.split(paddle.transpose(qkv, [0, 2, 1, 3]), 3, axis=-1)  # (B, H, T, D)
        scores = paddle.matmul(q * self.head_dim**-0.5, k, transpose_y=True)  # (B, H, T, T)
        future = paddle.triu(paddle.full([T, T], MASKED, dtype=scores.dtype), 1)
        weights = F.softmax(scores + future)
        if self.dropout:
            weights = F.dropout(weights, self.dropout, training=self.training)
        return paddle.flatten(paddle.transpose(paddle.matmul(weights, v), [0, 2, 1, 3]), 2)


class MLP(nn.Layer):
    """The feed-forward layer of a block."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.n_inner[layer])
        self.c_proj = nn.Linear(config.n_inner[layer], config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate=True))


class Block(nn.Layer):
    """A pre-norm Transformer block."""

    def __init__(
        self, config: GPTConfig, layer: int, hidden_dropout: float, attention_dropout: float
    ) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, layer, attention_dropout)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config, layer)
        self.drop = nn.Dropout(hidden_dropout)
        self.is_random = hidden_dropout > 0 or attention_dropout > 0
        self.recomputes: Literal["all", "attention"] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        if self.recomputes == "all":
            return recomputed(self, self._whole, x, is_random=self.is_random)
        return self._whole(x)

    def _whole(self, x: Tensor) -> Tensor:
        normed = self.ln_1(x)
        if self.recomputes == "attention":
            y = recomputed(self.attn, self.attn, normed, is_random=self.is_random)
        else:
            y = self.attn(normed)
        x = x + self.drop(y)
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Layer):
    """`model(tokens)` gives logits; `hidden` and `head` are its two halves.

    Attributes:
        head_input, table_quantizer: fake quantization of the head's input and of the embedding, if
            the plan has it; see `lathe_paddle.fake_quant`.
    """

    def __init__(
        self, config: GPTConfig, hidden_dropout: float = 0.0, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(hidden_dropout)
        self.h = nn.LayerList(
            [Block(config, i, hidden_dropout, attention_dropout) for i in range(config.n_layer)]
        )
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.head_input: nn.Layer | None = None
        self.table_quantizer: nn.Layer | None = None

    def set_recompute(self, granularity: str | None) -> None:
        """Select which activations of every block the backward pass recomputes: `full` all,
        `full_attn` those of attention, `core_attn` those between its two linears."""
        for block in self.h:
            block.recomputes = {"full": "all", "full_attn": "attention"}.get(granularity or "")
            block.attn.recomputes_core = granularity == "core_attn"

    def table(self) -> Tensor:
        """The embedding (V, C) that lookups and the head use."""
        weight = self.wte.weight
        return weight if self.table_quantizer is None else self.table_quantizer(weight)

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, C) after the last LayerNorm."""
        return self._transform(tokens, self.table())

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., C) through the tied embedding."""
        return self._logits(hidden, self.table())

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, V) logits."""
        table = self.table()
        return self._logits(self._transform(tokens, table), table)

    def _transform(self, tokens: Tensor, table: Tensor) -> Tensor:
        positions = paddle.arange(paddle.shape(tokens)[1])
        x = self.drop(F.embedding(tokens, table) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)

    def _logits(self, hidden: Tensor, table: Tensor) -> Tensor:
        if self.head_input is not None:
            hidden = self.head_input(hidden)
        return paddle.matmul(hidden, table, transpose_y=True)


def next_token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Mean cross-entropy, nats per token, of predicting tokens[:, 1:] of (B, T + 1)."""
    logits = model(tokens[:, :-1]).flatten(0, 1)
    if logits.dtype != paddle.float32:  # a cast copies even to the same type
        logits = logits.astype("float32")
    return F.cross_entropy(logits, tokens[:, 1:].flatten())
