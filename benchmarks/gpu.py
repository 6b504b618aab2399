r"""Training on one GPU in one command: speed, memory, float16, exact resume, compression.

    pip download --no-deps --dest build/wheels --python-version 3.12 --only-binary=:all: \
        pyyaml pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection rich \
        markdown-it-py mdurl pygments tenacity tensorboardX protobuf packaging urllib3 zstandard \
        fastokens==0.3.5 securesystemslib cryptography cffi pycparser \
        tritonclient python-rapidjson httpx2 gguf   # 23 MB; versions as in the lock file

    pip install --no-index --no-deps --target build/site build/wheels/*.whl    # on the machine
    PYTHONPATH=build/site:. python benchmarks/gpu.py [--minutes 9] [--output gpu.json]

The machine needs torch, numpy, safetensors and tokenizers, but neither a network nor Lathe's
environment: the wheels provide the other packages, except scipy and onnxruntime, which the part for
compression and evaluation needs. Every part runs in a separate process. A failing part is a row of
the table, and sets the exit status to 1; parts for which no time is left are skipped, with the most
important ones first. `--device cpu` runs everything with toy shapes.
"""

import argparse
import json
import math
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from train import WARM_UP, Shape, machine, overrides, read_steps, write_tokens

from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.data.prepare import prepare
from lathe.train.layout import configured_layout
from lathe.train.memory import estimate
from lathe.train.pretrain import pretrain
from lathe.train.saved import committed_steps
from lathe.train.shape import model_config
from lathe_base.artifacts.kinds import STATE
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.storage import sha256

Figures = dict[str, Any]
SHAPES = {
    "cuda": {
        "345M": Shape("345M", 1024, 24, 16, 32, 1024, 12),
        "1.3B": Shape("1.3B", 2048, 24, 16, 16, 1024, 8),
        "toy": Shape("toy", 512, 8, 8, 8, 512, 60),
    },
    "cpu": dict.fromkeys(("345M", "1.3B", "toy"), Shape("toy", 64, 2, 2, 2, 64, 9, vocabulary=512)),
}
RECOMPUTE = {"Model.use_recompute": True, "Model.recompute_granularity": "full"}
COMPILE = {"Engine.compile": True}


def speed(device: str, folder: Path, name: str, **settings: object) -> Figures:
    """Tokens per second, MFU and memory of `lathe pretrain`, without its first steps."""
    shape = SHAPES[device][name]
    write_tokens(folder / "tokens", shape)
    recipe = make_recipe(overrides(shape, device) | settings)
    pretrain(recipe, folder / "tokens", folder / "run")
    steps = read_steps(folder / "run")
    seconds = sum(step["step_seconds"] for step in steps[WARM_UP:])
    figures: Figures = {
        "tokens_per_second": shape.tokens_per_second(seconds),
        "mfu": steps[-1]["mfu"] and sum(s["mfu"] for s in steps[WARM_UP:]) / shape.steps,
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "skipped_steps": steps[-1]["skipped_steps"],
    }
    if device == "cuda":
        config = model_config(recipe, shape.vocabulary)
        expected = estimate(config, recipe, configured_layout(config, recipe, 1)).total
        peak = torch.cuda.max_memory_allocated()
        figures |= {"peak_gb": peak / 1e9, "peak_of_estimate": peak / expected}
    require(math.isfinite(figures["last_loss"]), "the loss is not finite")
    return figures


def float16(device: str, folder: Path) -> Figures:
    """Check that training in float16 with loss scaling reduces the loss."""
    recipe = make_recipe(on(device) | {"Engine.mix_precision.dtype": "float16"})
    prepare(recipe, folder / "data")
    pretrain(recipe, folder / "data", folder / "run")
    steps = read_steps(folder / "run")
    first, last = steps[0]["loss"], steps[-1]["loss"]
    require(last < 0.95 * first, f"the loss goes from {first} to {last}")
    skipped, scale = steps[-1]["skipped_steps"], steps[-1]["loss_scale"]
    return {"first_loss": first, "last_loss": last, "skipped_steps": skipped, "loss_scale": scale}


def resume(device: str, folder: Path) -> Figures:
    """Check that a run killed after a save resumes bit for bit."""
    shape = SHAPES[device]["toy"]
    write_tokens(folder / "tokens", shape)
    recipe = make_recipe(overrides(shape, device) | {"Engine.save_load.save_steps": 4})
    pretrain(recipe, folder / "tokens", folder / "whole")
    arguments = recipe, folder / "tokens", folder / "killed"
    process = multiprocessing.get_context("spawn").Process(target=pretrain, args=arguments)
    process.start()
    while process.is_alive() and not committed_steps(folder / "killed" / STATE):
        time.sleep(0.01)
    process.kill()
    process.join()
    (saved,) = committed_steps(folder / "killed" / STATE)[-1:]
    pretrain(*arguments)
    runs = [folder / "whole", folder / "killed"]
    losses = [[step["loss"] for step in read_steps(run)] for run in runs]
    same = [sha256(run / "model.safetensors") for run in runs]
    require(losses[0] == losses[1] and same[0] == same[1], f"another end after {saved.name}")
    return {"killed_after": saved.name, "same_losses": len(losses[0]), "same_weights": True}


