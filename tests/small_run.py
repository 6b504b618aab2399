"""A small model's settings, and commands that train it in processes of their own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from lathe.train.state import saved_steps

SMALL = (
    "Model.hidden_size=32",
    "Model.num_layers=2",
    "Model.num_attention_heads=4",
    "Model.max_position_embeddings=32",
    "Data.Train.dataset.max_seq_len=32",
    "Data.Eval.dataset.max_seq_len=32",
    "Global.local_batch_size=8",
    "Global.micro_batch_size=4",
    "Engine.max_steps=20",
    "Engine.eval_freq=10",
    "Engine.eval_iters=2",
    "Engine.save_load.save_steps=4",
    "Optimizer.lr.max_lr=2e-3",
    "Optimizer.lr.min_lr=2e-4",
)


SCRIPT = """
import sys
from pathlib import Path
from lathe.compress.quantize import quantize
from lathe.recipe import load_recipe
from lathe.train.pretrain import pretrain
stage, *paths = sys.argv[1].split(",")
recipe = load_recipe("tiny", sys.argv[2:])
{"pretrain": pretrain, "quantize": quantize}[stage](recipe, *map(Path, paths))
"""


def start(
    stage: str, *paths: Path, overrides: tuple[str, ...] = (), workers: int = 1
) -> subprocess.Popen[bytes]:
    """`stage(recipe, *paths)` in one process, or under torchrun; the last path is its output."""
    script = paths[-1].parent / "stage.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command = [sys.executable, *(launcher if workers > 1 else []), str(script)]
    return subprocess.Popen(
        [*command, ",".join([stage, *map(str, paths)]), *SMALL, *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
        stderr=subprocess.PIPE,
    )


def run(stage: str, *paths: Path, overrides: tuple[str, ...] = (), workers: int = 1) -> None:
    process = start(stage, *paths, overrides=overrides, workers=workers)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()


def kill_after_saves(process: subprocess.Popen[bytes], output: Path, saves: int) -> None:
    """SIGKILL as soon as `output` holds that many committed states."""
    deadline = time.monotonic() + 60
    while len(saved_steps(output / "state")) < saves and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not (output / "lathe.json").exists()


def records(folder: Path, key: str) -> list[float]:
    """All values of `key` in a run's trace."""
    lines = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]
