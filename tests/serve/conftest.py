"""Both interfaces to the server."""

from collections.abc import Iterator

import pytest

from lathe.serve.client import Client
from lathe.serve.server import TritonServer


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
