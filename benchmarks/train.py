"""Training speed: Lathe's loop against transformers' `Trainer` and a plain loop.

    python benchmarks/train.py [--device cpu] [--threads 2] [--repeats 3] [--shape 124M]

All three train the same shape with fused AdamW, clipping at norm 1, no dropout and the same batch,
length and precision (float32 on a CPU, bfloat16 autocast on a GPU), each in a separate process.
They take turns, so that ratios are reliable even if absolute figures are not.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from torch import Tensor, nn

from lathe.data.megatron import MegatronWriter
from lathe.data.tokenizer import EOS
from lathe_base.artifacts.kinds import DATA

WARM_UP = 3  # untimed steps


@dataclass(frozen=True)
class Shape:
    """A GPT, its batch of (batch, length) tokens, and the number of timed steps."""

    name: str
    hidden: int
    layers: int
    heads: int
    batch: int
    length: int
    steps: int
    vocabulary: int = 50304

    @property
    def max_steps(self) -> int:
        return WARM_UP + self.steps

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward, with full attention (PaLM, Chowdhery et al. 2022)."""
        weights = 12 * self.layers * self.hidden**2 + self.vocabulary * self.hidden
        return 6 * weights + 12 * self.layers * self.hidden * self.length

    def tokens_per_second(self, seconds: float) -> float:
        """Throughput over the timed steps."""
        return self.steps * self.batch * self.length / seconds


SHAPES = {
    "cpu": (
        Shape("tiny", 192, 4, 6, 8, 128, 40, vocabulary=4096),
        Shape("17M", 256, 4, 4, 8, 256, 8),
        Shape("124M", 768, 12, 12, 4, 128, 5),
    ),
    "cuda": (
        Shape("345M", 1024, 24, 16, 8, 1024, 20),
        Shape("1.3B", 2048, 24, 16, 8, 1024, 20),
    ),
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(SHAPES), default="cpu", help="device to run on")
    parser.add_argument("--threads", type=int, default=2, help="number of threads")
    parser.add_argument("--repeats", type=int, default=3, help="number of rounds")
    parser.add_argument("--shape", action="append", help="name of a shape; repeatable")
    arguments = parser.parse_args()
    shapes = [s for s in SHAPES[arguments.device] if s.name in (arguments.shape or [s.name])]
    workers = {name: worker(arguments.threads) for name in CONTESTANTS}
    where = machine(arguments.device)
    packages = (f"{name} {version(name)}" for name in ("torch", "transformers"))
    print(f"{where}, threads {arguments.threads}, {', '.join(packages)}")
    print(f"tokens/s, median of {arguments.repeats} runs in turns")
    print(f"{'shape':<8}{'batch':>10}" + "".join(f"{name:>22}" for name in workers) + "   lathe is")
    for shape in shapes:
        found: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(arguments.repeats):
            for name, process in workers.items():
                found[name].append(process.submit(measure, name, shape, arguments.device).result())
        print(row(shape, {name: statistics.median(v) for name, v in found.items()}, where))


def worker(threads: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,))


def row(shape: Shape, speeds: dict[str, float], where: str) -> str:
    peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in where), None)
    cells = []
    for speed in speeds.values():
        mfu = f" (MFU {speed * shape.flops_per_token / peak:.0%})" if peak else ""
        cells.append(f"{f'{speed:,.0f}{mfu}':>22}")
    lathe, *others = speeds.values()
    ratios = ", ".join(f"{lathe / other:.2f}x" for other in others)
    return f"{shape.name:<8}{f'{shape.batch} x {shape.length}':>10}{''.join(cells)}   {ratios}"


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def measure(name: str, shape: Shape, device: str) -> float:
    """Tokens per second of one contestant, without its first steps."""
    with TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder) / "tokens", shape)
        speed = CONTESTANTS[name](shape, device, Path(folder), tokens)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return speed


