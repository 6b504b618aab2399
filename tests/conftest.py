"""Fixtures shared by many tests: small models, data and servers.

Slow imports are made in the fixtures that need them, since most test files do not need torch.
"""

import gc
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import hypothesis
import pytest
import tenacity
import typer
from _pytest.logging import catching_logs

from tests.support import environments, warm_server
from tests.support.once import once

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lathe.model.gpt import GPT
    from tests.support.attested import AttestedRun

pytest_plugins = ["tests.support.s3", "tests.support.served"]

# Child processes reuse Lathe's compiled modules: compiling is a sixth of their startup time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No deadlines per example: durations depend on the machine's load. Every run draws other examples:
# the quick tests some, and the slow ones include every test that draws them, with more.
for _name, _examples in (("quick", 15), ("slow", 40)):
    hypothesis.settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("slow")


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        hypothesis.settings.load_profile("quick")


# The golden files contain the default images, even if others were pushed from this checkout.
os.environ |= {f"LATHE_{image}_IMAGE": "" for image in ("TRAIN", "PADDLE", "SERVE")}

# Do not wait for a server to come back after a test has stopped it.
os.environ["LATHE_NETWORK_PATIENCE"] = "0"

# Wait a twentieth of the time between two attempts: the servers of the tests are near.
setattr(tenacity.nap, "time", SimpleNamespace(sleep=lambda x: time.sleep(x / 20)))  # noqa: B010

# The clients of Kubernetes and Pipelines set the levels of two loggers for every object that they
# read, and each time logging empties the caches of all loggers, which are thousands with torch.
_set_level = logging.Logger.setLevel


def _set_other_level(logger: logging.Logger, level: int | str) -> None:
    if level != logger.level:
        _set_level(logger, level)


setattr(logging.Logger, "setLevel", _set_other_level)  # noqa: B010

# pytest attaches its handlers to every logger that does not propagate, six times a test: torch has
# sixty of these among thousands of loggers. Tests read the root's and Lathe's.
_catch_all_logs = catching_logs.__enter__


def _catch_read_logs(self: "catching_logs[logging.Handler]") -> logging.Handler:
    if self.level is not None:  # of --log-level and the like
        return _catch_all_logs(self)
    root, own = logging.getLogger(), logging.getLogger("lathe")
    for logger in (root,) if own.propagate else (root, own):
        logger.addHandler(self.handler)
        self.attached_loggers.append(logger)
    return self.handler


setattr(catching_logs, "__enter__", _catch_read_logs)  # noqa: B010

# A command line is built again for each call, as a process builds it once: 10 ms for `lathe`.
setattr(typer.main, "get_command", cache(typer.main.get_command))  # noqa: B010

# make would look for python3.11, which may be a launcher such as pyenv's, ten times as slow.
os.environ["PYTHON"] = sys.executable

# The models are too small for a second thread, which would only spin on another test's core.
os.environ["OMP_NUM_THREADS"] = "1"

# Long files run first, so that no worker is left alone with one, and timing-sensitive tests of
# servers and clusters run last.
LONG: tuple[str, ...] = (
    "pipelines/test_smollm2.py",
    "pipelines/test_run.py",
    "test_benchmarks.py",
    "hostile/",
)
LONG += ("train/", "compress/", "search/", "paddle/")
TIMED = ("launch/", "release/", "serve/")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection(session: pytest.Session) -> None:
    if session.config.getoption("forks", 0) and not session.config.option.collectonly:
        warm_server.prepare()  # on the core that the collection leaves idle


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if items and "slow" in (chosen := items[0].config.option.markexpr) and "not slow" not in chosen:
        for item in items:
            if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker(pytest.mark.slow)
    for item in items:  # the quick tests need no Paddle, whose environment takes a minute to make
        if "paddle_python" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        if path.startswith(TIMED):
            return len(LONG) + 1
        return next((i for i, long in enumerate(LONG) if path.startswith(long)), len(LONG))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.freeze()  # keeps the garbage collector from scanning thousands of collected tests
    gc.set_threshold(50_000, 20, 20)  # a test makes many objects, and few cycles


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    environments.expose(item.path)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the signals' handlers: stages set them, and children inherit an ignored signal."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"no development data in {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def byte_tokenizer() -> "Tokenizer":
    """Byte-level tokenizer with 257 ids: one per byte, then <|endoftext|>."""
    from tests.support import tokenizers

    return tokenizers.byte_tokenizer()


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: "Tokenizer") -> Path:
    """A data set of about 100,000 tokens, one per byte."""
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
    """A model with random weights large enough for distinct logits."""
    from tests.support import small_models

    return small_models.small_gpt()


@pytest.fixture(scope="session")
def deployed(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: "Tokenizer", triton: None
) -> Path:
    """Deployment of a small model on a local Triton server, ready for a release."""
    from tests.support.small_release import make

    return once(tmp_path_factory, "first", lambda at: make(at, byte_tokenizer, 1)) / "deployed"


@pytest.fixture(scope="session")
def other_deployed(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: "Tokenizer", triton: None
) -> Path:
    """Deployment of a second model, with other weights."""
    from tests.support.small_release import make

    return once(tmp_path_factory, "second", lambda at: make(at, byte_tokenizer, 2)) / "deployed"


@pytest.fixture(scope="session")
def paddle_python() -> Path:
    return environments.require("paddle")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> "AttestedRun":
    """Signed outputs of a small run, shared by all tests: do not modify."""
    from tests.support import attested
    from tests.support.prose import prose

    texts = prose(tmp_path_factory)[:40]
    folder = once(tmp_path_factory, "attested", lambda path: attested.make(path, texts))
    return attested.AttestedRun(folder)


@pytest.fixture
def made(made_once: "AttestedRun", tmp_path: Path) -> "AttestedRun":
    """Copy of the signed run that the test may modify."""
    shutil.copytree(made_once.folder, tmp_path / "made")
    return type(made_once)(tmp_path / "made")


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove all configuration of a Kubernetes cluster."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
