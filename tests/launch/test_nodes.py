"""A node pool, asked of a Kubernetes API server on the loopback interface."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from kubernetes.config import kube_config

from lathe.cluster.nodes import check_node_pool
from lathe.errors import StageError, UserError

POOL = {"a100-1": "8", "a100-2": "8", "a100-3": "4", "a100-4": None}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Four nodes of the pool a100; the token is `right`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            selector = parse_qs(address.query)["labelSelector"]
            allowed = self.headers["Authorization"] == "Bearer right"
            nodes = POOL if selector == ["lathe/node-pool=a100"] else {}
            items = [
                {
                    "metadata": {"name": name},
                    "status": {"allocatable": {"cpu": "96"} | ({"nvidia.com/gpu": n} if n else {})},
                }
                for name, n in nodes.items()
            ]
            body = json.dumps({"kind": "NodeList", "apiVersion": "v1", "items": items}).encode()
            self.send_response(200 if allowed and address.path == "/api/v1/nodes" else 403)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    path = tmp_path / "config"
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def allow(token: str) -> None:
            config = {
                "current-context": "x",
                "clusters": [
                    {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
                ],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            }
            path.write_text(yaml.safe_dump(config))

        yield allow
        server.shutdown()


def test_a_pool_that_is_large_enough(cluster):
    cluster("right")
    check_node_pool("a100", nodes=2, gpus=8)
    check_node_pool("a100", nodes=3, gpus=4, context="x")


def test_one_that_is_not_says_what_it_has(cluster):
    cluster("right")
    listed = "a100-1 has 8, a100-2 has 8, a100-3 has 4, a100-4 has 0"
    with pytest.raises(UserError, match=f"3 nodes with 8 GPUs each are wanted, and {listed}"):
        check_node_pool("a100", nodes=3, gpus=8)


def test_no_such_pool(cluster):
    cluster("right")
    with pytest.raises(UserError, match="no node has the label lathe/node-pool=h100"):
        check_node_pool("h100", nodes=1, gpus=1)


def test_what_cannot_be_asked(cluster):
    with pytest.raises(StageError, match="no kube context"):
        check_node_pool("a100", nodes=1, gpus=1)
    cluster("wrong")
    with pytest.raises(StageError, match="does not list its nodes: Forbidden"):
        check_node_pool("a100", nodes=1, gpus=1)
    with pytest.raises(StageError, match="no kube context"):
        check_node_pool("a100", nodes=1, gpus=1, context="other")
