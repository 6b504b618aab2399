r"""The plan for 25 minutes on one GPU: speed, hidden waits, exact resume, compression.

    pip download --no-deps --dest build/wheels --python-version 3.12 --only-binary=:all: \
        pyyaml pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection rich \
        markdown-it-py mdurl pygments tenacity tensorboardX protobuf packaging urllib3 zstandard \
        fastokens==0.3.5 securesystemslib cryptography cffi pycparser \
        tritonclient python-rapidjson httpx2 gguf   # 23 MB; versions as in the lock file

    pip install --no-index --no-deps --target build/site build/wheels/*.whl    # on the machine
    PYTHONPATH=build/site:. python benchmarks/gpu.py [--minutes 9] [--output gpu.json]

The machine needs torch, numpy, safetensors and tokenizers, but neither a network nor Lathe's
environment: the wheels provide the other packages, except scipy and onnxruntime, which the part for
evaluation needs.

Parts run in the order of their importance, each in a process of its own and for its own time at
most. What a part has measured is in the output file as soon as it is known, also if the part does
not end; a part that fails is a row like the others and sets the exit status to 1. Called again with
the same output file, it continues with the parts that have not run. `--dry` runs them on a CPU with
toy shapes, except float16, which takes minutes there.
"""

import argparse
import copy
import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from loss import compare
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from train import WARM_UP, Shape, machine, now, overrides, plain_loop, read_steps, write_tokens

from lathe.compress.criteria import importance
from lathe.compress.gptq import gptq, gptq_bytes
from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.data.prepare import prepare
from lathe.model import fake_quant
from lathe.model.block import Attention
from lathe.model.config import GPTConfig
from lathe.model.families import LLAMA
from lathe.model.gpt import GPT
from lathe.model.quantization import LinearFormat, QuantizationPlan, WeightFormat
from lathe.train import loss as loss_module
from lathe.train.layout import configured_layout
from lathe.train.loop import Loop, StopSaveFlags
from lathe.train.memory import estimate
from lathe.train.pretrain import pretrain
from lathe.train.room import pass_bytes
from lathe.train.shape import model_config
from lathe.train.state_folder import committed_steps
from lathe.train.trainer import Trainer
from lathe_base.artifacts.kinds import STATE
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.storage import atomic_file, sha256

Figures = dict[str, Any]
DRY = Shape("toy", 64, 2, 2, 2, 64, 9, vocabulary=512)
SHAPES = {
    "cuda": {
        "345M, 8 rows": Shape("345M", 1024, 24, 16, 8, 1024, 20),
        "345M": Shape("345M", 1024, 24, 16, 32, 1024, 12),
        "1.3B": Shape("1.3B", 2048, 24, 16, 16, 1024, 8),
        "toy": Shape("toy", 512, 8, 8, 8, 512, 60),
    },
    "cpu": dict.fromkeys(("345M, 8 rows", "345M", "1.3B", "toy"), DRY),
}
O2: Figures = {"Engine.mix_precision.dtype": "bfloat16", "Engine.mix_precision.level": "O2"}
COMPILE = {"Engine.compile": True}
FP8 = COMPILE | {"Engine.mix_precision.fp8": True}
FREE = {"Engine.deterministic": False}
RECOMPUTE = {"Model.use_recompute": True, "Model.recompute_granularity": "full"}


class Part(NamedTuple):
    """A part of the plan, which yields its figures one after another, and its time at most."""

    seconds: float
    run: Callable[[str, Path], Iterator[Figures]]


