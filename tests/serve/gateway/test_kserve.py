"""KServe's API through the gateway: clients work as with Triton itself, and requests that crash
Triton's HTTP server do not reach it."""

import gzip
import json
import socket
import subprocess
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import requests
from tritonclient.grpc import service_pb2, service_pb2_grpc

from lathe_base.config.settings import ServingSettings
from lathe_serving.client import Client
from lathe_serving.environment import find_environment
from lathe_serving.gateway.admission import Limits
from lathe_serving.gateway.app import Gateway
from lathe_serving.gateway.triton import Triton, read_models
from lathe_serving.server import TritonServer, start
from lathe_serving.state import Process
from tests.serve.gateway.test_hostile import chunks
from tests.support import silent
from tests.support.connection import connected, read_all
from tests.support.gateways import opened, running
from tests.support.network_namespace import neighbour
from tests.support.processes import processes

SCORED: dict[str, list[int]] = {"tokens": [1, 2, 3], "index": [0, 1], "targets": [2, 3]}
SCORE = {
    "inputs": [
        {"name": name, "datatype": "INT64", "shape": [1, len(data)], "data": data}
        for name, data in SCORED.items()
    ]
}
GREEDY = {"decode_strategy": "greedy_search", "max_tokens": 6, "min_tokens": 6}
LISTEN = "0A"  # socket state in /proc/net/tcp
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # also IPv6-mapped, by gRPC
CLIENTS = """
import asyncio, json, sys
import numpy as np
import tritonclient.grpc
import tritonclient.http
import tritonclient.http.aio

url, grpc_url, given = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

def inputs(module, **options):
    for name, data in given.items():
        tensor = module.InferInput(name, [1, len(data)], "INT64")
        tensor.set_data_from_numpy(np.array([data]), **options)
        yield tensor

def values(result):
    return result.as_numpy("log_likelihood").tolist()

found = []
client = tritonclient.http.InferenceServerClient(url)
assert client.is_server_live() and client.is_server_ready()
assert client.is_model_ready("gpt") and not client.is_model_ready("none")
found.append(client.get_server_metadata()["version"])
assert client.get_model_metadata("gpt-score", "1")["name"] == "gpt-score"
assert client.get_model_config("gpt")["name"] == "gpt"
assert client.get_inference_statistics("gpt")["model_stats"]
for binary in (True, False):
    for way in (None, "gzip", "deflate"):
        asked = [tritonclient.http.InferRequestedOutput("log_likelihood", binary_data=binary)]
        found.append(values(client.infer(
            "gpt-score", list(inputs(tritonclient.http, binary_data=binary)), outputs=asked,
            request_compression_algorithm=way, response_compression_algorithm=way,
        )))
for refused in (
    client.get_model_repository_index,
    lambda: client.register_system_shared_memory("x", "/lathe", 8),
    client.get_log_settings,
    lambda: client.infer("gpt-score", []),
):
    try:
        refused()
        raise SystemExit(f"{refused} was answered")
    except tritonclient.http.InferenceServerException:
        pass

async def aio():
    async with tritonclient.http.aio.InferenceServerClient(url) as client:
        return values(await client.infer("gpt-score", list(inputs(tritonclient.http))))

found.append(asyncio.run(aio()))
with tritonclient.grpc.InferenceServerClient(grpc_url) as client:
    found.append(values(client.infer("gpt-score", list(inputs(tritonclient.grpc)))))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def started(
    triton: None,
    repository: Path,
    serving: ServingSettings,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TritonServer]:
    """Triton and the gateway, started as by `lathe serve`."""
    with start(repository, serving, tmp_path_factory.mktemp("door"), with_gateway=True) as server:
        yield server


@pytest.fixture(scope="module")
def door(started: TritonServer) -> str:
    return f"http://{started.state.http}"


def post(door: str, path: str, body: Any, **headers: str) -> requests.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return requests.post(f"{door}{path}", data=data, headers=headers, timeout=60)


@pytest.mark.slow
def test_tritons_own_clients_work(started: TritonServer, server: TritonServer) -> None:
    python = find_environment().python
    state = started.state
    command = [python, "-c", CLIENTS, state.http, state.grpc, json.dumps(SCORED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    with Client(server.state.grpc, "gpt") as client:
        expected, _ = client.score(*(np.array([data]) for data in SCORED.values()))
    found = json.loads(done.stdout)
    assert found.pop(0) == find_environment().triton
    assert len(found) == 8
    np.testing.assert_allclose(found, [expected] * 8, rtol=1e-6)


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded"])
def test_generate_says_what_grpc_says(started: TritonServer, door: str, kind: str) -> None:
    """curl labels bodies as forms unless a content type is given."""
    with Client(started.state.grpc, "gpt") as client:
        expected = client.generate("hello", **GREEDY)
    body = {"text_input": "hello", **GREEDY}
    whole = post(door, "/v2/models/gpt/generate", body, **{"Content-Type": kind})
    assert whole.json()["tokens"] == expected.tokens and whole.headers["x-request-id"]
    path = "/v2/models/gpt/versions/1/generate_stream"
    stream = post(door, path, body | {"stream": True}, **{"Content-Type": kind})
    assert stream.headers["content-type"].startswith("text/event-stream")
    pieces = [json.loads(line[6:]) for line in stream.text.splitlines() if line]
    tokens = [np.atleast_1d(piece["tokens"]) for piece in pieces]  # one token is a scalar in JSON
    assert np.concatenate(tokens).tolist() == expected.tokens


def test_both_interfaces_are_at_both_ports(started: TritonServer) -> None:
    state = started.state
    for port in (state.http_port, state.gateway_port):
        for path in ("/v1/models", "/v2/models/gpt/ready", "/v2", "/health"):
            assert requests.get(f"http://127.0.0.1:{port}{path}", timeout=30).status_code == 200


UNSERVED = (
    "/v2/repository/index", "/v2/repository/models/gpt/load", "/v2/repository/models/gpt/unload",
    "/v2/systemsharedmemory/region/x/register", "/v2/systemsharedmemory/status",
    "/v2/cudasharedmemory/region/x/register", "/v2/cudasharedmemory/status",
    "/v2/trace/setting", "/v2/models/gpt/trace/setting", "/v2/logging", "/metrics/x",
    "/v2/models/../repository/index", "/v2/models/%2e%2e/repository/index",
    "/v2/models/gpt/%2e%2e/%2e%2e/repository/index", "//v2/repository/index",
    "/v2/models/gpt%2finfer/generate", "/v2/models/gpt/versions/x/infer", "/V2/models/gpt/infer",
    "/v2/models/gpt/infer/../../../repository/index", "/v2/models/a b/infer", "/v2/health/x",
)  # fmt: skip


@pytest.mark.parametrize("path", UNSERVED)
def test_nothing_else_of_triton_is_served(door: str, path: str) -> None:
    for method in ("GET", "POST"):
        with connected(door) as connection:
            length = "Content-Length: 2\r\n\r\n{}" if method == "POST" else "\r\n"
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            connection.sendall(f"{head}{length}".encode())
            status = read_all(connection).split(b" ", 2)[1]
        assert status in (b"404", b"400"), path


@pytest.mark.parametrize(
    ("path", "method"),
    [("/v2/models/gpt/infer", "GET"), ("/v2/models/gpt/ready", "POST"), ("/v2", "DELETE")],
)
def test_an_unsupported_method_is_reported(door: str, path: str, method: str) -> None:
    reply = requests.request(method, f"{door}{path}", timeout=30)
    assert reply.status_code == 405 and reply.headers["Allow"] and reply.json()["error"]


def deep(n: int) -> bytes:
    return b'{"text_input":' + b"[" * n + b"]" * n + b"}"


def hostile() -> Iterator[tuple[str, str, bytes, bytes, tuple[int, ...]]]:
    """Yield name, path, headers, body and the allowed statuses of hostile requests."""
    chunked, many = b"Transfer-Encoding: chunked\r\n", chunks(b" ", 600_000)
    for path in ("/v2/repository/index", "/v2/models/gpt/infer", "/v2/models/gpt/generate"):
        yield f"600,000 chunks to {path}", path, chunked, many, (404, 413)
    for verb in ("generate", "generate_stream", "infer"):
        path = f"/v2/models/gpt/{verb}"
        yield f"40,000 brackets to {verb}", path, b"", deep(40_000), (400,)
        yield f"40,000 objects to {verb}", path, b"", b'{"a":' * 40_000, (400,)
    json_part = b"Inference-Header-Content-Length: %d\r\n"
    path, body = "/v2/models/gpt-score/infer", deep(40_000)
    yield "brackets before a tensor", path, json_part % len(body), body + bytes(64), (400,)
    for length in (b"-1", b"9" * 30, b"100", b"x", b"1.5", b"\xb2"):
        header = b"Inference-Header-Content-Length: " + length + b"\r\n"
        yield f"a length of JSON {length!r}", path, header, b"{}", (400,)
    packed = b"Content-Encoding: gzip\r\n"
    yield "packed brackets", "/v2/models/gpt/generate", packed, gzip.compress(body), (400,)
    bomb = gzip.compress(bytes(100_000_000), 1)
    yield "a bomb", "/v2/models/gpt/generate", packed, bomb, (413,)
    deflated = zlib.compress(bytes(100_000_000), 1)
    yield "another", path, b"Content-Encoding: deflate\r\n", deflated, (413,)
    yield "an unknown packing", path, b"Content-Encoding: br\r\n", b"{}", (415,)
    yield "10 MB", path, b"", b" " * 10_000_000, (413,)
    for body in (b"", b"[]", b"1", b"null", b'{"a":1}{"b":2}', b"\xff", b"{" * 100):
        yield f"no object {body!r:.20}", "/v2/models/gpt/generate", b"", body, (400,)
    shared = {"shared_memory_region": "x", "shared_memory_byte_size": 64}
    region = [{"name": "tokens", "datatype": "INT64", "shape": [1, 8], "parameters": shared}]
    yield "a shared region", path, b"", json.dumps({"inputs": region}).encode(), (400, 404)
    many_outputs = json.dumps(SCORE | {"outputs": [{"name": "log_likelihood"}] * 90_000}).encode()
    yield "many outputs", path, b"", many_outputs, (400,)
    tensor = {"name": "tokens", "datatype": "INT64", "data": [1, 2, 3]}
    for shape in (
        *([1, 2**62], [-1, 3], [-1, -3], [2**31, 2**31], [2**32, 2**32], [1] * 150, [], [0]),
        *([1.5], ["3"], "3", 3, None, [True], [2**70], [0, 2**62], [1, 4_000_000]),
    ):
        body = json.dumps({"inputs": [tensor | {"shape": shape}]}).encode()
        yield f"shape {shape!r:.20}", path, b"", body, (400,)
    body = json.dumps({"inputs": [tensor | {"shape": [2**31, 2**31]}]}).encode()
    yield "a shape and tensors", path, json_part % len(body), body + bytes(64), (400,)
    fields = {f"field {i}": i for i in range(1000)}
    for found in (fields, {"parameters": fields}):
        body = json.dumps({"text_input": "x"} | found).encode()
        yield f"many fields {len(found)}", "/v2/models/gpt/generate", b"", body, (400,)


@pytest.mark.parametrize("case", [pytest.param(case, id=case[0]) for case in hostile()])
def test_requests_that_kill_triton_are_rejected(
    started: TritonServer, door: str, case: Any
) -> None:
    _, path, headers, body, statuses = case
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % path.encode()
    length = b"" if headers.startswith(b"Transfer") else b"Content-Length: %d\r\n" % len(body)
    with connected(door) as connection:
        with suppress(ConnectionError):  # refused before all of it was sent
            connection.sendall(head + headers + length + b"\r\n" + body)
        try:
            status = int(read_all(connection).split(b" ", 2)[1])
        except ConnectionResetError:
            status = 413
    assert status in statuses
    good = post(door, "/v2/models/gpt/generate", {"text_input": "x", **GREEDY})
    assert good.status_code == 200 and len(good.json()["tokens"]) == 6
    assert started.state.server == Process.of(started.state.server.pid)


def test_keys_are_required(server: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a-key\n", encoding="utf-8")
    body, key = {"text_input": "x", **GREEDY}, {"Authorization": "Bearer a-key"}
    with opened(server, keys=tmp_path / "keys") as address:
        for path in ("/v2/models/gpt/generate", "/v2/models/gpt/infer", "/v2/repository/index"):
            assert post(address, path, body).status_code == 401
        assert post(address, "/v2/models/gpt/generate", body, **key).status_code == 200
        for path in ("/v2", "/v2/models/gpt", "/v2/models/gpt/config"):
            assert requests.get(f"{address}{path}", timeout=30).status_code == 401
            assert requests.get(f"{address}{path}", headers=key, timeout=30).status_code == 200
        for path in ("live", "ready"):
            assert requests.get(f"{address}/v2/health/{path}", timeout=30).status_code == 200


def test_pages_of_other_sites_cannot_ask(door: str) -> None:
    body, foreign = {"text_input": "x", **GREEDY}, {"Origin": "https://evil.example"}
    assert post(door, "/v2/models/gpt/generate", body, **foreign).status_code == 403
    assert post(door, "/v2/models/gpt/generate", body, Host="evil.example").status_code == 421


def test_places_are_limited(server: TritonServer) -> None:
    with opened(server, Limits(requests=0)) as address:
        reply = post(address, "/v2/models/gpt/generate", {"text_input": "x"})
        assert reply.status_code == 503 and "0 requests" in reply.json()["error"]
        assert reply.headers["Retry-After"]


@pytest.mark.parametrize("verb", ["generate", "generate_stream", "infer"])
def test_requests_wait_for_the_same_slots_as_openais(server: TritonServer, verb: str) -> None:
    with opened(server, max_wait=-1.0) as address:  # no wait is short enough
        reply = post(address, f"/v2/models/gpt/{verb}", {"text_input": "x"})
        assert reply.status_code == 503 and "gpt is busy" in reply.json()["error"]
        assert reply.headers["Retry-After"]
        assert post(address, "/v2/models/gpt-score/infer", SCORE).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb", [pytest.param("generate", marks=pytest.mark.slow), "generate_stream"]
)
def test_a_client_that_leaves_frees_its_slot(
    lasting: Path, serving: ServingSettings, triton: None, tmp_path: Path, verb: str
) -> None:
    """Clients that take all slots disconnect; the next one does not wait for their output."""
    body = {"text_input": "x", "max_tokens": 16000, "min_tokens": 16000, "stream": True}
    with start(lasting, serving, tmp_path) as server, opened(server) as address:
        for _ in range(serving.max_running + serving.max_queue):
            with connected(address) as connection:
                data = json.dumps(body | {"stream": verb != "generate"}).encode()
                head = b"POST /v2/models/gpt/%s HTTP/1.1\r\nHost: localhost\r\n" % verb.encode()
                connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
                if verb == "generate":
                    time.sleep(0.1)
                else:
                    assert b"200" in connection.recv(100)
        short = post(address, "/v2/models/gpt/generate", {"text_input": "x", **GREEDY})
        assert short.status_code == 200 and len(short.json()["tokens"]) == 6


def test_only_generating_models_are_notified_of_disconnects(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton crashes if another kind of model responds on a stream of generated text."""
    told: list[str] = []
    monkeypatch.setattr(Triton, "cancel", lambda _, model, name: told.append(model))
    models = read_models(Path(server.state.repository))
    with silent.server(silent.ANSWERS["silent"]) as port:
        gateway = Gateway(models, server.state.grpc, f"127.0.0.1:{port}", Limits())
        with running(gateway, []) as address:
            for model in ("gpt-score", "none", "gpt"):
                with pytest.raises(requests.ReadTimeout):
                    path = f"{address}/v2/models/{model}/generate"
                    requests.post(path, json={"text_input": "x"}, timeout=0.5)
    assert told == ["gpt"]


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Addresses and ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(file.readlink().name)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTEN and f"socket:[{inode}]" in inodes:
                address, port = local.split(":")
                found.add((address, int(port, 16)))
    return found


