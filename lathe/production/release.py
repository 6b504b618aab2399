"""The releases of a model in the object store, and the pointer to the one in production.

    RELEASES/MODEL/sha256-DIGEST/              a Triton model repository; never changed once whole
    RELEASES/MODEL/sha256-DIGEST.golden.json   what it must answer, and how good it is
    RELEASES/MODEL/production.json             the release that is live, and those before it

In the repository `find * -type f | LC_ALL=C sort | xargs sha256sum | sha256sum` gives DIGEST.
"""

import logging
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lathe.config.settings import Recipe
from lathe.errors import StageError, UserError
from lathe.production.golden import Golden
from lathe.storage import (
    digest,
    exists,
    fetch,
    is_store,
    list_uris,
    read_text,
    replace_text,
    sha256,
    upload,
    write_text,
)

log = logging.getLogger("lathe")

NAME = re.compile(r"sha256-[0-9a-f]{64}")
POINTER = "production.json"
SHORT = len("sha256-") + 12


class Placed(BaseModel):
    """A release, and when it went live."""

    model_config = ConfigDict(extra="forbid")

    release: str
    since: datetime


class Pointer(BaseModel):
    """`production.json`; the newest of those before comes first."""

    model_config = ConfigDict(extra="forbid")

    live: Placed | None = None
    previous: tuple[Placed, ...] = ()

    def moved_to(self, release: str, now: datetime) -> "Pointer":
        """With `release` live; itself where it is."""
        if self.live is None:
            return Pointer(live=Placed(release=release, since=now))
        if self.live.release == release:
            return self
        return Pointer(
            live=Placed(release=release, since=now), previous=(self.live, *self.previous)
        )


@dataclass(frozen=True)
class Releases:
    """The releases of one model; `root` is their address, without a final slash."""

    root: str

    def address(self, release: str) -> str:
        """Of a release's repository, as the Deployment's pods fetch it."""
        return f"{self.root}/{release}/"

    def publish(self, repository: Path, golden: Golden) -> str:
        """Upload a repository under the name of its bytes, if it is not there; its name.

        A release that is there is never written to, whatever its bytes have become.

        Raises:
            UserError: the store cannot be written to.
        """
        release = name_of(repository)
        if not exists(self._golden(release)):
            write_text(self._golden(release), golden.model_dump_json(indent=1) + "\n")
        if exists(self.address(release)):
            log.info("%s is published already", self.address(release))
        else:
            upload(repository, self.address(release))
            log.info("published %s", self.address(release))
        return release

    def fetch(self, release: str, folder: Path) -> Path:
        """The repository of a release in `folder`, proven to be the bytes that it is named for.

        Raises:
            UserError: it is not there, or the store does not answer.
            StageError: its bytes have changed.
        """
        repository = fetch(self.address(release), folder)
        if (found := name_of(repository)) != release:
            raise StageError(
                f"{self.address(release)} holds other bytes than it is named for ({found[:SHORT]}):"
                " remove it, and publish it again"
            )
        return repository

    def golden(self, release: str) -> Golden:
        """Raises UserError where there is none, or it is broken."""
        return Golden.parse(read_text(self._golden(release)), self._golden(release))

    def pointer(self) -> Pointer:
        """What is in production; empty before the first deployment.

        Raises:
            UserError: the store does not answer, or the pointer is broken.
        """
        return self._parse(self._pointer_text())

    def point(self, pointer: Pointer, seen: Pointer) -> None:
        """Put the pointer in place of the one that was `seen`.

        Raises:
            UserError: another process has moved it since; and as `pointer`.
        """
        text = self._pointer_text()
        if self._parse(text) != seen:
            raise UserError(
                f"{self.root}/{POINTER}: another process has moved it meanwhile",
                "see `lathe release list`, and run it again",
            )
        replace_text(f"{self.root}/{POINTER}", pointer.model_dump_json(indent=1) + "\n", text)

    def _pointer_text(self) -> str | None:
        uri = f"{self.root}/{POINTER}"
        return read_text(uri) if exists(uri) else None

    def _parse(self, text: str | None) -> Pointer:
        try:
            return Pointer.model_validate_json(text) if text is not None else Pointer()
        except ValidationError as error:
            raise UserError(
                f"{self.root}/{POINTER}: broken: {error.errors()[0]['msg']}",
                "write it anew with `lathe deploy`",
            ) from error

    def published(self) -> list[str]:
        """Names of the whole releases, the newest first."""
        names = [uri.rstrip("/").rpartition("/")[2] for uri in list_uris(f"{self.root}/")]
        return [name for name in reversed(names) if NAME.fullmatch(name)]

    def find(self, digest: str) -> str:
        """The name of the published release that `digest`, or the beginning of one, means.

        Raises:
            UserError: none does, or several do.
        """
        wanted = "sha256-" + digest.removeprefix("sha256-")
        found = [name for name in self.published() if name.startswith(wanted)]
        if len(found) == 1:
            return found[0]
        what = f"means {len(found)} releases" if found else "means no release that is there"
        raise UserError(
            f"{digest}: {what} in {self.root}", "take one that `lathe release list` lists"
        )

    def _golden(self, release: str) -> str:
        return f"{self.root}/{release}.golden.json"


def releases_of(recipe: Recipe) -> Releases:
    """The releases of `Serving.model_name` in `Production.releases`.

    Raises:
        UserError: the recipe names no address in an object store.
    """
    root = recipe.Production.releases
    if not root or not is_store(root):
        raise UserError(
            f"Production.releases is {root or 'not set'}: not an address in an object store",
            "set -o Production.releases=s3://bucket/prefix, or file:///folder",
        )
    return Releases(f"{root.rstrip('/')}/{recipe.Serving.model_name}")


def name_of(repository: Path) -> str:
    """`sha256-` and the digest of a folder's names and bytes; files whose own name begins with a
    dot are the store's."""
    files = (p for p in repository.rglob("*") if p.is_file() and not p.name.startswith("."))
    names = sorted(p.relative_to(repository).as_posix() for p in files)
    return "sha256-" + digest("".join(f"{sha256(repository / n)}  {n}\n" for n in names))