def ceilings(device: str, folder: Path) -> Iterator[Figures]:
    """What the machine's own kernels reach at the shapes of both models, and that it compiles."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    yield {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("345M", "1.3B"):
        shape = SHAPES[device][name]
        rows, width, heads = shape.batch * shape.length, shape.hidden, shape.heads
        x, w = (torch.randn(n, width, device=device, dtype=dtype) for n in (rows, 4 * width))
        seconds = best_seconds(device, lambda x=x, w=w: x @ w.T)  # type: ignore[misc]
        yield {f"{name}: matmul TFLOP/s": 8 * rows * width**2 / seconds / 1e12}
        y = torch.empty_like(x)
        seconds = best_seconds(device, lambda x=x, y=y: y.copy_(x))  # type: ignore[misc]
        yield {f"{name}: copy GB/s": 2 * x.nbytes / seconds / 1e9}
        size = (shape.batch, heads, shape.length, width // heads)
        q, k, v = (torch.randn(size, device=device, dtype=dtype).requires_grad_() for _ in "qkv")
        for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(kernel):
                try:
                    seconds = best_seconds(device, lambda: attend(q, k, v))  # noqa: B023
                except RuntimeError as error:
                    yield {f"{name}: {kernel.name}": str(error).splitlines()[0]}
                else:
                    flops = 3.5 * 2 * shape.batch * shape.length**2 * width  # causal
                    yield {f"{name}: {kernel.name} TFLOP/s": flops / seconds / 1e12}
    started = time.perf_counter()
    torch.compile(lambda x: F.gelu(x).square())(x)
    yield {"first compilation, s": time.perf_counter() - started}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]


def best_seconds(device: str, run: Callable[[], object], rounds: int = 10) -> float:
    """The shortest of several runs."""
    seconds = math.inf
    for _ in range(rounds):
        started = now(device)
        run()
        seconds = min(seconds, now(device) - started)
    return seconds


def speed(
    device: str,
    folder: Path,
    name: str,
    changed: AbstractContextManager[object] | None = None,
    recipe: str = "tiny",
    **settings: object,
) -> Figures:
    """Tokens per second, MFU and memory of `lathe pretrain`, without its first steps."""
    shape = SHAPES[device][name]
    data = folder / f"tokens {name}"
    if not data.exists():
        write_tokens(data, shape)
    chosen = overrides(shape, device) | {"Global.global_batch_size": shape.batch} | settings
    if recipe != "tiny":  # keeps its own precision
        del chosen["Engine.mix_precision.dtype"]
    made = make_recipe(chosen, recipe)
    run = folder / f"run {len(list(folder.iterdir()))}"
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with changed or nullcontext():
        pretrain(made, data, run)
    steps = read_steps(run)
    seconds = sum(step["step_seconds"] for step in steps[WARM_UP:])
    figures: Figures = {
        "tokens_per_second": shape.tokens_per_second(seconds),
        "mfu": steps[-1]["mfu"] and sum(s["mfu"] for s in steps[WARM_UP:]) / shape.steps,
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "skipped_steps": steps[-1]["skipped_steps"],
    }
    if device == "cuda":
        config = model_config(made, shape.vocabulary)
        expected = estimate(config, made, configured_layout(config, made, 1)).total
        peak = torch.cuda.max_memory_allocated()
        figures |= {"peak_gb": peak / 1e9, "peak_of_estimate": peak / expected}
    require(math.isfinite(figures["last_loss"]), "the loss is not finite")
    return figures


def speeds(
    name: str, cases: dict[str, Figures], recipe: str = "tiny"
) -> Callable[[str, Path], Iterator[Figures]]:
    """A part that measures the speed with several settings."""

    def run(device: str, folder: Path) -> Iterator[Figures]:
        for case, settings in cases.items():
            for key, value in speed(device, folder, name, None, recipe, **settings).items():
                yield {f"{case}: {key}" if case else key: value}

    return run


def profiled(device: str, folder: Path) -> Iterator[Figures]:
    """345M at 8 rows: its speed, what three steps spend their time on, and whether ten launch
    without waiting for the GPU."""
    yield speed(device, folder, "345M, 8 rows", **O2)
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    seen: list[Any] = []

    @contextmanager
    def watched() -> Iterator[None]:
        with profile(activities=activities) as profiler:
            yield
        seen.append(profiler.key_averages())

    speed(device, folder, "345M, 8 rows", during_steps(watched, 5, 3, device), **O2)
    rows = sorted(seen[0], key=lambda row: -row.self_device_time_total)
    if device == "cpu":
        rows = sorted(seen[0], key=lambda row: -row.self_cpu_time_total)
    for row in rows[:12]:
        total = row.self_device_time_total or row.self_cpu_time_total
        yield {f"ms a step: {row.key[:60]}": total / 3e3}
    yield {"waits": {r.key: r.count for r in rows if "Synchronize" in r.key or "item" in r.key}}

    @contextmanager
    def strict() -> Iterator[None]:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default") if device == "cuda" else None

    speed(device, folder, "345M, 8 rows", launching_in(strict, 5, 10), **O2)
    yield {"launches without waiting": True}


@contextmanager
def during_steps(
    context: Callable[[], AbstractContextManager[None]], first: int, count: int, device: str
) -> Iterator[None]:
    """Enter a context for `count` steps of a training."""
    launch, stack = Loop._launch, ExitStack()

    def launched(loop: Loop, flags: StopSaveFlags) -> int:
        step = loop.at.step + len(loop._in_flight)
        if step == first:
            stack.enter_context(context())
        result = launch(loop, flags)
        if step == first + count - 1:
            now(device)
            stack.close()
        return result

    with patch.object(Loop, "_launch", launched):
        yield


@contextmanager
def launching_in(
    context: Callable[[], AbstractContextManager[None]], first: int, count: int
) -> Iterator[None]:
    """Enter a context for the launches of `count` steps of a training."""
    launch = Loop._launch

    def launched(loop: Loop, flags: StopSaveFlags) -> int:
        step = loop.at.step + len(loop._in_flight)
        with context() if first <= step < first + count else nullcontext():
            return launch(loop, flags)

    with patch.object(Loop, "_launch", launched):
        yield


@contextmanager
def reading_at_once() -> Iterator[None]:
    """Trainers wait for every step before they launch the next."""
    make = Trainer.__init__

    def made(trainer: Trainer, *arguments: Any) -> None:
        make(trainer, *arguments)
        trainer.lag = 0

    with patch.object(Trainer, "__init__", made):
        yield


def one_by_one(device: str, folder: Path) -> Iterator[Figures]:
    """345M compiled, then what single choices are worth."""
    cases: dict[str, tuple[AbstractContextManager[object], Figures]] = {
        "compiled": (nullcontext(), COMPILE),
        "read at once": (reading_at_once(), {}),
        "read a step late": (nullcontext(), {}),
        "cuDNN": (sdpa_kernel(SDPBackend.CUDNN_ATTENTION), FREE),
        "FlashAttention": (sdpa_kernel(SDPBackend.FLASH_ATTENTION), FREE),
        "a quarter of the loss's chunks": (patch.object(loss_module, "CHUNK_ELEMENTS", 2**28), {}),
        "four times the loss's chunks": (patch.object(loss_module, "CHUNK_ELEMENTS", 2**24), {}),
    }
    for case, (changed, settings) in cases.items():
        if device == "cpu" and settings is FREE:
            continue  # no such kernels
        found = speed(device, folder, "345M", changed, **O2, **settings)
        yield {f"{case}: {key}": found[key] for key in ("tokens_per_second", "mfu")}


def documents(device: str, folder: Path) -> Iterator[Figures]:
    """Attention within documents in one kernel beside one for each, and within a window in that
    kernel beside a mask: the same, and how fast."""
    config = GPTConfig(512, 1024, 1024, 64, (16,), (64,))
    attention = Attention(config, 0, 0.0)
    rows, length = (8, 1024) if device == "cuda" else (2, 64)
    sizes = (length // 4, length // 2, length // 4) * rows
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (rows, 16, length, 64)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in "qkv")
    # FlashAttention's kernel needs (8, 0); without a GPU there are only the others.
    for case, mask, window in (("documents", sizes, None), ("window", None, length // 4)):
        attention.window, outputs = window, []
        for name, capability in (("one kernel", (8, 0)), ("without it", (0, 0))):
            with patch.object(
                torch.cuda, "get_device_capability", lambda _, found=capability: found
            ):

                def run(mask: tuple[int, ...] | None = mask) -> list[torch.Tensor]:
                    out = attention._core(q, k, v, mask, None)
                    return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

                yield {f"{case}, {name}, ms": 1e3 * best_seconds(device, run)}
                outputs.append(run())
        away = max(float((a - b).abs().max()) for a, b in zip(*outputs, strict=True))
        yield {f"{case}, difference": away}
        require(away < 0.1, f"{case}: the two differ by {away}")


def losses(device: str, folder: Path) -> Iterator[Figures]:
    """The head's loss and gradients by whole logits, by torch's chunks and by Lathe's."""
    cuda = device == "cuda"
    shape = SHAPES[device]["345M"]
    tokens, dtype = shape.batch * shape.length, torch.bfloat16 if cuda else torch.float32
    for name, seconds, memory, error in compare(
        device, dtype, tokens, shape.hidden, shape.vocabulary, 5
    ):
        yield {f"{name}: ms": 1e3 * seconds, f"{name}: GB": memory, f"{name}: error": error}


