"""Addresses instead of paths on the command line.

Stages work on local folders. An input address is fetched before the stage begins, into a cache
folder that only depends on the address. An output address is also a folder there, which is uploaded
when the stage has succeeded. Workers run the same command and use what their parent fetched.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from lathe_base.errors import Code, UserError, printable

# Importing the store's client takes an eighth of a second, so only addresses import it.
if TYPE_CHECKING:
    from lathe_base.artifacts.mirror import Mirror


def input_path(text: str | Path) -> Path:
    """The local path of an input: a path as it is, or the location of a downloaded address
    (`http(s)://`, `s3://`, `minio://`, `file://`; an object, or a prefix as a folder).

    Raises:
        UserError: see `lathe_base.storage.fetch`.
    """
    uri = _not_empty(text)
    if not _is_address(uri):
        return _with_name(Path(text))
    path = _cache_path(uri)
    if "RANK" not in os.environ:  # a worker uses what its parent has fetched
        download(uri, path)
    return path


def download(uri: str, path: Path) -> None:
    """Fetch an object to the file `path`, or the objects below a prefix to the folder `path`."""
    from lathe_base.storage import exists, fetch

    # An address without a final slash may be an object or a prefix; web servers have no prefixes.
    prefix = uri.rstrip("/") + "/"
    is_in_store = not uri.lower().startswith(("http:", "https:"))
    if uri.endswith("/") or (is_in_store and exists(prefix)):
        fetch(prefix, path)
    else:
        fetch(uri, path.parent)


def output_path(text: str | Path) -> tuple[Path, "Mirror | None"]:
    """The local folder or file to write for an output, and the mirror to `finish` after the stage
    has succeeded: None for a path, and in a worker.

    States that an earlier attempt saved at the address are restored, so that training resumes from
    them.

    Raises:
        UserError: Lathe may not replace what is at the address; see `lathe_base.storage.fetch`.
    """
    uri = _not_empty(text)
    if not _is_address(uri):
        return _with_name(Path(text)), None
    path = _cache_path(uri)
    if "RANK" in os.environ:
        return path, None
    from lathe_base.artifacts.mirror import Mirror
    from lathe_base.storage import claim_address

    claim_address(uri)  # before the stage, which may take days
    path.parent.mkdir(parents=True, exist_ok=True)
    mirror = Mirror.make(path, uri)
    mirror.restore()
    return path, mirror


def is_first_node() -> bool:
    """Whether this is the first node, the only one that uploads outputs (PET_NODE_RANK 0)."""
    return os.environ.get("PET_NODE_RANK", "0") == "0"


def _is_address(text: str) -> bool:
    if "://" not in text:
        return False
    from lathe_base.storage import is_remote

    return is_remote(text)


def _not_empty(text: str | Path) -> str:
    if not str(text):
        raise UserError(
            "an empty path",
            "give a file, a folder or an address; the working directory is `.`",
            Code.BAD_PATH,
        )
    return str(text)


def _with_name(path: Path) -> Path:
    """Resolve `.` and `..` to a path with a name, so that outputs can be put beside it."""
    return path.resolve() if path.name in ("", "..") else path


def _cache_path(uri: str) -> Path:
    from lathe_base.storage import digest
    from lathe_base.storage.files import cache_folder

    cache = cache_folder()
    if cache is None:
        raise UserError(
            "no home directory to download to",
            "set HOME or XDG_CACHE_HOME to a folder",
            Code.MISSING_OPTION,
        )
    if not uri.isprintable():
        raise UserError(
            f"{printable(uri)}: not an address", "write http://host:port/path", Code.BAD_PATH
        )
    # The last name of the address stays, because file types are recognized by it; the query of a
    # signed address is no part of it. The digest keeps equal names of different addresses apart.
    path = re.split("[?#]", uri)[0].partition("://")[2].partition("/")[2]
    name = PurePosixPath(path).name or "download"
    return cache / digest(uri.rstrip("/"))[:16] / name