def write_tokens(folder: Path, shape: Shape) -> np.ndarray:
    """Write a data set of random ids, slightly more than the steps need; returns the ids."""
    folder.mkdir()
    total = shape.max_steps * shape.batch * shape.length + 1
    sizes = [shape.length * 4] * -(-total // (shape.length * 4))
    ids = np.random.default_rng(0).integers(shape.vocabulary, size=(len(sizes), sizes[0]))
    with MegatronWriter(folder / "tokens", shape.vocabulary) as writer:
        for document in ids:
            writer.append(document)
    metadata = {
        "documents": len(sizes),
        "tokens": sum(sizes),
        "vocab_size": shape.vocabulary,
        "eos_id": 0,
    }
    (folder / DATA.metadata_file).write_text(json.dumps(metadata))
    Tokenizer(models.WordLevel({EOS: 0}, EOS)).save(str(folder / "tokenizer.json"))
    return ids.flatten()


def overrides(shape: Shape, device: str) -> dict[str, object]:
    """Overrides of the recipe `tiny` to train this shape without evaluation and saving."""
    return {
        "Global.device": "gpu" if device == "cuda" else "cpu",
        "Global.local_batch_size": shape.batch,
        "Global.micro_batch_size": shape.batch,
        "Engine.max_steps": shape.max_steps,
        "Engine.eval_freq": 10**6,
        "Engine.logging_freq": 10**6,
        "Engine.save_load.save_steps": 10**6,
        "Engine.mix_precision.dtype": "bfloat16" if device == "cuda" else "float32",
        "Data.Train.dataset.split": "[1,0,0]",
        "Data.Train.dataset.max_seq_len": shape.length,
        "Model.vocab_size": shape.vocabulary,
        "Model.hidden_size": shape.hidden,
        "Model.num_layers": shape.layers,
        "Model.num_attention_heads": shape.heads,
        "Optimizer.lr.max_lr": 1e-4,
        "Optimizer.lr.min_lr": 1e-5,
    }


def lathe(shape: Shape, device: str, folder: Path, tokens: np.ndarray) -> float:
    """Train with `lathe pretrain`; seconds are from its trace."""
    from lathe.train.pretrain import pretrain
    from lathe_base.config.recipe import load_recipe

    settings = [f"{key}={value}" for key, value in overrides(shape, device).items()]
    pretrain(load_recipe("tiny", settings), folder / "tokens", folder / "lathe")
    seconds = [record["step_seconds"] for record in read_steps(folder / "lathe")]
    assert len(seconds) == shape.max_steps
    return shape.tokens_per_second(sum(seconds[WARM_UP:]))


def read_steps(run: Path) -> list[dict[str, float]]:
    """Read the steps of a run's trace."""
    from lathe.train.trace import TRACE

    records = map(json.loads, (run / TRACE).read_text().splitlines())
    return [record for record in records if "step_seconds" in record]


def transformers(shape: Shape, device: str, folder: Path, tokens: np.ndarray) -> float:
    """Train with `Trainer`, without logging, evaluation and saving, and with data in memory."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.trainer_callback import PrinterCallback
    from transformers.utils import logging

    logging.set_verbosity_error()

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
            if state.global_step == WARM_UP:
                self.started = now(device)

        def on_train_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
            self.seconds = now(device) - self.started

    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.length,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    arguments = TrainingArguments(
        str(folder / "transformers"),
        max_steps=shape.max_steps,
        per_device_train_batch_size=shape.batch,
        use_cpu=device == "cpu",
        bf16=device == "cuda",
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=device == "cuda",
    )
    whole = len(tokens) // shape.length
    samples = torch.from_numpy(tokens[: whole * shape.length]).view(-1, shape.length)
    data = [{"input_ids": sample, "labels": sample} for sample in samples]
    clock = Clock()
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[clock])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return shape.tokens_per_second(clock.seconds)


def plain_loop(shape: Shape, device: str, folder: Path, tokens: np.ndarray) -> float:
    """Train with a plain loop in eager PyTorch, as in nanoGPT."""
    model = PlainGPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.01, fused=True)
    rng = np.random.default_rng(0)
    for step in range(shape.max_steps):
        if step == WARM_UP:
            started = now(device)
        starts = rng.integers(len(tokens) - shape.length, size=shape.batch)
        rows = np.stack([tokens[i : i + shape.length + 1] for i in starts])
        batch = torch.from_numpy(rows).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return shape.tokens_per_second(now(device) - started)


class PlainBlock(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc, self.proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        x = x + self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))
        return x


class PlainGPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.hidden)
        self.wpe = nn.Embedding(shape.length, shape.hidden)
        self.blocks = nn.Sequential(
            *(PlainBlock(shape.hidden, shape.heads) for _ in range(shape.layers))
        )
        self.ln_f = nn.LayerNorm(shape.hidden)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.ln_f(self.blocks(x)), self.wte.weight)


def now(device: str) -> float:
    """Time in seconds, after waiting for all launched kernels."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


CONTESTANTS: dict[str, Callable[[Shape, str, Path, np.ndarray], float]] = {
    "lathe": lathe,
    "transformers": transformers,
    "plain loop": plain_loop,
}

if __name__ == "__main__":
    main()