def compression(device: str, folder: Path) -> Figures:
    """Check that pruning, QAT and evaluation on the device are as good as on a CPU."""
    recipe, data, text = make_recipe(on(device)), folder / "data", folder / "text.txt"
    prepare(recipe, data)
    text.write_text((data / "heldout.txt").read_text()[:20_000])
    dense, cut = folder / "dense", folder / "cut"
    pretrain(recipe, data, dense)
    prune(make_recipe(on(device) | {"Compress.Prune.ratio": 0.25}), dense, data, cut)
    for bits in (8, 4):
        settings = on(device) | {"Compress.Quantization.weight_bits": bits}
        quantize(make_recipe(settings), cut, data, folder / f"int{bits}")
    figures: Figures = {}
    for name in ("dense", "cut", "int8", "int4"):
        figures[name], on_cpu = (
            perplexity(folder / name, folder / f"{name} on {place}", text, place)
            for place in (device, "cpu")
        )
        close = math.isclose(figures[name], on_cpu, rel_tol=5e-3)
        require(close, f"{name}: perplexity {figures[name]}, on a CPU {on_cpu}")
    return figures


def perplexity(model: Path, output: Path, text: Path, device: str) -> float:
    from lathe.evaluate.evaluate import evaluate  # requires scipy and onnxruntime

    found = evaluate(make_recipe(on(device)), model, output, text=text).figures["perplexity"]
    assert found is not None
    return found


def on(device: str) -> dict[str, object]:
    steps, gpu = (20, "cpu") if device == "cpu" else (100, "gpu")
    return {"Global.device": gpu, "Engine.max_steps": steps}


def make_recipe(settings: dict[str, object]) -> Recipe:
    return load_recipe("tiny", [f"{key}={value}" for key, value in settings.items()])


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def measure_speed_with(name: str, **settings: object) -> Callable[[str, Path], Figures]:
    return lambda device, folder: speed(device, folder, name, **settings)


PARTS: dict[str, Callable[[str, Path], Figures]] = {
    "345M": measure_speed_with("345M"),
    "exact resume": resume,
    "float16": float16,
    "prune, QAT, evaluate": compression,
    "1.3B, compiled": measure_speed_with("1.3B", **COMPILE),
    "345M, compiled": measure_speed_with("345M", **COMPILE),
    "1.3B": measure_speed_with("1.3B"),
    "1.3B, recompute": measure_speed_with("1.3B", **RECOMPUTE),
    "345M, recompute": measure_speed_with("345M", **RECOMPUTE),
    "1.3B, compiled, recompute": measure_speed_with("1.3B", **COMPILE, **RECOMPUTE),
    "345M, compiled, recompute": measure_speed_with("345M", **COMPILE, **RECOMPUTE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(SHAPES), default="cuda", help="device to run on")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit in minutes")
    parser.add_argument(
        "--output", type=Path, default=Path("gpu.json"), help="file for the figures"
    )
    parser.add_argument(
        "--only", action="append", choices=list(PARTS), help="part to run; repeatable"
    )
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        with TemporaryDirectory() as scratch:
            print(json.dumps(PARTS[given.part](given.device, Path(scratch))))
        return
    where = machine(given.device)
    print(f"{where}, torch {torch.__version__}")
    ends, results = time.monotonic() + 60 * given.minutes, {}
    for name in given.only or PARTS:
        results[name] = run(name, given.device, ends - time.monotonic())
        print(f"{name:28}{row(results[name])}", flush=True)
    facts = {"device": where, "torch": torch.__version__, "parts": results}
    given.output.write_text(json.dumps(facts, indent=2) + "\n")
    sys.exit(any("failed" in result for result in results.values()))


def run(name: str, device: str, seconds: float) -> Figures:
    """Run a part in a process; returns its figures, or why there are none."""
    if seconds < 20:
        return {"skipped": "no time left"}
    if name == "float16" and device == "cpu":
        return {"skipped": "minutes on a CPU"}
    command = [sys.executable, __file__, "--part", name, "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {seconds:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def row(figures: Figures) -> str:
    shown = (f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    return ", ".join(shown)


if __name__ == "__main__":
    main()
