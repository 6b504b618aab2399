"""Fixtures for tests that run against both APIs of the server: Triton's gRPC and OpenAI's."""

from collections.abc import Iterator

import pytest

from lathe_serving.client import Client
from lathe_serving.server import TritonServer


@pytest.fixture(params=["Triton", "OpenAI"])
def url(request: pytest.FixtureRequest, server: TritonServer) -> str:
    """Address of the server, once for each API."""
    if request.param == "Triton":
        return server.state.grpc
    return str(request.getfixturevalue("base_url"))


@pytest.fixture
def either(url: str) -> Iterator[Client]:
    """Client of the server, once for each API."""
    with Client(url, "gpt", timeout_seconds=30) as client:
        yield client
