"""A gateway on loopback before a real tritonserver."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from lathe.config.settings import ServingSettings
from lathe.gateway.app import Gateway
from lathe.gateway.keys import ApiKeys
from lathe.gateway.limits import Limits
from lathe.gateway.models import read_models
from lathe.gateway.server import Server
from lathe.serve.server import TritonServer, start
from tests.serve.conftest import (
    checkpoint,
    client,
    exported,
    repository,
    server,
    serving,
    triton,
)

__all__ = ["checkpoint", "client", "exported", "repository", "server", "serving", "triton"]


@contextmanager
def running(gateway: Gateway, origins: list[str]) -> Iterator[str]:
    server = Server(gateway, origins, drain_seconds=3, port=0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def opened(
    server: TritonServer,
    limits: Limits | None = None,
    keys: Path | None = None,
    origins: list[str] | None = None,
    **changes: Any,
) -> Iterator[str]:
    models = read_models(Path(server.state.repository))
    models = {name: replace(model, **changes) for name, model in models.items()}
    known = ApiKeys(keys) if keys else None
    gateway = Gateway(models, server.state.grpc, limits or Limits(), known)
    with running(gateway, origins or []) as address:
        yield address


@pytest.fixture(scope="session")
def address(server: TritonServer) -> Iterator[str]:
    with opened(server) as found:
        yield found


@pytest.fixture(scope="session")
def process(
    triton: None,
    repository: Path,
    serving: ServingSettings,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """A gateway that is a process of its own, in the environment where it runs; its address."""
    folder = tmp_path_factory.mktemp("process")
    with start(repository, serving, folder, with_gateway=True) as running:
        assert running.state.openai is not None
        yield running.state.openai.removesuffix("/v1")


@pytest.fixture(scope="session")
def openai(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=60)
