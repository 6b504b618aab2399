"""The bill of materials of an environment or a container image, from its lock file: CycloneDX 1.6.

A lock file has the form of pip's requirements, as uv compiles it: `name==version`, the SHA-256 of
every distribution file that may be installed, and comments that name the packages that depend on
it.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from cyclonedx.model.component import Component, ComponentType
from packageurl import PackageURL

from lathe.report.cards.documents import new_bom, properties, sha256_hash, to_text, to_values
from lathe_base import __version__
from lathe_base.errors import Code, UserError
from lathe_base.inputs import read_text
from lathe_base.storage import sha256

HINT = "give a lock file with hashes, such as images/train/requirements.lock"
ENVIRONMENT_SBOM = "sbom.cdx.json"
ROOT = "environment"

_PINNED = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[\w,.-]*\])?===?([^\s;\\]+)(?:\s*;[^\\]*)?\s*\\?")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\s*\\?")
_WANTED = re.compile(r"#(?: via)? +(\S.*)")
_IMAGE = re.compile(r"(?P<name>[^@\s]+?)(?P<tag>:[\w.-]+)?@sha256:(?P<digest>[0-9a-f]{64})")


@dataclass
class Pinned:
    """A package of a lock file.

    Attributes:
        hashes: SHA-256 of each of its distribution files.
        wanted_by: packages that depend on it, according to the comments.
    """

    name: str
    version: str
    hashes: list[str] = field(default_factory=list)
    wanted_by: list[str] = field(default_factory=list)

    @property
    def component(self) -> Component:
        """The package by its URL; its hashes are those of all its distribution files."""
        purl = PackageURL("pypi", None, self.name, self.version)
        return Component(
            name=self.name,
            version=self.version,
            type=ComponentType.LIBRARY,
            purl=purl,
            bom_ref=purl.to_string(),
            hashes=[sha256_hash(value) for value in self.hashes],
        )


def read_lock(path: Path) -> list[Pinned]:
    """The packages of a lock file.

    Raises:
        UserError: no such file, a line that pins nothing, or a package without a hash.
    """
    pins: list[Pinned] = []
    for number, text in enumerate(read_text(path, HINT).splitlines(), 1):
        line = text.strip()
        if line in ("", "# via"):
            continue
        if match := _PINNED.fullmatch(line):
            pins.append(Pinned(match[1], match[2]))
        elif (match := _HASH.fullmatch(line)) and pins:
            pins[-1].hashes.append(match[1])
        elif match := _WANTED.fullmatch(line):
            if pins:
                pins[-1].wanted_by.append(match[1])
        elif not line.startswith("#"):
            raise UserError(
                f"{path}:{number}: does not pin a package: {line[:80]}", HINT, Code.MALFORMED
            )
    if not pins:
        raise UserError(f"{path}: does not pin any package", HINT, Code.MALFORMED)
    for package in pins:
        if not package.hashes:
            raise UserError(f"{path}: {package.name} has no --hash=sha256", HINT, Code.INCOMPLETE)
    return pins


def environment_sbom(
    lock: Path,
    name: str,
    image: str | None = None,
    timestamp: datetime | None = None,
    base: str | None = None,
) -> str:
    """The JSON text of the bill of materials; the same lock file gives the same text.

    Args:
        name: that of the environment.
        image: reference of the container image by digest, if it is one.
        base: reference of its base image by tag, a separate component.
        timestamp: time of the document; None omits it.

    Raises:
        UserError: as `read_lock`, an image without a digest, or a base without a tag.
    """
    packages = read_lock(lock)
    root = _image(image) if image else Component(name=name, version=__version__)
    root.type = ComponentType.CONTAINER if image else ComponentType.APPLICATION
    root.bom_ref.value = ROOT
    for entry in properties({"lock:sha256": sha256(lock)}):
        root.properties.add(entry)
    bom = new_bom(root, timestamp)
    components = {package.name: package.component for package in packages}
    for component in components.values():
        bom.components.add(component)
    if base:
        bom.components.add(_base(base))
    wants: dict[str | None, list[Component]] = {}
    for package in packages:
        # What is not in the file itself is a project or another list: the environment wants it.
        for by in package.wanted_by or [ROOT]:
            wants.setdefault(by if by in components else None, []).append(components[package.name])
    bom.register_dependency(root, wants.get(None, []))
    for by, component in components.items():
        bom.register_dependency(component, wants.get(by, []))
    return to_text(to_values(bom, timestamp))


def _image(reference: str) -> Component:
    match = _IMAGE.fullmatch(reference)
    if match is None:
        raise UserError(
            f"{reference}: not an image reference with a digest",
            "give NAME@sha256:DIGEST, as images/refs.json lists it after `make push`",
            Code.INVALID_VALUE,
        )
    image, tag = match["name"], match["tag"]
    short = image.rpartition("/")[2]
    qualifiers = {"repository_url": image} | ({"tag": tag[1:]} if tag else {})
    return Component(
        name=image,
        version=f"sha256:{match['digest']}",
        purl=PackageURL("oci", None, short, f"sha256:{match['digest']}", qualifiers),
        hashes=[sha256_hash(match["digest"])],
    )


def _base(reference: str) -> Component:
    image, _, tag = reference.rpartition(":")
    host, _, path = image.partition("/")
    namespace, _, short = path.rpartition("/")
    if not short or "/" in tag:
        what = f"{reference}: not an image reference with a tag"
        raise UserError(
            what,
            "give HOST/NAME:TAG, such as nvcr.io/nvidia/tritonserver:26.07-py3",
            Code.INVALID_VALUE,
        )
    purl = PackageURL("docker", namespace or None, short, tag, {"repository_url": host})
    return Component(
        name=image,
        version=tag,
        type=ComponentType.CONTAINER,
        purl=purl,
        bom_ref=purl.to_string(),
    )
