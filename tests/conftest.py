"""Small real things that many tests share."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lathe.config.recipe import load_recipe
from lathe.data.prepare import prepare
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from tests.support import small_run
from tests.support.s3 import s3, s3_server, store  # noqa: F401
from tests.support.small_release import deployed, no_cluster, other_deployed  # noqa: F401

# A process that a test starts need not compile Lathe's modules again: that is a sixth of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile(
    "lathe", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("lathe")

# What the golden files name, whatever was pushed from this checkout.
os.environ |= {f"LATHE_{image}_IMAGE": "" for image in ("TRAIN", "PADDLE", "SERVE")}

# The models are too small for a second thread: it would only spin on another test's core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# With `-n 2 --dist loadfile --no-loadscope-reorder` the long files come first, so that no worker is
# left alone with one, and those last that watch a server or a cluster answer in time.
LONG = ("pipelines/test_run.py", "test_benchmarks.py", "hostile/", "paddle/", "train/", "compress/")
TIMED = ("launch/", "serve/", "gateway/")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        if path.startswith(TIMED):
            return len(LONG) + 1
        return next((i for i, long in enumerate(LONG) if path.startswith(long)), len(LONG))

    items.sort(key=place)


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"development data absent: {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """One id a byte, then <|endoftext|>: 257 ids, no training."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)} | {"<|endoftext|>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """A token data set of some 100,000 bytes, each a token."""
    folder = tmp_path_factory.mktemp("data")
    byte_tokenizer.save(str(folder / "tokenizer.json"))
    drinks = ("beer", "wine", "milk")
    lines = [f"{i} bottles of {drinks[i % 3]} on wall {i * 7}.\n\n" for i in range(4000)]
    (folder / "corpus.txt").write_text("".join(lines))
    recipe = load_recipe("tiny", small_run.SMALL)
    output = folder / "tokens"
    prepare(recipe, output, str(folder / "corpus.txt"), str(folder / "tokenizer.json"))
    return output


@pytest.fixture(scope="session")
def small_dense(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint pretrained on `small_data` for 20 steps."""
    output = tmp_path_factory.mktemp("run") / "dense"
    small_run.run("pretrain", small_data, output)
    return output


def small_config(**changes: object) -> GPTConfig:
    values: dict[str, object] = {
        "vocab_size": 384,
        "n_positions": 64,
        "n_embd": 48,
        "head_dim": 12,
        "n_head": (4, 4),
        "n_inner": (96, 96),
    }
    return GPTConfig(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def small_gpt() -> GPT:
    """Random weights, large enough that logits differ."""
    model = GPT(small_config())
    model.initialize(0.2, seed=1)
    return model.eval()
