"""Addresses in place of paths on the command line.

Stages know folders. An input's address is fetched before the stage begins, into a folder that
depends on the address alone; an output's is a folder there too, uploaded when the stage has
succeeded. Workers are given the same command and find what their parent fetched.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from lathe.errors import UserError, printable

# The store's client is an eighth of a second: only who gives an address waits for it.
if TYPE_CHECKING:
    from lathe.artifacts.mirror import Mirror


def input_path(text: str | Path) -> Path:
    """Where an input is on this machine: a path as it is, an address (`http(s)://`, `s3://`,
    `minio://`, `file://`; an object, or a prefix as a folder) fetched.

    Raises:
        UserError: see `lathe.storage.fetch`.
    """
    uri = _not_empty(text)
    if not _is_address(uri):
        return _with_name(Path(text))
    place = _place(uri)
    if not _is_worker():
        bring(uri, place)
    return place


def bring(uri: str, place: Path) -> None:
    """Fetch an object to the file `place`, or what is below a prefix to the folder."""
    from lathe.storage import exists, fetch

    prefix = uri.rstrip("/") + "/"
    is_s3 = not uri.lower().startswith(("http:", "https:"))
    if uri.endswith("/") or (is_s3 and exists(prefix)):
        fetch(prefix, place)
    else:
        fetch(uri, place.parent)


def output_path(text: str | Path) -> tuple[Path, "Mirror | None"]:
    """The folder or file to write for an output, and the mirror to `finish` when the stage has
    succeeded: None for a path, and in a worker.

    An address that a training stage of an earlier attempt wrote to goes on from there.

    Raises:
        UserError: the address holds what is not Lathe's to replace; see `lathe.storage.fetch`.
    """
    uri = _not_empty(text)
    if not _is_address(uri):
        return _with_name(Path(text)), None
    place = _place(uri)
    if _is_worker():
        return place, None
    from lathe.artifacts.mirror import Mirror
    from lathe.storage import claim_address

    claim_address(uri)
    place.parent.mkdir(parents=True, exist_ok=True)
    mirror = Mirror.make(place, uri)
    mirror.restore()
    return place, mirror


def is_first_node() -> bool:
    """Whether this machine is the one of several that uploads what they have made."""
    return os.environ.get("PET_NODE_RANK", "0") == "0"


def _is_address(text: str) -> bool:
    if "://" not in text:
        return False
    from lathe.storage import is_remote

    return is_remote(text)


def _not_empty(text: str | Path) -> str:
    if not str(text):
        raise UserError("an empty path", "name a file, a folder or an address; this folder is `.`")
    return str(text)


def _with_name(path: Path) -> Path:
    """`.` and `..` as the folder that they mean, beside which there may be others."""
    return path.resolve() if path.name in ("", "..") else path


def _is_worker() -> bool:
    return "RANK" in os.environ


def _place(uri: str) -> Path:
    from lathe.storage import digest
    from lathe.storage.verified import cache_folder

    cache = cache_folder()
    if cache is None:
        raise UserError("no home directory to fetch to", "set HOME or XDG_CACHE_HOME to a folder")
    if not uri.isprintable():
        raise UserError(f"{printable(uri)}: not an address", "write http://host:port/path")
    path = re.split("[?#]", uri)[0].partition("://")[2].partition("/")[2]
    name = PurePosixPath(path).name or "download"
    return cache / digest(uri.rstrip("/"))[:16] / name
