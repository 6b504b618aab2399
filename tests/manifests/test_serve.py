"""The Deployment's command line on a real Triton server."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
import yaml
from tritonclient.grpc import service_pb2, service_pb2_grpc

from lathe_base.config.settings import ServingSettings
from lathe_base.storage import upload
from lathe_serving.client import Client
from lathe_serving.environment import find_environment
from lathe_serving.server import ANY_PORTS, free_ports
from lathe_serving.state import LOOPBACK
from tests.support.rendered import MANIFESTS, ROOT, Object, named, of_kind
from tests.support.s3 import ACCESS_KEY, SECRET_KEY

KEY = "not-a-secret"
HEALTH_CHECK, SERVING = "/grpc.health.v1.Health/Check", b"\x08\x01"
LONG = {"max_tokens": 400, "min_tokens": 400, "decode_strategy": "greedy_search"}


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    log: Path
    http: str
    grpc: str
    metrics: str


def pod(production: list[Object]) -> Object:
    spec: Object = named(production, "Deployment", "lathe-serve")["spec"]["template"]["spec"]
    return spec


def arguments(production: list[Object]) -> list[str]:
    container, _ = pod(production)["containers"]
    assert container["command"] == ["tritonserver"]
    given: list[str] = container["args"]
    return given


@pytest.fixture
def release(
    triton: None, repository: Path, production: list[Object], s3: str, tmp_path: Path
) -> Path:
    """A release, fetched from a store with the init container's command and environment."""
    uri = f"{s3}/lathe/gpt/sha256-0"
    upload(repository, uri)
    secret = tmp_path / "secret"
    secret.mkdir()
    for key, value in (("accesskey", ACCESS_KEY), ("secretkey", SECRET_KEY)):
        (secret / key).write_text(value)
    (fetch,) = pod(production)["initContainers"]
    environment = find_environment()
    values = {
        "LATHE_RELEASE": uri,
        "AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"],
        "AWS_REGION": "us-east-1",
        "LATHE_S3_SECRET_DIR": str(secret),
    }
    changes = {
        "python": str(environment.python),
        "$(LATHE_RELEASE)": uri,
        "/models/release": str(tmp_path / "release"),
    }
    variables = {variable["name"]: values[variable["name"]] for variable in fetch["env"]}
    subprocess.run(
        [changes.get(word, word) for word in fetch["command"]],
        env={"PYTHONPATH": str(ROOT), **variables},
        check=True,
        timeout=60,
    )
    return tmp_path / "release"


