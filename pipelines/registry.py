"""Check that a container image exists, with the registries' common HTTP API."""

import re
import ssl
from dataclasses import dataclass
from urllib.parse import urlencode

import urllib3

from lathe.errors import StageError, UserError

MANIFESTS = ", ".join(
    [
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    ]
)
DOCKER_HUB = "registry-1.docker.io"


@dataclass(frozen=True)
class Reference:
    """`registry/repository:tag` or `registry/repository@sha256:...`, taken apart."""

    registry: str
    repository: str
    tag: str

    @property
    def url(self) -> str:
        host = self.registry.partition(":")[0]
        scheme = "http" if host in ("localhost", "127.0.0.1") else "https"
        return f"{scheme}://{self.registry}/v2/{self.repository}/manifests/{self.tag}"


def parse(image: str) -> Reference:
    """Take an image's name apart as a container engine does: `python` is on Docker Hub."""
    name, _, digest = image.partition("@")
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry, path = first, rest
    else:
        registry, path = DOCKER_HUB, name if slash else f"library/{name}"
    path, _, tag = path.partition(":")
    return Reference(registry, path, digest or tag or "latest")


def check_image(image: str) -> None:
    """Ask the registry for the image's manifest, anonymously.

    Raises:
        UserError: the registry has no such image.
        StageError: it could not be asked; the message says why.
    """
    reference = parse(image)
    if reference.registry == "localhost":
        raise StageError("a name of this machine's own: the nodes must have been given the image")
    http = urllib3.PoolManager(timeout=10, retries=False)
    try:
        response = http.request("HEAD", reference.url, headers={"Accept": MANIFESTS})
        if response.status == 401:
            token = _token(http, response.headers.get("WWW-Authenticate", ""))
            headers = {"Accept": MANIFESTS, "Authorization": f"Bearer {token}"}
            response = http.request("HEAD", reference.url, headers=headers)
    except (urllib3.exceptions.HTTPError, ssl.SSLError) as error:
        raise StageError(f"{reference.registry} cannot be reached from here: {error}") from None
    if response.status == 404:
        raise UserError(
            f"image {image}: {reference.registry} does not have it",
            f"make images && make push REGISTRY={image.rpartition('/')[0]}",
        )
    if response.status in (401, 403):
        raise StageError(f"{reference.registry} tells it only to who has signed in")
    if response.status != 200:
        raise StageError(f"{reference.registry} answers {response.status}")


def _token(http: urllib3.PoolManager, challenge: str) -> str:
    """An anonymous token for what `WWW-Authenticate: Bearer realm="...",service="..."` names."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    if not challenge.startswith("Bearer ") or "realm" not in fields:
        return ""
    query = urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
    response = http.request("GET", f"{fields['realm']}?{query}")
    try:
        answer = response.json()
    except ValueError:
        return ""
    return str(answer.get("token") or answer.get("access_token") or "")
