"""Rows for the same table, made with alternative tools.

    pip install torch-pruning     # not a dependency of Lathe
    python benchmarks/compress_peers.py run/dense --data run/novels --output run/table \\
        --cloze lambada_test.jsonl --text wiki.test.raw

Run `compress.py` on the same folder first. torch-pruning chooses and removes heads and channels by
its dependency graph, on a GPT-2 of plain linears with the same weights; Lathe finetunes the result
for as many tokens as every other row. onnxruntime's static quantization uses the dense export and
activation ranges from 64 sequences; it cannot train.
"""

import argparse
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from compress import PRUNE_RATE, arguments, measure_up, table, tuned
from onnxruntime.quantization import (  # type: ignore[import-untyped]
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import (  # type: ignore[import-untyped]
    quant_pre_process,
)
from rich.console import Console
from torch import Tensor, nn

from lathe.compress.prune import prune
from lathe.data.tokens import TokenDataset
from lathe.export.export import export
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.gpt import GPT
from lathe.train.batches import first_batches
from lathe_base.storage import sha256
from lathe_serving.runtime.exported_model import METADATA, MODEL
from lathe_serving.runtime.session import OnnxModel

CALIBRATION = 8  # batches


class PlainBlock(nn.Module):
    """A block with separate q, k and v, which suits dependency graphs."""

    def __init__(self, block: Any, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.ln_1, self.ln_2 = block.ln_1, block.ln_2
        weight, bias = block.attn.c_attn.weight.detach(), block.attn.c_attn.bias.detach()
        parts = weight.view(-1, 3, head_dim, weight.shape[1]), bias.view(-1, 3, head_dim)
        self.q, self.k, self.v = (
            _linear(parts[0][:, i].flatten(0, 1), parts[1][:, i].flatten()) for i in range(3)
        )
        self.out, self.fc, self.proj = block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        h = self.ln_1(x)
        q, k, v = (
            f(h).view(B, T, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, -1))
        x = x + self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))
        return x