def test_only_loopback_reaches_the_server(started: TritonServer) -> None:
    """All ports are bound to loopback, including Triton's own."""
    state = started.state
    names = (state.shared_memory, f"--port={state.gateway_port} ")
    places = listening(pid for name in names for pid in processes(name))
    ports = {state.http_port, state.gateway_port, state.triton_port, state.grpc_port}
    assert {port for _, port in places} == ports | {state.metrics_port}
    assert {address for address, _ in places} <= LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.connect(("192.0.2.1", 9))  # sends nothing, but selects the local address
        own = found.getsockname()[0]
    assert not own.startswith("127.")
    for _, port in places:
        with socket.socket() as connection, pytest.raises(ConnectionRefusedError):
            connection.connect((own, port))


def test_a_port_scan_from_another_network_namespace_finds_nothing(started: TritonServer) -> None:
    state = started.state
    ports = {state.http_port, state.gateway_port, state.triton_port, state.grpc_port}
    with neighbour() as outside, socket.create_server(("", 0)) as everywhere:
        known = everywhere.getsockname()[1]
        assert outside.open_ports({*ports, state.metrics_port, known}) == {known}


def test_grpc_needs_a_key_for_all_but_inference(started: TritonServer) -> None:
    calls = {
        "SystemSharedMemoryRegister": service_pb2.SystemSharedMemoryRegisterRequest(
            name="x", key=f"/{started.state.shared_memory}", byte_size=8
        ),
        "CudaSharedMemoryStatus": service_pb2.CudaSharedMemoryStatusRequest(),
        "RepositoryIndex": service_pb2.RepositoryIndexRequest(),
        "RepositoryModelLoad": service_pb2.RepositoryModelLoadRequest(model_name="gpt"),
        "TraceSetting": service_pb2.TraceSettingRequest(),
        "LogSettings": service_pb2.LogSettingsRequest(),
    }
    with grpc.insecure_channel(started.state.grpc, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name, request in calls.items():
            with pytest.raises(grpc.RpcError, match="restricted"):
                getattr(stub, name)(request, timeout=60)
