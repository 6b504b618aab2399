"""Small real things that many tests share. What takes seconds to import is imported by what needs
it: most files of tests need no torch."""

import gc
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.support import environments
from tests.support.once import once

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lathe.model.gpt import GPT
    from tests.support.attested import Made

pytest_plugins = ["tests.support.s3", "tests.support.served"]

# A process that a test starts need not compile Lathe's modules again: that is a sixth of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile(
    "lathe", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("lathe")

# What the golden files name, whatever was pushed from this checkout.
os.environ |= {f"LATHE_{image}_IMAGE": "" for image in ("TRAIN", "PADDLE", "SERVE")}

# A server that a test has stopped will not be back.
os.environ["LATHE_NETWORK_PATIENCE"] = "0"

# The models are too small for a second thread: it would only spin on another test's core.
os.environ["OMP_NUM_THREADS"] = "1"

# With `-n 2 --dist loadfile --no-loadscope-reorder` the long files come first, so that no worker is
# left alone with one, and those last that watch a server or a cluster answer in time.
LONG = ("pipelines/test_smollm2.py", "pipelines/test_run.py", "test_benchmarks.py", "hostile/")
LONG += ("train/", "compress/", "search/", "paddle/")
TIMED = ("launch/", "production/", "serve/")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        if path.startswith(TIMED):
            return len(LONG) + 1
        return next((i for i, long in enumerate(LONG) if path.startswith(long)), len(LONG))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.freeze()  # what thousands of tests consist of: no collection need look through it again


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    environments.show(item.path)


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"development data absent: {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def byte_tokenizer() -> "Tokenizer":
    """One id a byte, then <|endoftext|>: 257 ids, no training."""
    from tests.support import tokenizers

    return tokenizers.byte_tokenizer()


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: "Tokenizer") -> Path:
    """A token data set of some 100,000 bytes, each a token."""
    from tests.support.small_run import prepare_data

    return (
        once(tmp_path_factory, "data", lambda path: prepare_data(byte_tokenizer, path)) / "tokens"
    )


@pytest.fixture(scope="session")
def small_dense(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint pretrained on `small_data` for 20 steps."""
    from tests.support import small_run

    return once(tmp_path_factory, "dense", lambda path: small_run.run("pretrain", small_data, path))


@pytest.fixture
def small_gpt() -> "GPT":
    """Random weights, large enough that logits differ."""
    from tests.support import small_models

    return small_models.small_gpt()


@pytest.fixture(scope="session")
def deployed(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: "Tokenizer", triton: None
) -> Path:
    """A small model, deployed on a local Triton and ready to be released."""
    from tests.support.small_release import make

    return once(tmp_path_factory, "first", lambda at: make(at, byte_tokenizer, 1)) / "deployed"


@pytest.fixture(scope="session")
def other_deployed(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: "Tokenizer", triton: None
) -> Path:
    """Another one."""
    from tests.support.small_release import make

    return once(tmp_path_factory, "second", lambda at: make(at, byte_tokenizer, 2)) / "deployed"


@pytest.fixture(scope="session")
def paddle_python() -> Path:
    return environments.require("paddle")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> "Made":
    """A small chain of real steps, signed; tests leave it as they find it."""
    from tests.support import attested

    return attested.Made(once(tmp_path_factory, "attested", attested.make))


@pytest.fixture
def made(made_once: "Made", tmp_path: Path) -> "Made":
    """A copy that a test may change."""
    shutil.copytree(made_once.folder, tmp_path / "made")
    return type(made_once)(tmp_path / "made")


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No way to a Kubernetes."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
