"""Invalid addresses, and servers that accept connections but never respond."""

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
import requests

from lathe.evaluate.evaluate import served_scorer
from lathe_base.errors import Code, UserError, without_secrets
from lathe_serving import reach
from lathe_serving.client import (
    Client,
    grpc_transport,
    openai_transport,
    playground,
)
from lathe_serving.client.async_client import AsyncClient
from lathe_serving.client.bench import bench
from tests.support.command_line import lathe
from tests.support.errors import raises
from tests.support.loopback import LoopbackServer


@pytest.fixture
def silent() -> Iterator[str]:
    """Address of a socket that accepts connections and never responds."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grpc_transport, openai_transport, playground, reach):
        monkeypatch.setattr(module, "REACH_SECONDS", 0.5)


NONSENSE = [
    "",
    "foo",
    "localhost",
    ":0",
    "localhost:",
    ":8001",
]
NONSENSE += ["localhost:0", "localhost:99999", "localhost:-1", "höst:1", "a b:1"]
NONSENSE += ["\udcff:1", "[::1", "::1:8001", "x:8001\n", "user@x:8001", "x:8001/path", "unix:/x"]


NO_BASE = ["http://x", "http://x:8001", "http://x:8001/", "ftp://x/v1", "http://", "http:///v1"]
NO_BASE += ["http://x:0/v1", "http://x:99999/v1", "http://u:p@x/v1", "http://x/v1?a=b", "://x/v1"]
NO_BASE += [
    "http://x/v1#a",
    "http://h\xf6st/v1",
    "http://x/v1\n",
    "http://[::1/v1",
    "http://[:]/v1",
]
NO_BASE += ["http://[1:2:3:4:5:6:7:8:9]/v1", "http://x//v1"]
BASES = ["http://localhost:9000/v1", "http://x/v1/", "https://[::1]:9000/openai/v1"]


@pytest.mark.parametrize("url", NO_BASE)
def test_invalid_base_url_is_reported(url: str) -> None:
    for made in (Client, AsyncClient):
        with raises(Code.INVALID_VALUE, without_secrets(repr(url))):
            made(url, "gpt")


@pytest.mark.parametrize("url", NONSENSE)
def test_invalid_address_is_reported(url: str) -> None:
    for made in (Client, AsyncClient):
        with raises(Code.INVALID_VALUE, without_secrets(repr(url))):
            made(url, "gpt")


@pytest.mark.parametrize(
    "url", ["localhost:8001", "10.0.0.1:1", "a-b.c_d.svc:65535", "[::1]:8001", *BASES]
)
def test_valid_addresses_are_accepted(url: str) -> None:
    Client(url, "gpt").close()


def in_async(url: str) -> None:
    async def generate() -> None:
        async with AsyncClient(url, "gpt") as asking:
            await asking.generate("x")

    asyncio.run(generate())


def measure(url: str) -> None:
    shape = {"clients": 1, "rate": None, "requests": 1, "seed": 0}
    bench((1, 1), shape, (1, 1), None, url, "gpt", Path("nowhere"))


ASKS: dict[str, Callable[[str], object]] = {
    "generate": lambda url: Client(url, "gpt").generate("x"),
    "stream": lambda url: list(Client(url, "gpt").stream("x")),
    "score": lambda url: Client(url, "gpt").score_text("x", "y"),
    "evaluate": lambda url: served_scorer(url, "gpt", "0" * 64),
    "bench": measure,
    "asyncio": in_async,
}
TRITONS_ALONE = {"score", "evaluate"}
EACH = [pytest.param(ask, "{}", id=name) for name, ask in ASKS.items()]
EACH += [
    pytest.param(ask, "http://{}/v1", id=f"{name}, OpenAI")
    for name, ask in ASKS.items()
    if name not in TRITONS_ALONE
]


@pytest.mark.parametrize(("ask", "form"), EACH)
def test_a_silent_port_is_reported_soon(
    silent: str,
    ask: Callable[[str], object],
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    url = form.format(silent)
    with raises(Code.TIMEOUT, url, "0.5 s"):
        ask(url)
    assert time.monotonic() - began < 15
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ask", "form"), EACH)
def test_a_closed_port_is_reported(ask: Callable[[str], object], form: str) -> None:
    url = form.format("127.0.0.1:1")
    with raises(Code.UNREACHABLE, f" {url}\n"):
        ask(url)


def test_another_kind_of_server_is_reported() -> None:
    with LoopbackServer(SimpleHTTPRequestHandler) as other:
        with pytest.raises(UserError) as told:
            Client(f"127.0.0.1:{other.server_port}", "gpt").generate("x")
        assert told.value.code in (Code.TIMEOUT, Code.UNREACHABLE, Code.SERVER_ERROR)
        with raises(Code.SERVER_ERROR, f"{other.url}/v1", "404"):
            Client(f"{other.url}/v1", "gpt").generate("x")


def test_the_playground_says_that_no_server_answers(silent: str) -> None:
    with playground.playground([f"http://{silent}/v1", "http://127.0.0.1:1/v1"]) as page:
        began = time.monotonic()
        for number, address in enumerate((silent, "127.0.0.1:1")):
            reply = requests.get(f"{page}/{number}/models", timeout=60)
            assert reply.status_code == 502 and time.monotonic() - began < 15
            message = reply.json()["error"]["message"]
            assert f"no server answers on http://{address}/v1" in message


@pytest.mark.parametrize("verb", ["client", "bench-serve"])
@pytest.mark.parametrize("url", ["", "localhost:9000/v1"])
def test_the_command_line_tells_an_address_that_is_none(
    tmp_path: Path, verb: str, url: str
) -> None:
    prompt = ["a prompt"] if verb == "client" else []
    run = lathe(verb, "--url", url, *prompt, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(
        rf"error\[invalid-value\]: '{url}': not a gRPC address\n  hint: .*\n", run.stderr
    )
    assert not os.listdir(tmp_path)


def test_a_request_that_cannot_be_sent_is_reported() -> None:
    with Client("127.0.0.1:1", "gpt") as asking:
        with raises(Code.MALFORMED, "prompt"):
            asking.generate("a\udcff")
        with raises(Code.MALFORMED, "prompt"):
            asking.score_text("a", "\udcff")
        with raises(Code.INVALID_VALUE, f"max_tokens {2**70}"):
            asking.generate("a", max_tokens=2**70)
    with raises(Code.MALFORMED, "model name"):
        Client("127.0.0.1:1", "\udcff")