@pytest.fixture
def server(release: Path, production: list[Object], tmp_path: Path) -> Iterator[Server]:
    """Run the container's command with local paths, free ports and a key."""
    environment = find_environment()
    ports = free_ports(ServingSettings(http_port=0, grpc_port=0, metrics_port=0))
    changes = {"/models/release": str(release), "$(TRITON_ADMIN_KEY)": KEY}
    own = zip((8003, 8001, 8002), ports.values(), strict=True)
    changes |= {f"port={old}": f"port={new}" for old, new in own}
    changes["--metrics-address=0.0.0.0"] = "--metrics-address=127.0.0.1"
    line = "\n".join(arguments(production))
    for old, new in changes.items():
        assert old in line
        line = line.replace(old, str(new))
    beside = ["--grpc-address=127.0.0.1"]
    beside += [f"--backend-directory={environment.link_backends(tmp_path / 'backends')}"]
    beside += [f"--backend-config=python,shm-region-prefix-name=lathe_{tmp_path.name}"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [environment.binary, *line.splitlines(), *beside],
            env=environment.variables(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    running = Server(process, log, *(f"127.0.0.1:{port}" for port in ports.values()))
    try:
        deadline = time.monotonic() + 180
        ready = f"http://{running.http}/v2/health/ready"
        while not is_healthy(running.grpc) or status(ready) != 200:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield running
    finally:
        process.kill()
        process.wait()
        for region in Path("/dev/shm").glob(f"lathe_{tmp_path.name}*"):
            region.unlink()


def is_healthy(address: str) -> bool:
    """Check health like the kubelet's gRPC probe."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            return bytes(channel.unary_unary(HEALTH_CHECK)(b"", timeout=5)) == SERVING
        except grpc.RpcError:
            return False


def status(url: str, body: bytes | None = None, **headers: str) -> int:
    request = urllib.request.Request(url, data=body, headers=headers)
    try:
        with LOOPBACK.open(request, timeout=60) as reply:
            reply.read()
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_it_generates_and_its_restricted_endpoints_refuse(
    server: Server, production: list[Object]
) -> None:
    with Client(server.grpc, "gpt", timeout_seconds=30) as client:
        assert len(client.generate("x", max_tokens=5, min_tokens=5).tokens) == 5
        assert re.fullmatch("[0-9a-f]{64}", client.served_digest())
    asked = json.dumps({"text_input": "x", "max_tokens": 3}).encode()
    assert status(f"http://{server.http}/v2/models/gpt/generate", asked) == 200

    closed = {
        "v2/repository/index": b"{}",
        "v2/repository/models/gpt/unload": b"{}",
        "v2/systemsharedmemory/status": None,
        "v2/cudasharedmemory/status": None,
        "v2/trace/setting": None,
        "v2/logging": None,
    }
    for path, body in closed.items():
        url = f"http://{server.http}/{path}"
        assert status(url, body) == status(url, body, **{"triton-admin": "wrong"}) == 403, path
    key = {"triton-admin": KEY}
    assert status(f"http://{server.http}/v2/repository/index", b"{}", **key) == 200
    # The key grants access, but the control mode still forbids loading and unloading.
    assert status(f"http://{server.http}/v2/repository/models/gpt/unload", b"{}", **key) >= 400
    assert status(f"http://{server.http}/v2/models/gpt/ready") == 200
    _check_grpc(server)
    _check_metrics(server, production)
    assert KEY not in server.log.read_text()


def _check_grpc(server: Server) -> None:
    with grpc.insecure_channel(server.grpc, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [
            (stub.RepositoryIndex, service_pb2.RepositoryIndexRequest()),
            (
                stub.RepositoryModelUnload,
                service_pb2.RepositoryModelUnloadRequest(model_name="gpt"),
            ),
            (stub.SystemSharedMemoryStatus, service_pb2.SystemSharedMemoryStatusRequest()),
            (stub.TraceSetting, service_pb2.TraceSettingRequest()),
            (stub.LogSettings, service_pb2.LogSettingsRequest()),
        ]
        for call, request in calls:
            with pytest.raises(grpc.RpcError, match="restricted"):
                call(request, timeout=60)
        call, request = calls[0]
        opened = call(request, timeout=60, metadata=[("triton-grpc-protocol-triton-admin", KEY)])
        assert {model.name for model in opened.models} == {"gpt", "gpt-score"}


def _check_metrics(server: Server, production: list[Object]) -> None:
    """The server exports the metrics that the autoscaler requests and the adapter forwards."""
    with LOOPBACK.open(f"http://{server.metrics}/metrics", timeout=60) as reply:
        exported = set(re.findall(r"^(\w+)(?:\{| )", reply.read().decode(), re.M))
    (scaler,) = of_kind(production, "HorizontalPodAutoscaler")
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    adapter = yaml.safe_load((MANIFESTS / "components/autoscaling/adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    pattern = re.search(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert pattern is not None
    passed = {name for name in exported if re.fullmatch(pattern[1], name)}
    assert asked == passed != set()


@pytest.mark.slow
def test_the_liveness_probe_sees_a_dead_backend(server: Server, production: list[Object]) -> None:
    """Triton itself does not notice: `lathe_serving.stubs` does."""
    triton, _ = pod(production)["containers"]
    command = triton["livenessProbe"]["exec"]["command"]
    port = server.http.rpartition(":")[2]
    changes = {"python": str(find_environment().python), "8003": port}

    def lives() -> bool:
        asked = [changes.get(word, word) for word in command]
        done = subprocess.run(asked, env={"PYTHONPATH": str(ROOT)}, check=False, timeout=60)
        return done.returncode == 0

    assert lives()
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    stub, *_ = " ".join(path.read_text(encoding="utf-8") for path in children).split()
    os.kill(int(stub), signal.SIGKILL)
    time.sleep(0.5)
    assert not lives() and is_healthy(server.grpc)


@pytest.mark.slow
def test_a_stream_in_flight_ends_before_the_server_does(server: Server) -> None:
    with Client(server.grpc, "gpt", timeout_seconds=60) as client:
        stream = client.stream("x", **LONG)
        tokens = len(next(stream).tokens)
        server.process.send_signal(signal.SIGTERM)
        tokens += sum(len(piece.tokens) for piece in stream)
    assert tokens == LONG["max_tokens"]
    assert server.process.wait(120) == 0


def test_the_gateway_answers_for_who_has_a_key(
    server: Server, release: Path, production: list[Object], tmp_path: Path
) -> None:
    """Uses the gateway's command line and environment, with local paths and ports."""
    _, container = pod(production)["containers"]
    (keys,) = (variable for variable in container["env"] if variable["name"] == "LATHE_API_KEYS")
    (tmp_path / "keys").write_text(f"{KEY}\n")
    ports = free_ports(ServingSettings(**ANY_PORTS), with_gateway=True)
    port = ports["gateway_port"]
    changes = {
        "python": str(find_environment().python),
        "/models/release": str(release),
        "--triton=127.0.0.1:8001": f"--triton={server.grpc}",
        "--triton-http=127.0.0.1:8003": f"--triton-http={server.http}",
        "--host=0.0.0.0": "--host=127.0.0.1",
        "--port=8000": f"--port={ports['http_port']}",
        "--port=9000": f"--port={port}",
    }
    line = [*container["command"], *container["args"]]
    assert changes.keys() <= {*line} and keys["value"].endswith("/keys")
    environment = {"PYTHONPATH": str(ROOT), "LATHE_API_KEYS": str(tmp_path / "keys")}
    gateway = subprocess.Popen([changes.get(word, word) for word in line], env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while status(address + container["readinessProbe"]["httpGet"]["path"]) != 200:
            assert gateway.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        asked = json.dumps({"model": "gpt", "prompt": "x", "max_tokens": 3}).encode()
        kind = {"Content-Type": "application/json"}
        assert status(f"{address}/v1/completions", asked, **kind) == 401
        key = {"Authorization": f"Bearer {KEY}"}
        assert status(f"{address}/v1/completions", asked, **kind, **key) == 200
        generate = f"http://127.0.0.1:{ports['http_port']}/v2/models/gpt/generate"
        asked = json.dumps({"text_input": "x", "max_tokens": 3}).encode()
        assert status(generate, asked) == 401 and status(generate, asked, **key) == 200
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(120) == 0
    finally:
        gateway.kill()
        gateway.wait()


def test_only_the_gateway_is_reached_over_http(production: list[Object]) -> None:
    triton, gateway = pod(production)["containers"]
    assert "--http-address=127.0.0.1" in triton["args"]
    assert {port["name"] for port in triton["ports"]} == {"grpc", "metrics"}
    assert {port["name"] for port in gateway["ports"]} == {"http", "openai"}
    assert triton["startupProbe"]["grpc"] == triton["readinessProbe"]["grpc"] == {"port": 8001}


def test_every_option_is_the_binarys(triton: None, production: list[Object]) -> None:
    environment = find_environment()
    command = [environment.binary, "--help"]
    shown = subprocess.run(
        command, env=environment.variables(), capture_output=True, text=True, check=False
    )
    known = set(re.findall(r"^\s+(--[\w-]+)", shown.stdout + shown.stderr, re.M))
    given = {argument.split("=")[0] for argument in arguments(production)}
    assert given <= known and len(given) > 10
