"""A tiny random model, exported, and a real tritonserver that serves it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe.config.settings import ExportSettings, GenerationSettings, Recipe, ServingSettings
from lathe.export.export import export
from lathe.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.serve.client import Client
from lathe.serve.environment import ROOT
from lathe.serve.repository import write_repository
from lathe.serve.server import ANY_PORTS, TritonServer, start

SHAPE = GPTConfig(384, 1024, 64, 16, (4, 4), (96, 96))


@pytest.fixture(scope="session")
def triton() -> None:
    python = os.environ.get("LATHE_SERVE_PYTHON") or ROOT / ".venv-serve" / "bin" / "python"
    if not Path(python).is_file():
        pytest.skip(f"no environment with Triton: {python}")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    model = GPT(SHAPE)
    model.initialize(0.2, seed=1)
    save_checkpoint(folder, model, byte_tokenizer, "pretrain", Recipe())
    return load_checkpoint(folder)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Path:
    data = tmp_path_factory.mktemp("data")
    (data / "heldout.txt").write_text("All that glitters is not gold; often have you heard. " * 20)
    recipe = Recipe(Export=ExportSettings(prompts=4, new_tokens=8))
    return export(recipe, checkpoint.folder, data, data.with_name(f"{data.name}-onnx")).folder


@pytest.fixture(scope="session")
def serving() -> ServingSettings:
    return ServingSettings(**ANY_PORTS, max_running=4, max_queue=8, threads=1)


@pytest.fixture(scope="session")
def repository(
    tmp_path_factory: pytest.TempPathFactory, exported: Path, serving: ServingSettings
) -> Path:
    output = tmp_path_factory.mktemp("deployed") / "repository"
    return write_repository(exported, output, serving, GenerationSettings(max_dec_len=12))


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    triton: None,
    repository: Path,
    serving: ServingSettings,
) -> Iterator[TritonServer]:
    """Four workers on the tiny model; tests leave it as they find it."""
    with start(repository, serving, tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(server: TritonServer) -> Iterator[str]:
    """Of OpenAI's interface to that server."""
    from tests.gateway.conftest import opened  # which imports this module

    with opened(server) as address:
        yield f"{address}/v1"


@pytest.fixture(params=["Triton", "OpenAI"])
def url(request: pytest.FixtureRequest, server: TritonServer) -> str:
    """Each address that clients take."""
    if request.param == "Triton":
        return server.state.grpc
    return str(request.getfixturevalue("base_url"))


@pytest.fixture
def either(url: str) -> Iterator[Client]:
    """A client of each."""
    with Client(url, "gpt", timeout_seconds=30) as client:
        yield client


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.state.grpc, server.state.model_name, timeout_seconds=30) as client:
        yield client
