"""Fixtures of a tiny random model, its export, and a real Triton server (one per xdist worker)."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import environments
from tests.support.once import once

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lathe.model.checkpoint import Checkpoint
    from lathe_base.config.settings import ServingSettings
    from lathe_serving.client import Client
    from lathe_serving.server import TritonServer


@pytest.fixture(scope="session")
def triton() -> None:
    environments.require("serve")


@pytest.fixture(scope="session")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: "Tokenizer"
) -> "Checkpoint":
    from lathe.model.checkpoint import load_checkpoint, save_checkpoint
    from lathe.model.gpt import GPT
    from lathe_base.config.settings import Recipe
    from tests.support.small_models import SERVED

    def make(folder: Path) -> None:
        model = GPT(SERVED)
        model.initialize(0.2, seed=1)
        save_checkpoint(folder, model, byte_tokenizer, "pretrain", Recipe())

    return load_checkpoint(once(tmp_path_factory, "served", make))


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder that contains only held-out text."""
    data = tmp_path_factory.mktemp("data")
    text = "All that glitters is not gold; often have you heard. " * 20
    (data / "heldout.txt").write_text(text)
    return data


@pytest.fixture(scope="session")
def exported(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: "Checkpoint", held_out: Path
) -> Path:
    from lathe.export.export import export
    from lathe_base.config.settings import ExportSettings, Recipe

    def make(folder: Path) -> None:
        recipe = Recipe(Export=ExportSettings(prompts=4, new_tokens=8))
        export(recipe, checkpoint.folder, held_out, folder)

    return once(tmp_path_factory, "served-onnx", make)


@pytest.fixture(scope="session")
def serving() -> "ServingSettings":
    from lathe_base.config.settings import ServingSettings
    from lathe_serving.server import ANY_PORTS

    return ServingSettings(**ANY_PORTS, max_running=4, max_queue=8, threads=1)


@pytest.fixture(scope="session")
def repository(
    tmp_path_factory: pytest.TempPathFactory, exported: Path, serving: "ServingSettings"
) -> Path:
    from lathe_base.config.settings import GenerationSettings
    from lathe_serving.repository import write_repository

    output = tmp_path_factory.mktemp("deployed") / "repository"
    return write_repository(exported, output, serving, GenerationSettings(max_dec_len=12))


@pytest.fixture(scope="session")
def lasting_export(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: "Tokenizer") -> Path:
    """Export of a model with a context so long that no completion ends before its test."""
    from dataclasses import replace

    from tests.support.small_export import make_model, write_unproven
    from tests.support.small_models import SERVED

    model = make_model(replace(SERVED, n_positions=16384))
    return once(
        tmp_path_factory, "lasting", lambda path: write_unproven(model, byte_tokenizer, path)
    )


@pytest.fixture(scope="session")
def lasting(
    tmp_path_factory: pytest.TempPathFactory, lasting_export: Path, serving: "ServingSettings"
) -> Path:
    from lathe_base.config.settings import GenerationSettings
    from lathe_serving.repository import write_repository

    output = tmp_path_factory.mktemp("lasting") / "repository"
    return write_repository(lasting_export, output, serving, GenerationSettings())


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    triton: None,
    repository: Path,
    serving: "ServingSettings",
) -> Iterator["TritonServer"]:
    """A server of the tiny model, shared by all tests, which must not change its state."""
    from lathe_serving.server import start

    with start(repository, serving, tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(server: "TritonServer") -> Iterator[str]:
    """Base URL of the OpenAI API of `server`."""
    from tests.support.gateways import opened

    with opened(server) as address:
        yield f"{address}/v1"


@pytest.fixture
def client(server: "TritonServer") -> Iterator["Client"]:
    from lathe_serving.client import Client

    with Client(server.state.grpc, server.state.model_name, timeout_seconds=30) as client:
        yield client
