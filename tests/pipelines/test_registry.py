"""Images and where they are kept, asked as a container engine asks."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from lathe.errors import StageError, UserError
from pipelines.compile import build
from pipelines.preflight import Preflight
from pipelines.registry import Reference, check_image, parse

DIGEST = "sha256:" + "a" * 64
HELD = {"team/lathe-train": {"1.0", DIGEST}}


@pytest.fixture(params=["open", "bearer", "closed"])
def registry(request):
    """A registry's address, and whether one must fetch a token, or sign in, to read of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            host = self.headers["Host"]
            name, _, tag = self.path.removeprefix("/v2/").partition("/manifests/")
            assert "application/vnd.oci.image.index.v1+json" in self.headers["Accept"]
            if request.param != "open" and self.headers["Authorization"] != "Bearer anonymous":
                challenge = (
                    f'Bearer realm="http://{host}/token",service="here",'
                    f'scope="repository:{name}:pull"'
                )
                self._answer(401, {"WWW-Authenticate": challenge})
            else:
                self._answer(200 if tag in HELD.get(name, ()) else 404)

        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            assert query["service"] == ["here"] and query["scope"][0].endswith(":pull")
            if request.param == "closed":
                self._answer(401)
            else:
                self._answer(200, body=b'{"token": "anonymous"}')

        def _answer(self, status: int, headers: dict[str, str] | None = None, body=b"{}") -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", request.param
        server.shutdown()


@pytest.mark.parametrize("name", ["team/lathe-train:1.0", f"team/lathe-train:1.0@{DIGEST}"])
def test_an_image_that_is_there(registry, name):
    address, kind = registry
    if kind == "closed":
        with pytest.raises(StageError, match="only to who has signed in"):
            check_image(f"{address}/{name}")
    else:
        check_image(f"{address}/{name}")


def test_one_that_is_not_says_how_to_push_it(registry):
    address, kind = registry
    if kind == "closed":
        pytest.skip("who has not signed in is not told")
    with pytest.raises(UserError, match=f"does not have it\n.*make push REGISTRY={address}/team$"):
        check_image(f"{address}/team/lathe-train:2.0")


@pytest.mark.parametrize("image", ["127.0.0.1:9/lathe-train:1", "localhost/lathe-train:1"])
def test_what_cannot_be_asked(image):
    with pytest.raises(StageError, match=r"cannot be reached|this machine's own"):
        check_image(image)


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ("python", ("registry-1.docker.io", "library/python", "latest")),
        ("team/gpt:2", ("registry-1.docker.io", "team/gpt", "2")),
        ("ghcr.io/team/gpt", ("ghcr.io", "team/gpt", "latest")),
        (f"host:5000/gpt:1@{DIGEST}", ("host:5000", "gpt", DIGEST)),
    ],
)
def test_names(image, reference):
    assert parse(image) == Reference(*reference)


def test_a_pipelines_missing_images_are_a_problem_and_others_only_told(registry):
    address, kind = registry
    pipeline = build("pretrain")
    executors = pipeline.component_spec.implementation.graph.deployment_spec["executors"]
    executors["exec-prepare"]["container"]["image"] = f"{address}/team/lathe-train:2.0"
    executors["exec-pretrain"]["container"]["image"] = f"{address}/team/lathe-train:1.0"
    preflight = Preflight()
    preflight.images(pipeline)
    assert len(preflight.problems) == (kind != "closed")
    unchecked = "\n".join(preflight.unchecked)
    assert "localhost/lathe-train:0.1.0: not checked: a name of this machine's own" in unchecked
    assert unchecked.count("signed in") == 2 * (kind == "closed")
