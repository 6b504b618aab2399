"""Queries a registry for a container image and its labels, with the common registry API."""

import re
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import urllib3

from lathe_base.errors import Code, StageError
from lathe_base.storage.network import pool

MANIFESTS = ", ".join(
    [
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    ]
)
SECONDS = 10.0
DOCKER_HUB = "registry-1.docker.io"
ALIASES = ("docker.io", "index.docker.io")
"""Aliases of Docker Hub in image names, at which no registry answers."""
PARAMETER = r'(\w+)\s*=\s*(?:"([^"]*)"|([^\s,"]+))'
BEARER = re.compile(rf"(?:^|[\s,])bearer\s+((?:{PARAMETER}[\s,]*)+)", re.IGNORECASE)
"""Parameters of a WWW-Authenticate header, which may list several schemes."""


@dataclass(frozen=True)
class Reference:
    """`registry/repository:tag` or `registry/repository@sha256:...`, parsed."""

    registry: str
    repository: str
    tag: str

    @property
    def url(self) -> str:
        """URL of the repository."""
        host = self.registry.partition(":")[0]
        scheme = "http" if host in ("localhost", "127.0.0.1") else "https"
        return f"{scheme}://{self.registry}/v2/{self.repository}"


def parse(image: str) -> Reference:
    """Parse an image name like a container engine: `python` is on Docker Hub."""
    name, _, digest = image.partition("@")
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry, path = first, rest
    else:
        registry, path = DOCKER_HUB, name
    if registry in (DOCKER_HUB, *ALIASES):
        registry, path = DOCKER_HUB, path if "/" in path else f"library/{path}"
    # With both a tag and a digest, the digest counts.
    path, _, tag = path.partition(":")
    return Reference(registry, path, digest or tag or "latest")


def check_image(image: str) -> None:
    """Ask the registry for the image's manifest, anonymously.

    Raises:
        StageError: it does not return one; the message has the reason.
    """
    reference = parse(image)
    if reference.registry == "localhost":
        raise StageError(
            "a local image name: the nodes must already have the image", Code.NOT_FOUND
        )
    _ask(image, f"manifests/{reference.tag}", "HEAD")


def image_labels(image: str) -> dict[str, str]:
    """The labels of an image in the registry; for a multi-platform image those of amd64, or else
    arm64.

    Raises:
        StageError: as `check_image`.
    """
    reference = parse(image)
    manifest = _read(image, f"manifests/{reference.tag}")
    # An index of platforms, then the platform's manifest, then its configuration.
    try:
        if "manifests" in manifest:
            digests = {
                part.get("platform", {}).get("architecture"): part["digest"]
                for part in manifest["manifests"]
            }
            known = [digests[name] for name in ("amd64", "arm64") if name in digests]
            manifest = _read(image, f"manifests/{known[0]}")
        config = _read(image, f"blobs/{manifest['config']['digest']}")
        return dict(config["config"].get("Labels") or {})
    except (KeyError, IndexError, TypeError, AttributeError):
        raise StageError(
            f"{reference.registry} does not return the image's configuration", Code.SERVER_ERROR
        ) from None


def _read(image: str, path: str) -> Any:
    try:
        return _ask(image, path).json()
    except ValueError:
        raise StageError(
            f"{parse(image).registry} answers, but not with JSON", Code.SERVER_ERROR
        ) from None


def _ask(image: str, path: str, method: str = "GET") -> urllib3.BaseHTTPResponse:
    """The response to a request below the repository's address; follows a redirect."""
    reference = parse(image)
    url, headers = f"{reference.url}/{path}", {"Accept": MANIFESTS}
    try:
        response = _request(method, url, headers)
        if response.status == 401:
            # Most registries want a token even of anonymous clients.
            token = _token(response.headers.get("WWW-Authenticate", ""))
            headers["Authorization"] = f"Bearer {token}"
            response = _request(method, url, headers)
    except (urllib3.exceptions.HTTPError, ssl.SSLError) as error:
        raise StageError(
            f"{reference.registry} cannot be reached from here: {error}", Code.UNREACHABLE
        ) from None
    if response.status == 404:  # which is also what some say of a private image
        raise StageError(
            f"{reference.registry} does not have it, or requires authentication: make images && "
            f"make push REGISTRY={image.rpartition('/')[0]}",
            Code.NOT_FOUND,
        )
    if response.status in (401, 403):
        raise StageError(f"{reference.registry} requires authentication", Code.UNAUTHORIZED)
    if response.status != 200:
        raise StageError(f"{reference.registry} answers {response.status}", Code.SERVER_ERROR)
    return response


def _request(
    method: str, url: str, headers: dict[str, str] | None = None
) -> urllib3.BaseHTTPResponse:
    # Blobs are often redirected to a store; nothing else is repeated, this is only a check.
    redirected = urllib3.Retry(total=3, connect=False, read=False, status=False, other=False)
    http = pool(1, SECONDS, address=url)
    return http.request(method, url, headers=headers, retries=redirected)


def _token(challenge: str) -> str:
    """An anonymous token for what `WWW-Authenticate: Bearer realm="...",service="..."` names."""
    challenge_match = BEARER.search(challenge)
    fields = {
        key.lower(): a or b
        for key, a, b in re.findall(PARAMETER, challenge_match[1] if challenge_match else "")
    }
    if "realm" not in fields:
        return ""
    query = urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
    response = _request("GET", f"{fields['realm']}?{query}")
    try:
        answer = response.json()
    except ValueError:
        return ""
    return str(answer.get("token") or answer.get("access_token") or "")