def resume(device: str, folder: Path) -> Iterator[Figures]:
    """Check that a run killed after a save resumes bit for bit, eager and compiled."""
    shape = SHAPES[device]["toy"]
    write_tokens(folder / "tokens", shape)
    for case, settings in (("eager", {}), ("compiled", COMPILE)):
        recipe = make_recipe(
            overrides(shape, device) | {"Engine.save_load.save_steps": 4} | settings
        )
        whole, killed = folder / f"whole {case}", folder / f"killed {case}"
        pretrain(recipe, folder / "tokens", whole)
        arguments = recipe, folder / "tokens", killed
        process = multiprocessing.get_context("spawn").Process(target=pretrain, args=arguments)
        process.start()
        while process.is_alive() and not committed_steps(killed / STATE):
            time.sleep(0.01)
        process.kill()
        process.join()
        saved = committed_steps(killed / STATE)[-1:]
        pretrain(*arguments)
        losses = [[step["loss"] for step in read_steps(run)] for run in (whole, killed)]
        same = [sha256(run / "model.safetensors") for run in (whole, killed)]
        name = saved[0].name if saved else "its end"
        require(losses[0] == losses[1] and same[0] == same[1], f"{case}: another end after {name}")
        yield {f"{case}: killed after": name, f"{case}: same weights": True}


