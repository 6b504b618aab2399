"""Settings of a small model, and its training stages, in this process or in new ones."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.data.prepare import prepare
from lathe.train.finetune import finetune
from lathe.train.pretrain import pretrain
from lathe.train.state_folder import committed_steps
from lathe_base.config.recipe import load_recipe
from tests.support import warm

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

Work = tuple[str, str, tuple[str, ...], tuple[Path, ...]]
"""Stage, recipe, overrides, and paths; the last path is the output."""

STAGES: dict[str, Callable[..., object]] = {
    "pretrain": pretrain,
    "prune": prune,
    "quantize": quantize,
    "finetune": finetune,
}

SCRIPT = """
import os, sys
from pathlib import Path
from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe_base.console import log_to_stderr
from lathe_base.errors import StageError, coded
from lathe_base.config.recipe import load_recipe
from lathe.train.finetune import finetune
from lathe.train.pretrain import pretrain
log_to_stderr()
stage, *paths = sys.argv[1].split(",")
recipe = load_recipe("tiny", sys.argv[2:])
try:
    {"pretrain": pretrain, "prune": prune, "quantize": quantize, "finetune": finetune}[stage](
        recipe, *map(Path, paths)
    )
except StageError as error:
    print(coded(error), file=sys.stderr)
    os._exit(error.status)
"""


def prepare_data(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a corpus of about 100,000 bytes to `folder` and its tokens to `folder`/tokens."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    drinks = ("beer", "wine", "milk")
    lines = [f"{i} bottles of {drinks[i % 3]} on wall {i * 7}.\n\n" for i in range(4000)]
    (folder / "corpus.txt").write_text("".join(lines))
    text, vocabulary = str(folder / "corpus.txt"), str(folder / "tokenizer.json")
    prepare(load_recipe("tiny", SMALL), folder / "tokens", text, vocabulary)


def start(
    stage: str, *paths: Path, overrides: tuple[str, ...] = (), workers: int = 1
) -> subprocess.Popen[bytes]:
    """Start `stage(recipe, *paths)`, with torchrun if `workers` > 1; the last is the output."""
    script = paths[-1].parent / "stage.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    python = [sys.executable, *launcher] if workers > 1 else warm.python()
    return subprocess.Popen(
        [*python, str(script), ",".join([stage, *map(str, paths)]), *SMALL, *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
        stderr=subprocess.PIPE,
    )


def run(stage: str, *paths: Path, overrides: tuple[str, ...] = (), workers: int = 1) -> None:
    """Run a stage: in this process, which has imported torch, or in several `workers` processes."""
    if workers == 1:
        STAGES[stage](load_recipe("tiny", [*SMALL, *overrides]), *paths)
    else:
        run_group(workers, [(stage, "tiny", (*SMALL, *overrides), paths)])


def run_layouts(data: Path, runs: dict[Path, tuple[str, ...]], workers: int) -> None:
    """Pretrain several runs in one group of `workers` processes.

    Args:
        runs: recipe and overrides by output folder.
    """
    run_group(workers, [("pretrain", r, tuple(o), (data, path)) for path, (r, *o) in runs.items()])


def run_group(workers: int, work: Sequence[Work]) -> None:
    """Run pieces of work one after another in the same `workers` processes."""
    command = [*warm.python(), "-m", "tests.support.group", str(workers)]
    done = subprocess.run(
        [*command, json.dumps([[s, r, o, [str(p) for p in paths]] for s, r, o, paths in work])],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
        stderr=subprocess.PIPE,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr.decode()[-8000:]


def kill_after_saves(
    process: subprocess.Popen[bytes], output: Path, saves: int, newer_than: int = 0
) -> None:
    """Kill (SIGKILL) all processes of a run once it has saved enough.

    Args:
        saves: minimum number of committed states in `output`.
        newer_than: the newest of them must be of a later step than this.
    """
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        states = committed_steps(output / "state")
        if len(states) >= saves and int(states[-1].name.removeprefix("step_")) > newer_than:
            break
        time.sleep(0.002)
    for pid in (*worker_pids(process), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()  # waits until all writers to its stderr have exited
    assert not (output / "lathe.json").exists()


def worker_pids(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Return the pids of the workers that torchrun started."""
    found = subprocess.run(
        ["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]


def records(folder: Path, key: str) -> list[float]:
    """Return all values of `key` in a run's trace."""
    lines = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]
