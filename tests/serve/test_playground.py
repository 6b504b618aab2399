"""The playground in a real browser, against a real server."""

import shutil
import subprocess
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
import requests

from lathe.errors import UserError
from lathe.serve.client import Client
from lathe.serve.playground import playground
from lathe.serve.server import TritonServer

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def page(server: TritonServer) -> Iterator[str]:
    with playground(server.state.http, server.state.model_name) as address:
        yield address


def browse(address: str) -> str:
    """The page's DOM once its script has done its work."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=10000",
        "--dump-dom",
    ]
    run = subprocess.run([browser, *flags, address], capture_output=True, text=True, timeout=60)
    return run.stdout


def test_a_browser_gets_the_text_that_a_client_gets(page: str, client: Client) -> None:
    prompt, options = "All that <b>glitters</b>", {"max_tokens": 12}
    expected = client.generate(prompt, decode_strategy="greedy_search", **options)
    shape = {"decode_strategy": "greedy_search", "temperature": 1, **options}
    escaped = expected.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for _ in range(3):  # on a busy machine the browser's clock may run out within the stream
        dom = browse(f"{page}/?{urlencode({'prompt': prompt, **shape})}")
        shown = dom.split('id="out"')[1].split("</div>")[0]
        assert "All that &lt;b&gt;glitters" in shown
        text = shown.split("<span>")[1].split("</span>")[0].replace("\xa0", "&nbsp;")
        if text == escaped.replace("\xa0", "&nbsp;"):
            return
    pytest.fail(f"{text!r} is not {escaped!r}")
    assert f"{len(expected.tokens)} tokens, first after" in dom


def test_a_refusal_is_shown_in_the_servers_words(page: str) -> None:
    dom = browse(f"{page}/?{urlencode({'prompt': 'x', 'top_p': 1.5})}")
    assert "top_p 1.5 is out of range" in dom


def test_what_is_not_the_page_is_refused(page: str, server: TritonServer) -> None:
    assert requests.get(f"{page}/v2", timeout=60).status_code == 404
    assert requests.post(f"{page}/v2/models", data="x", timeout=60).status_code == 404
    assert requests.post(f"{page}/generate_stream", timeout=60).status_code == 413
    port = int(page.rsplit(":", 1)[1])
    with pytest.raises(UserError, match="in use"), playground("x", "y", port):
        pass
    with playground("127.0.0.1:1", "gpt") as lonely:
        reply = requests.post(f"{lonely}/generate_stream", data="{}", timeout=60)
        assert reply.status_code == 502 and "no server answers" in reply.json()["error"]
