"""Looking up images in registries as a container engine does."""

import json
from urllib.parse import parse_qs, urlsplit

import pytest

from components.machines import Pool
from lathe_base.checks import run_checks
from lathe_base.errors import Code, StageError
from pipelines.cluster.preflight import image_checks
from pipelines.cluster.registry import Reference, check_image, image_labels, parse
from pipelines.compiler.compile import build
from tests.support.errors import raises
from tests.support.loopback import LoopbackServer, QuietHandler

DIGEST = "sha256:" + "a" * 64
CPU, CUDA, OLD = (f"sha256:{letter * 64}" for letter in "bcd")
HELD = {"team/lathe-train": {"1.0", DIGEST, "cpu", "cuda", "old", "strange", CPU, CUDA, OLD}}
PLATFORMS = [
    {"digest": OLD, "platform": {"architecture": "unknown", "os": "unknown"}},
    {"digest": CUDA, "platform": {"architecture": "amd64", "os": "linux"}},
]
DOCUMENTS: dict[str, object] = {
    "manifests/cpu": {"config": {"digest": CPU}},
    "manifests/cuda": {"manifests": PLATFORMS},
    f"manifests/{CUDA}": {"config": {"digest": CUDA}},
    "manifests/old": {"config": {"digest": OLD}},
    "manifests/1.0": {"config": {"digest": OLD}},
    "manifests/strange": {"signatures": []},
    f"blobs/{CPU}": {"config": {"Labels": {"lathe.flavour": "cpu"}}},
    f"blobs/{CUDA}": {"config": {"Labels": {"lathe.flavour": "cuda"}}},
    f"blobs/{OLD}": {"config": {"Labels": None}},
}


CHALLENGES = {
    "bearer": 'Bearer realm="http://{host}/token",service="here",scope="{scope}"',
    "closed": 'Bearer realm="http://{host}/token",service="here",scope="{scope}"',
    "lower": 'bearer Realm="http://{host}/token", service=here, scope="{scope}"',
    "list": 'Basic realm="here", Bearer realm="http://{host}/token",service="here",scope="{scope}"',
}


@pytest.fixture(params=["open", *CHALLENGES])
def registry(request):
    """A registry that is open, or requires a token or a login for reads.

    The challenges `lower` and `list` are formatted in unusual ways. Blobs are on another host, as
    for most registries, to which the token must not be sent.
    """

    class Handler(QuietHandler):
        def do_HEAD(self) -> None:
            self._registry()

        def do_GET(self) -> None:
            if self.path.startswith("/token"):
                query = parse_qs(urlsplit(self.path).query)
                assert query["service"] == ["here"] and query["scope"][0].endswith(":pull")
                body = b"" if request.param == "closed" else b'{"token": "anonymous"}'
                self.reply(body, 200 if body else 401)
            elif self.path.startswith("/elsewhere/"):
                assert "Authorization" not in self.headers
                self._document(self.path.removeprefix("/elsewhere/"))
            else:
                self._registry()

        def _registry(self) -> None:
            host = self.headers["Host"]
            name, _, path = self.path.removeprefix("/v2/").partition("/lathe-train/")
            name = f"{name}/lathe-train"
            assert "application/vnd.oci.image.index.v1+json" in self.headers["Accept"]
            if request.param != "open" and self.headers["Authorization"] != "Bearer anonymous":
                scope = f"repository:{name}:pull"
                challenge = CHALLENGES[request.param].format(host=host, scope=scope)
                self.reply(b"{}", 401, {"WWW-Authenticate": challenge})
            elif path.startswith("blobs/"):
                port = host.partition(":")[2]
                self.reply(b"{}", 307, {"Location": f"http://localhost:{port}/elsewhere/{path}"})
            elif self.command == "HEAD":
                self.reply(b"{}", 200 if path.partition("/")[2] in HELD.get(name, ()) else 404)
            else:
                self._document(path)

        def _document(self, path: str) -> None:
            self.reply(json.dumps(DOCUMENTS[path]).encode())

    with LoopbackServer(Handler) as server:
        yield f"127.0.0.1:{server.server_port}", request.param


@pytest.mark.parametrize("name", ["team/lathe-train:1.0", f"team/lathe-train:1.0@{DIGEST}"])
def test_an_image_that_is_there(registry, name):
    address, kind = registry
    if kind == "closed":
        with raises(Code.UNAUTHORIZED, address, kind=StageError):
            check_image(f"{address}/{name}")
    else:
        check_image(f"{address}/{name}")


