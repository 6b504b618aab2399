"""Resolve `newest:PLACE` to the newest corpus at that place."""

import logging
from pathlib import Path

from lathe_base.errors import Code, UserError, explain_os_error
from lathe_base.storage import exists, is_remote, list_uris
from lathe_base.storage.objects import MARKER
from lathe_base.storage.splits import locate

log = logging.getLogger("lathe")

NEWEST = "newest:"


def resolve(source: str) -> str:
    """The newest corpus at `newest:s3://bucket/prefix/` or `newest:FOLDER`; another source is
    returned unchanged.

    It is the most recently changed object or file, or prefix or folder, directly below. A prefix
    counts only if it is complete, that is, has the manifest that `python -m lathe_base.storage put`
    uploads last. Names that begin with a dot are ignored. A split, as in `newest:FOLDER::test`, is
    that of the corpus.

    Raises:
        UserError: nothing is there, or the store does not answer.
    """
    if not source.startswith(NEWEST):
        return source
    location, suffix = locate(source.removeprefix(NEWEST))
    if not location:
        raise UserError(
            f"{source}: needs a location after the colon",
            "write newest:FOLDER or newest:s3://...",
            Code.INVALID_VALUE,
        )
    newest = _newest_below(location) if is_remote(location) else _newest_in(Path(location))
    if newest is None:
        raise UserError(
            f"{source}: no complete corpus there",
            "put a file there, or a folder with `python -m lathe_base.storage put FOLDER "
            f"{location.rstrip('/')}/NAME/`",
            Code.NOT_FOUND,
        )
    log.info("%s is %s", source, newest + suffix)
    return newest + suffix


def _newest_below(prefix: str) -> str | None:
    for uri in reversed(list_uris(prefix)):
        if uri.rstrip("/").rpartition("/")[2].startswith("."):
            continue
        if not uri.endswith("/") or exists(uri + MARKER):
            return uri
        log.warning("skipping %s: without %s it may be incompletely uploaded", uri, MARKER)
    return None


def _newest_in(folder: Path) -> str | None:
    if not folder.is_dir():
        raise UserError(f"{NEWEST}{folder}: no such folder", "check the path", Code.NOT_FOUND)
    try:
        children = [path for path in folder.iterdir() if not path.name.startswith(".")]
        times = {path: time for path in children if (time := _changed(path))}
    except OSError as error:
        raise explain_os_error(error, folder) from error
    return str(max(times, key=lambda path: (times[path], path.name))) if times else None


def _changed(path: Path) -> int:
    """Modification time in ns of a file, or of the newest file in a folder; 0 if there is none."""
    files = [path] if path.is_file() else (p for p in path.rglob("*") if p.is_file())
    return max((p.stat().st_mtime_ns for p in files), default=0)
