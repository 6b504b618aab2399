"""A small real token data set, and a command that trains on it in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe.data.prepare import prepare
from lathe.recipe import load_recipe

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
)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("data")
    byte_tokenizer.save(str(folder / "tokenizer.json"))
    lines = [
        f"{i} bottles of {['beer', 'wine', 'milk'][i % 3]} on wall {i * 7}.\n\n"
        for i in range(4000)
    ]
    (folder / "corpus.txt").write_text("".join(lines))
    recipe = load_recipe("tiny", SMALL)
    prepare(recipe, folder / "tokens", str(folder / "corpus.txt"), str(folder / "tokenizer.json"))
    return folder / "tokens"


SCRIPT = """
import sys
from pathlib import Path
from lathe.recipe import load_recipe
from lathe.train.pretrain import pretrain
pretrain(load_recipe("tiny", sys.argv[3:]), Path(sys.argv[1]), Path(sys.argv[2]))
"""


def start_training(
    data: Path, output: Path, *overrides: str, workers: int = 1
) -> subprocess.Popen[bytes]:
    """`pretrain` of the small model in one process, or under torchrun."""
    script = output.parent / "train.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command = [sys.executable, *(launcher if workers > 1 else []), str(script)]
    return subprocess.Popen(
        [*command, str(data), str(output), *SMALL, *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
        stderr=subprocess.PIPE,
    )


def train(data: Path, output: Path, *overrides: str, workers: int = 1) -> None:
    process = start_training(data, output, *overrides, workers=workers)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
