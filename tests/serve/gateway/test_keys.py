"""Keys and the limits of each."""

import logging
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
import requests
from openai import OpenAI

from lathe_base.errors import Code
from lathe_serving.gateway import admission
from lathe_serving.gateway.admission import ApiKeys, Budget, Caller, KeyLimits
from lathe_serving.gateway.errors import ApiError
from lathe_serving.server import TritonServer
from tests.support.errors import raises
from tests.support.gateways import opened

KEYS = """\
# of the teams
secret-1 search
secret-2 batch
secret-3
new-secret-1\tsearch
"""
LIMITS = """\
default: {concurrent_requests: 4}
keys:
  search: {requests_per_minute: 2}
  batch: {priority: low, concurrent_requests: 1, tokens_per_minute: 100}
"""
BODY = {"model": "gpt", "prompt": "hello", "max_tokens": 2, "ignore_eos": True}
LONG = {"model": "gpt", "prompt": "x", "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "limits.yaml").write_text(LIMITS)
    return tmp_path / "keys"


def find(known: ApiKeys, key: str) -> Caller:
    caller = known.find(f"Bearer {key}")
    assert caller is not None
    return caller


def test_limits_belong_to_names(path: Path) -> None:
    known = ApiKeys(path)
    search = find(known, "secret-1")
    assert find(known, "new-secret-1") is search  # while one replaces the other
    assert search.limits == KeyLimits(requests_per_minute=2, concurrent_requests=4)
    assert find(known, "secret-2").limits.priority == "low"
    assert find(known, "secret-3").name == "line-4"
    assert find(known, "secret-3").limits == KeyLimits(concurrent_requests=4)
    assert known.find("Bearer search") is None and known.find("Bearer secret-1 search") is None


def test_what_is_used_stays_used_when_limits_change(path: Path) -> None:
    known = ApiKeys(path)
    for _ in range(2):
        find(known, "secret-1").begin()
    changed = path.with_name("new")
    changed.write_text(LIMITS.replace("requests_per_minute: 2", "requests_per_minute: 3"))
    os.replace(changed, path.with_name("limits.yaml"))
    find(known, "secret-1").begin()
    with pytest.raises(ApiError, match="the key search is limited to 3 requests per minute"):
        find(known, "secret-1").begin()
    path.with_name("limits.yaml").write_text("default: [")  # the previous limits stay
    with pytest.raises(ApiError, match="3 requests"):
        find(known, "secret-1").begin()
    path.with_name("limits.yaml").unlink()
    find(known, "secret-1").begin()


@pytest.mark.parametrize(
    ("file", "content", "code", "texts"),
    [
        ("keys", "secret-1 two names", Code.MALFORMED, ("line 1",)),
        ("keys", "secret-1 search\nsecret-2 a/b", Code.MALFORMED, ("line 2",)),
        ("limits.yaml", "keys: {serch: {priority: low}}", Code.UNKNOWN_NAME, ("serch",)),
        (
            "limits.yaml",
            "keys: {search: {requests: 5}}",
            Code.INVALID_VALUE,
            ("keys.search.requests",),
        ),
        (
            "limits.yaml",
            "keys: {search: {requests_per_minute: 0}}",
            Code.INVALID_VALUE,
            ("keys.search.requests_per_minute", "0"),
        ),
        (
            "limits.yaml",
            "keys: {search: {priority: high}}",
            Code.INVALID_VALUE,
            ("keys.search.priority", "'normal' or 'low'"),
        ),
        ("limits.yaml", "- 5", Code.INVALID_VALUE, ()),
        ("limits.yaml", "default: [", Code.MALFORMED, ()),
        ("limits.yaml", "default: !!python/name:os.system {}", Code.MALFORMED, ("os.system",)),
        ("limits.yaml", b"\xff", Code.MALFORMED, ("0xff",)),
    ],
)
def test_a_mistake_in_a_file_is_named(
    path: Path, file: str, content: str | bytes, code: Code, texts: tuple[str, ...]
) -> None:
    path.with_name(file).write_bytes(content.encode() if isinstance(content, str) else content)
    with raises(code, path.with_name(file), *texts) as raised:
        ApiKeys(path)
    assert "secret" not in str(raised.value)


def test_a_budget_refills_in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(admission.time, "monotonic", lambda: now)
    budget = Budget()
    for _ in range(30):
        assert budget.seconds_until(30) == 0
        budget.use(1)
    assert budget.seconds_until(30) == pytest.approx(2)
    now = 2.0
    assert budget.seconds_until(30) == 0
    budget.use(31)  # an answer whose length was not known
    assert budget.seconds_until(30) == pytest.approx(62)
    now = 1e6
    assert budget.seconds_until(30) == 0
    budget.use(30)
    assert budget.seconds_until(30) > 0  # and no more than a minute's is saved up


def test_a_key_is_limited_and_others_are_not(
    server: TritonServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lathe")
    with opened(server, keys=path) as address, ThreadPoolExecutor(1) as pool:

        def post(key: str, body: Any, route: str = "/v1/completions") -> requests.Response:
            head = {"Authorization": f"Bearer {key}", "X-Request-Id": f"to-{key[-1]}"}
            return requests.post(address + route, json=body, headers=head, timeout=60)

        generate = "/v2/models/gpt/generate"
        assert post("secret-1", BODY).status_code == 200
        assert post("new-secret-1", {"text_input": "x", "max_tokens": 1}, generate).ok
        over_v2 = post("secret-1", {"text_input": "x", "max_tokens": 1}, generate)
        assert over_v2.status_code == 429 and "the key search" in over_v2.json()["error"]
        client = OpenAI(base_url=f"{address}/v1", api_key="secret-1", max_retries=0)
        with pytest.raises(sdk.RateLimitError) as raised:
            client.completions.create(model="gpt", prompt="x")
        assert raised.value.code == "rate_limit_exceeded"
        assert 1 <= int(raised.value.response.headers["Retry-After"]) <= 30
        assert post("secret-3", BODY).status_code == 200

        running = pool.submit(post, "secret-2", LONG)
        deadline = time.monotonic() + 60
        while (second := post("secret-2", {"model": "gpt"})).status_code != 429:  # or 400
            assert time.monotonic() < deadline
        assert "limited to 1 concurrent requests" in second.json()["error"]["message"]
        assert second.headers["Retry-After"] == "1"
        assert running.result().status_code == 200
        spent = post("secret-2", BODY)  # 1,001 tokens, of 100 a minute
        assert spent.status_code == 429
        assert "100 tokens per minute" in spent.json()["error"]["message"]
        wait = math.ceil((1001 + 1 - 100) / 100 * 60)
        assert wait - 60 < int(spent.headers["Retry-After"]) <= wait

        page = requests.get(f"{address}/metrics", timeout=30).text
    requests_total = 'lathe_gateway_requests_total{key="search",model="",'
    assert f'{requests_total}path="/v1/completions",status="429"}} 1.0' in page
    assert 'lathe_gateway_completion_tokens_total{key="batch",model="gpt"} 1000.0' in page
    assert "secret" not in page and "secret" not in caplog.text
    ending = "model gpt, 1 + 1000 tokens, key batch, client 127.0.0.1, request to-2"
    assert any(ending in message for message in caplog.messages)
