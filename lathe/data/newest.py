"""`newest:PLACE` in place of a corpus: the newest one that lies there."""

import logging
from pathlib import Path

from lathe.errors import UserError, explain_os_error
from lathe.storage import exists, is_remote, list_uris

log = logging.getLogger("lathe")

NEWEST = "newest:"
MARKER = ".lathe.json"


def resolve(source: str) -> str:
    """The corpus that `newest:s3://bucket/prefix/`, or `newest:FOLDER`, means now; any other as it
    is.

    Taken is the object or file, or the prefix or folder, directly below that was changed last. A
    prefix counts only once it is whole: with the marker that `python -m lathe.storage put` puts
    last. Names that begin with a dot do not count.

    Raises:
        UserError: nothing there, or the store does not answer.
    """
    if not source.startswith(NEWEST):
        return source
    place = source.removeprefix(NEWEST)
    if not place:
        raise UserError(f"{source}: of which place?", "write newest:FOLDER or newest:s3://...")
    found = _newest_below(place) if is_remote(place) else _newest_in(Path(place))
    if found is None:
        raise UserError(
            f"{source}: no whole corpus there",
            "put a file there, or a folder with `python -m lathe.storage put FOLDER "
            f"{place.rstrip('/')}/NAME/`",
        )
    log.info("%s is %s", source, found)
    return found


def _newest_below(prefix: str) -> str | None:
    for uri in reversed(list_uris(prefix)):
        if uri.rstrip("/").rpartition("/")[2].startswith("."):
            continue
        if not uri.endswith("/") or exists(uri + MARKER):
            return uri
        log.warning("%s is passed over: without %s it may be half uploaded", uri, MARKER)
    return None


def _newest_in(folder: Path) -> str | None:
    if not folder.is_dir():
        raise UserError(f"{NEWEST}{folder}: no such folder", "check the path")
    try:
        children = [path for path in folder.iterdir() if not path.name.startswith(".")]
        times = {path: time for path in children if (time := _changed(path))}
    except OSError as error:
        raise explain_os_error(error, folder) from error
    return str(max(times, key=lambda path: (times[path], path.name))) if times else None


def _changed(path: Path) -> int:
    """When the file, or the newest file below, was changed: ns; 0 if there is none."""
    files = [path] if path.is_file() else (p for p in path.rglob("*") if p.is_file())
    return max((p.stat().st_mtime_ns for p in files), default=0)