class PlainGPT(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        table = model.embedding.weight.detach()
        positions = model.get_parameter("wpe.weight").detach()
        make = nn.Embedding.from_pretrained
        self.wte = make(table, freeze=False)  # type: ignore[no-untyped-call]
        self.wpe = make(positions, freeze=False)  # type: ignore[no-untyped-call]
        self.blocks = [PlainBlock(block, model.config.head_dim) for block in model.blocks]
        self.h = nn.ModuleList(self.blocks)
        self.ln_f = model.final_norm
        self.head = _linear(table)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


def by_torch_pruning(
    model: GPT, ratio: float, importance: str, is_global: bool, batches: list[Tensor]
) -> GPT:
    """Prune a model with torch-pruning."""
    import torch_pruning as tp

    plain = PlainGPT(model).eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(batches[0][:2, :-1]), model.eval()(batches[0][:2, :-1]))
    scores = {
        "taylor": tp.importance.GroupTaylorImportance,
        "l1": tp.importance.MagnitudeImportance,
    }
    options = {"p": 1} if importance == "l1" else {}
    n_head = model.config.n_head[0]
    hidden = [plain.wte, plain.wpe, plain.head, plain.ln_f]
    hidden += [layer for block in plain.blocks for layer in (block.out, block.proj)]
    heads = {
        layer: n
        for block, n in zip(plain.blocks, model.config.n_head, strict=True)
        for layer in (block.q, block.k, block.v)
    }
    pruner = tp.pruner.BasePruner(
        plain,
        batches[0][:1, :-1],
        importance=scores[importance](**options),
        global_pruning=is_global,
        pruning_ratio=ratio,
        head_pruning_ratio=round(n_head * ratio) / n_head,
        prune_num_heads=True,
        prune_head_dims=False,
        num_heads=heads,
        ignored_layers=hidden,
        max_pruning_ratio=0.95,
    )
    for tokens in batches if importance == "taylor" else []:
        loss = F.cross_entropy(plain(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    pruner.step()
    return fused(plain, model)


def fused(plain: PlainGPT, model: GPT) -> GPT:
    """Convert the plain model to Lathe's."""
    D = model.config.head_dim
    state = {n: t for n, t in model.state_dict().items() if not n.startswith("h.")}
    for i, block in enumerate(plain.blocks):
        qkv = [block.q, block.k, block.v]
        weights = [layer.weight.detach().view(-1, D, layer.in_features) for layer in qkv]
        state[f"h.{i}.attn.c_attn.weight"] = torch.stack(weights, 1).flatten(0, 2)
        biases = [layer.bias.detach().view(-1, D) for layer in qkv]
        state[f"h.{i}.attn.c_attn.bias"] = torch.stack(biases, 1).flatten()
        parts = {"ln_1": block.ln_1, "ln_2": block.ln_2, "attn.c_proj": block.out}
        for name, part in (parts | {"mlp.c_fc": block.fc, "mlp.c_proj": block.proj}).items():
            state |= {f"h.{i}.{name}.{key}": tensor for key, tensor in part.state_dict().items()}
    config = replace(
        model.config,
        n_head=tuple(block.q.out_features // D for block in plain.blocks),
        n_inner=tuple(block.fc.out_features for block in plain.blocks),
    )
    small = GPT(config)
    small.load_state_dict(state)
    return small


class Sequences(CalibrationDataReader):
    def __init__(self, model: OnnxModel, batches: list[Tensor]) -> None:
        self.feeds = self._all(model, batches)

    def _all(self, model: OnnxModel, batches: list[Tensor]) -> Iterator[dict[str, Any]]:
        for tokens in batches:
            places = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
            yield model.feeds(tokens.numpy(), np.full(len(tokens), tokens.shape[1]), places)

    def get_next(self) -> dict[str, Any] | None:
        return next(self.feeds, None)


def by_onnxruntime(dense: Path, folder: Path, batches: list[Tensor]) -> None:
    """Write an export folder with a graph quantized by onnxruntime's own tool."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(dense / name, folder / name)
    folded = folder / "folded.onnx"
    quant_pre_process(dense / MODEL, folded, skip_symbolic_shape=True)
    quantize_static(
        folded,
        folder / MODEL,
        Sequences(OnnxModel(dense), [tokens[:, :-1] for tokens in batches]),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    folded.unlink()
    metadata = json.loads((dense / METADATA).read_text())
    metadata |= {"bytes": (folder / MODEL).stat().st_size, "sha256": sha256(folder / MODEL)}
    (folder / METADATA).write_text(json.dumps(metadata))


def make_all(settings: argparse.Namespace) -> None:
    recipe = tuned(settings, *PRUNE_RATE, "Compress.Prune.ratio=0")
    checkpoint = load_checkpoint(settings.model)
    data = TokenDataset.open(settings.data)
    batches = [torch.from_numpy(batch) for batch in first_batches(recipe, data, CALIBRATION)]

    folder = settings.output / "int8 by onnxruntime"
    if not (folder / "onnx" / METADATA).is_file():
        by_onnxruntime(settings.output / "dense" / "onnx", folder / "onnx", batches)
    measure_up(folder / "onnx", folder, settings)

    for ratio in (0.25, 0.5):
        for importance, is_global in (("l1", False), ("taylor", True)):
            scope = "global" if is_global else "uniform"
            folder = settings.output / f"{ratio:.0%} {importance} {scope} by torch-pruning"
            start = folder / "start"
            if not start.is_dir():
                logging.info("--- %s", folder.name)
                model = load_checkpoint(settings.model).model
                small = by_torch_pruning(model, ratio, importance, is_global, batches)
                logging.info("heads %s, widths %s", small.config.n_head, small.config.n_inner)
                save_checkpoint(start, small, checkpoint.tokenizer, "prune", recipe)
            prune(recipe, start, settings.data, folder / "pruned")
            if not (folder / "onnx" / METADATA).is_file():
                export(recipe, folder / "pruned", settings.data, folder / "onnx")
            measure_up(folder / "pruned", folder, settings)


def main() -> None:
    settings = arguments(__doc__.splitlines()[0]).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make_all(settings)
    Console(width=140).print(table(settings.output, settings.threads))


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Make a linear with a copy of these values."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.weight = nn.Parameter(weight.clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer


if __name__ == "__main__":
    main()