def test_one_that_is_not_says_how_to_push_it(registry):
    address, kind = registry
    if kind == "closed":
        pytest.skip("the registry tells anonymous clients nothing")
    with raises(Code.NOT_FOUND, f"push REGISTRY={address}/team", kind=StageError):
        check_image(f"{address}/team/lathe-train:2.0")


@pytest.mark.parametrize(
    ("image", "code"),
    [
        ("127.0.0.1:9/lathe-train:1", Code.UNREACHABLE),
        ("localhost/lathe-train:1", Code.NOT_FOUND),
    ],
)
def test_failing_queries(image, code):
    with raises(code, kind=StageError):
        check_image(image)


def test_a_registry_is_asked_through_the_proxy(monkeypatch):
    asked = []

    class Proxy(QuietHandler):
        def do_CONNECT(self) -> None:
            asked.append(self.path)
            self.send_error(403)

    with LoopbackServer(Proxy) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        with raises(Code.UNREACHABLE, "403", kind=StageError):
            check_image("registry.invalid/lathe-train:1")
    assert asked == ["registry.invalid:443"]


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ("python", ("registry-1.docker.io", "library/python", "latest")),
        ("docker.io/python:3", ("registry-1.docker.io", "library/python", "3")),
        ("index.docker.io/team/gpt", ("registry-1.docker.io", "team/gpt", "latest")),
        ("team/gpt:2", ("registry-1.docker.io", "team/gpt", "2")),
        ("ghcr.io/team/gpt", ("ghcr.io", "team/gpt", "latest")),
        (f"host:5000/gpt:1@{DIGEST}", ("host:5000", "gpt", DIGEST)),
    ],
)
def test_names(image, reference):
    assert parse(image) == Reference(*reference)


def test_hidden_images_of_a_pipeline_are_reported(registry):
    address, kind = registry
    pipeline = build("pretrain")
    executors = pipeline.component_spec.implementation.graph.deployment_spec["executors"]
    executors["exec-prepare"]["container"]["image"] = f"{address}/team/lathe-train:2.0"
    executors["exec-pretrain"]["container"]["image"] = f"{address}/team/lathe-train:1.0"
    found = list(run_checks(image_checks(pipeline, Pool(gpus=0)), is_preflight=True))
    # a 404 without credentials may mean a private image
    assert not any(one.state == "broken" for one in found)
    unchecked = "\n".join(f"{one.check}: {one.said}" for one in found)
    assert "localhost/lathe-train:0.2.0: not checked: a local image name" in unchecked
    assert unchecked.count("requires authentication") == (2 if kind == "closed" else 1)
    assert f"{address}/team/lathe-train:2.0: not checked" in unchecked


@pytest.mark.parametrize(("tag", "labels"), [
    ("cpu", {"lathe.flavour": "cpu"}), ("cuda", {"lathe.flavour": "cuda"}), ("old", {}),
])  # fmt: skip
def test_labels(registry, tag, labels):
    address, kind = registry
    image = f"{address}/team/lathe-train:{tag}"
    if kind == "closed":
        with raises(Code.UNAUTHORIZED, address, kind=StageError):
            image_labels(image)
    else:
        assert image_labels(image) == labels


@pytest.fixture(scope="module")
def pipeline():
    """A pipeline whose images the tests set."""
    return build("pretrain")


@pytest.mark.parametrize(("tag", "gpus", "problems"), [
    ("cpu", 2, 1), ("cpu", 0, 0), ("cuda", 2, 0), ("old", 2, 0), ("strange", 2, 0),
])  # fmt: skip
def test_gpus_need_images_for_gpus(registry, pipeline, tag, gpus, problems):
    address, kind = registry
    image = f"{address}/team/lathe-train:{tag}"
    executors = pipeline.component_spec.implementation.graph.deployment_spec["executors"]
    executors["exec-pretrain"]["container"]["image"] = image
    found = list(run_checks(image_checks(pipeline, Pool(gpus=gpus)), is_preflight=True))
    broken = [one for one in found if one.state == "broken"]
    (own,) = (one for one in found if one.check == f"image {image}")
    if kind == "closed":
        assert not broken and own.said.startswith("not checked: ")
        return
    assert [one.said for one in broken] == problems * [
        f"image {image} is CPU-only, but GPUS=2 requests GPUs"
    ]
    if problems:
        assert f"make push REGISTRY={address}/team FLAVOUR=cuda" in broken[0].hint
    assert (own.state == "warning") == (tag == "strange")