def qat(device: str, folder: Path) -> Iterator[Figures]:
    """Speed of quantization-aware training to static INT8, without and with a teacher."""
    shape = SHAPES[device]["345M, 8 rows"]
    write_tokens(folder / "tokens", shape)
    settings = overrides(shape, device) | O2
    pretrain(make_recipe(settings | {"Engine.max_steps": 1}), folder / "tokens", folder / "dense")
    static = {"Compress.Quantization.activation_quantize_type": "moving_average_abs_max"}
    cases: dict[str, Figures] = {
        "alone": {},
        "compiled": COMPILE,
        "with a teacher": {"Compress.Distill.teacher": "parent"},
    }
    for case, more in cases.items():
        recipe = make_recipe(settings | static | more)
        quantize(recipe, folder / "dense", folder / "tokens", folder / case)
        seconds = sum(step["step_seconds"] for step in read_steps(folder / case)[WARM_UP:])
        yield {f"{case}: tokens_per_second": shape.tokens_per_second(seconds)}


def compression(device: str, folder: Path) -> Iterator[Figures]:
    """Check that pruning, QAT, GPTQ and evaluation on the device are as good as on a CPU."""
    recipe, data, text = make_recipe(on(device)), folder / "data", folder / "text.txt"
    prepare(recipe, data)
    text.write_text((data / "heldout.txt").read_text()[:20_000])
    dense, cut = folder / "dense", folder / "cut"
    pretrain(recipe, data, dense)
    prune(make_recipe(on(device) | {"Compress.Prune.ratio": 0.25}), dense, data, cut)
    for bits in (8, 4):
        settings = on(device) | {"Compress.Quantization.weight_bits": bits}
        quantize(make_recipe(settings), cut, data, folder / f"int{bits}")
    rounded = on(device) | {"Compress.Quantization.weight_bits": 4, "Engine.max_steps": 0}
    started = time.perf_counter()
    quantize(make_recipe(rounded), cut, data, folder / "gptq")
    yield {"GPTQ, s": time.perf_counter() - started}
    for dtype in ("tf32", "bfloat16"):
        output, started = folder / dtype, time.perf_counter()
        found = perplexity(dense, output, text, device, dtype)
        used = json.loads((output / "metrics.json").read_text())["protocol"]["dtype"]
        yield {f"dense, {dtype}": found, f"{dtype}: used": used}
        yield {f"dense, {dtype}, s": time.perf_counter() - started}
    for name in ("dense", "cut", "int8", "int4", "gptq"):
        started = time.perf_counter()
        found, on_cpu = (
            perplexity(folder / name, folder / f"{name} on {place}", text, place)
            for place in (device, "cpu")
        )
        yield {name: found, f"{name}, s": time.perf_counter() - started}
        close = math.isclose(found, on_cpu, rel_tol=5e-3)
        require(close, f"{name}: perplexity {found}, on a CPU {on_cpu}")


