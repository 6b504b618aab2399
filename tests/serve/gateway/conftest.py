"""Fixtures of a gateway on the loopback interface in front of a real Triton server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from lathe_base.config.settings import ServingSettings
from lathe_serving.server import TritonServer, start
from tests.support.gateways import opened


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
    """Address of a gateway that runs as a separate process in the serving environment."""
    folder = tmp_path_factory.mktemp("process")
    with start(repository, serving, folder, with_gateway=True) as running:
        assert running.state.openai is not None
        yield running.state.openai.removesuffix("/v1")


@pytest.fixture(scope="session")
def openai(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=60)
