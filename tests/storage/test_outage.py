"""Commands wait for a store that is briefly down, and fail if it does not come back."""

import logging
import threading
import time
from http.server import HTTPServer
from pathlib import Path

import pytest

from lathe_base.errors import Code, Unavailable
from lathe_base.ports import free_port
from lathe_base.storage import failures, fetch
from tests.support.errors import raises
from tests.support.loopback import QuietHandler

WAIT = 3.0


class _Greeting(QuietHandler):
    def do_GET(self) -> None:
        self.reply(b"hello")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_NETWORK_PATIENCE", str(WAIT))
    monkeypatch.setattr(failures._Outage, "said", -60.0)
    monkeypatch.setattr(failures, "_answered", threading.Event())


def serve_later(port: int, seconds: float) -> threading.Thread:
    """Start a server `seconds` from now that answers one request."""

    def run() -> None:
        time.sleep(seconds)
        with HTTPServer(("127.0.0.1", port), _Greeting) as server:
            server.timeout = 30
            server.handle_request()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("known", ["a pod needs it", "it has answered before"])
def test_a_server_that_must_be_there_is_waited_for(
    known: str,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if known == "a pod needs it":
        monkeypatch.setenv(failures.IN_POD, "10.96.0.1")
    else:
        failures._answered.set()
    server = serve_later(
        port, 0.6
    )  # four attempts take less: tests/conftest.py shortens the pauses
    with caplog.at_level(logging.WARNING, "lathe"):
        found = fetch(f"http://127.0.0.1:{port}/greeting.txt", tmp_path)
    server.join()
    assert found.read_text(encoding="utf-8") == "hello"
    (said,) = caplog.messages
    assert "does not answer" in said and "up to 3 s (LATHE_NETWORK_PATIENCE)" in said


def test_an_address_that_never_answered_is_given_up_at_once(port: int, tmp_path: Path) -> None:
    began = time.monotonic()
    with raises(Code.UNREACHABLE, f"127.0.0.1:{port}", kind=Unavailable) as raised:
        fetch(f"http://127.0.0.1:{port}/greeting.txt", tmp_path)
    assert time.monotonic() - began < WAIT and raised.value.status == 69


def test_patience_ends(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_NETWORK_PATIENCE", "0.5")
    monkeypatch.setenv(failures.IN_POD, "10.96.0.1")
    began = time.monotonic()
    with raises(Code.UNREACHABLE, f"127.0.0.1:{port}", kind=Unavailable):
        fetch(f"http://127.0.0.1:{port}/greeting.txt", tmp_path)
    assert 0.5 <= time.monotonic() - began < 30