def perplexity(model: Path, output: Path, text: Path, device: str, dtype: str = "float32") -> float:
    from lathe.evaluate.evaluate import evaluate  # requires scipy and onnxruntime

    recipe = make_recipe(on(device) | {"Offline_Eval.dtype": dtype})
    found = evaluate(recipe, model, output, text=text).figures["perplexity"]
    assert found is not None
    return found


def by_block(device: str, folder: Path) -> Iterator[Figures]:
    """Score and round two blocks of the shape of 7B that are in the host's memory, and compare the
    peaks of the GPU's with the estimates."""
    length, inner, size = (1024, 11008, 128) if device == "cuda" else (32, 96, 2)
    config = GPTConfig(
        *(32000, length, 32 * size, size, (32, 32), (inner, inner)),
        architecture=LLAMA,
        kv_heads=(32, 32),
        tie_word_embeddings=False,
    )
    model = GPT(config).eval()
    batches = [torch.randint(32000, (8, length)).to(device) for _ in range(4)]
    int4 = LinearFormat(WeightFormat.grouped(64, 4))
    plan = QuantizationPlan(dict.fromkeys(config.linear_names(), int4))

    def scores() -> int:
        importance(model, "taylor", batches)
        return pass_bytes(model, batches[0].numel(), gradients=True)

    def rounding() -> int:
        rounded = copy.deepcopy(model)
        fake_quant.insert(rounded, plan)
        gptq(rounded, batches)
        return gptq_bytes(rounded, batches[0].numel())

    for name, run in (("scores", scores), ("GPTQ", rounding)):
        started = time.perf_counter()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        estimated = run()
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        yield {f"{name}, s": time.perf_counter() - started}
        yield {f"{name}, GB": peak / 1e9, f"{name}, GB estimated": estimated / 1e9}
        require(peak <= estimated, f"{name}: {peak} bytes, {estimated} estimated")


def float16(device: str, folder: Path) -> Iterator[Figures]:
    """Check that training in float16 with loss scaling reduces the loss."""
    half = {"Engine.mix_precision.dtype": "float16", "Engine.mix_precision.level": "O2"}
    recipe = make_recipe(on(device) | half | {"Engine.max_steps": 50})
    prepare(recipe, folder / "data")
    pretrain(recipe, folder / "data", folder / "run")
    steps = read_steps(folder / "run")
    first, last = steps[0]["loss"], steps[-1]["loss"]
    skipped, scale = steps[-1]["skipped_steps"], steps[-1]["loss_scale"]
    yield {"first_loss": first, "last_loss": last, "skipped_steps": skipped, "loss_scale": scale}
    require(last < 0.98 * first, f"the loss goes from {first} to {last}")


def plain(device: str, folder: Path) -> Iterator[Figures]:
    """The plain loop of `train.py` beside Lathe, at the same shape."""
    shape = SHAPES[device]["345M, 8 rows"]
    tokens = write_tokens(folder / "tokens", shape)
    yield {"plain loop: tokens_per_second": plain_loop(shape, device, folder, tokens)}
    yield speed(device, folder, "345M, 8 rows")


def on(device: str) -> dict[str, object]:
    steps, gpu = (20, "cpu") if device == "cpu" else (100, "gpu")
    return {"Global.device": gpu, "Engine.max_steps": steps}


def make_recipe(settings: dict[str, object], name: str = "tiny") -> Recipe:
    return load_recipe(name, [f"{key}={value}" for key, value in settings.items()])


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


PARTS = {
    "ceilings": Part(120, ceilings),
    "345M, profiled": Part(150, profiled),
    "gpt-345m": Part(
        120,
        speeds(
            "345M, 8 rows",
            {"as it is": {}, "O1": {"Engine.mix_precision.level": "O1"}},
            "gpt-345m",
        ),
    ),
    "deterministic": Part(120, speeds("345M", {"on": O2, "off": O2 | FREE})),
    "one by one": Part(240, one_by_one),
    "1.3B": Part(
        240,
        speeds(
            "1.3B",
            {"": O2, "compiled": O2 | COMPILE, "fp8": O2 | FP8, "recomputed": O2 | RECOMPUTE},
        ),
    ),
    "exact resume": Part(120, resume),
    "documents": Part(30, documents),
    "losses": Part(60, losses),
    "QAT": Part(120, qat),
    "prune, QAT, GPTQ, evaluate": Part(180, compression),
    "7B by block": Part(120, by_block),
    "float16": Part(60, float16),
    "plain loop": Part(60, plain),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="run on the CPU with toy shapes")
    parser.add_argument("--minutes", type=float, default=25.0, help="time limit of this call")
    parser.add_argument(
        "--output", type=Path, default=Path("gpu.json"), help="file for the figures"
    )
    parser.add_argument(
        "--only", action="append", choices=list(PARTS), help="part to run; repeatable"
    )
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    device = "cpu" if given.dry else "cuda"
    if given.part:
        with TemporaryDirectory() as scratch:
            for figures in PARTS[given.part].run(device, Path(scratch)):
                print(f"{MARK}{json.dumps(figures)}", flush=True)
        return
    where = f"{machine(device)}, torch {torch.__version__}"
    found: Figures = {"device": where, "parts": {}}
    if given.output.exists():
        found = json.loads(given.output.read_text())
        if found["device"] != where:
            parser.error(f"{given.output} is of {found['device']}; give another --output")
    print(where)
    ends = time.monotonic() + 60 * given.minutes
    for name in given.only or PARTS:
        if "seconds" in found["parts"].get(name, {}):
            continue  # an earlier call has run it
        left = ends - time.monotonic()
        if left < min(20, PARTS[name].seconds):
            print(f"{name}: no time left")
            continue
        result: Figures = {}
        found["parts"][name] = result
        for figures in run(name, given.dry, left):
            result |= figures
            with atomic_file(given.output) as work:
                work.write_text(json.dumps(found, indent=2) + "\n")
            print(f"{name}: {row(figures)}", flush=True)
    sys.exit(any("failed" in result for result in found["parts"].values()))


MARK = "figures: "
"""Begins the lines of a part's output that are for the one who started it."""


def run(name: str, dry: bool, left: float) -> Iterator[Figures]:
    """Run a part in a process; yields its figures as they come, then why there are no others, and
    its seconds unless it was the `left` ones of this call that were not enough."""
    if dry and name == "float16":
        yield {"skipped": "minutes on a CPU", "seconds": 0.0}
        return
    command = [sys.executable, __file__, "--part", name, *(["--dry"] if dry else [])]
    # In a rehearsal, `torch.compile` calls what it is given: its minutes would prove nothing.
    environment = {**os.environ, **({"TORCHDYNAMO_DISABLE": "1"} if dry else {})}
    seconds = min(left, PARTS[name].seconds)
    with TemporaryDirectory() as scratch, (Path(scratch) / "log").open("w+") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        started, killed = time.monotonic(), threading.Event()

        def kill() -> None:
            killed.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
        process.wait()
        timer.cancel()
        log.seek(0)
        if killed.is_set() and left < PARTS[name].seconds:
            yield {"cut short": f"after {seconds:.0f} s"}
            return
        if killed.is_set():
            yield {"failed": f"not done after {seconds:.0f} s"}
        elif process.returncode:
            yield {"failed": (log.read().strip().splitlines() or ["no word"])[-1]}
        yield {"seconds": time.monotonic() - started}


def row(figures: Figures) -> str:
    shown = (f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    return ", ".join(shown)


if __name__ == "__main__":
    main()
