"""The files of a folder that are data, without hidden ones; tables of data lakes and files whose
compression is not read are refused."""

import logging
import os
from collections.abc import Container, Iterable
from pathlib import Path, PurePosixPath
from typing import NoReturn

from lathe.data.splits import named_files
from lathe.data.text_lines import COMPRESSED, file_kind
from lathe_base.errors import Code, UserError, explain_os_error

log = logging.getLogger("lathe")

UNREADABLE = {".lz4", ".lzo", ".br", ".sz", ".snappy", ".lzma", ".z"}
ARCHIVES = {".zip", ".7z", ".rar"}
HUDI = ".hoodie"


def names_below(folder: Path) -> list[str]:
    """The relative names of all files; those in hidden folders are left out, but for Hudi's, which
    tells what the folder is."""
    names_below: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") or name == HUDI]
        names_below += [Path(parent, name).relative_to(folder).as_posix() for name in names]
        for link in (p for p in (Path(parent, name) for name in folders) if p.is_symlink()):
            log.warning("skipping %s: a link to a folder", link)
    return names_below


def data_files(names: Iterable[str], where: str, endings: Container[str]) -> list[str]:
    """The names of files with data, sorted.

    Args:
        endings: of files that are read, without that of the compression.

    Raises:
        UserError: the folder is a table of a data lake, whose files may be outdated, or a file's
            compression cannot be read.
    """
    paths = sorted(map(PurePosixPath, names))
    for path in paths:
        require_no_lake(path, where)
    seen = [path for path in paths if not any(map(_is_hidden, path.parts))]
    for path in seen:
        require_readable(path, f"{where.rstrip('/')}/{path}", endings)
    hidden = [
        str(path)
        for path in paths
        if any(map(_is_hidden, path.parts)) and file_kind(path) in endings
        if not any(part.startswith(".") for part in path.parts[:-1])
    ]
    if hidden:
        log.warning(
            "%s: left out, because names begin with _ or a dot: %s", where, named_files(hidden)
        )
    data = [str(path) for path in seen if file_kind(path) in endings]
    if len(data) < len(seen):
        log.warning("%s: %d files with other endings ignored", where, len(seen) - len(data))
    return data


def require_readable(path: PurePosixPath, where: str, endings: Container[str]) -> None:
    """Raise UserError, which names `where`, if a file is compressed in a way that is not read."""
    ending = path.suffix.lower()
    if ending in UNREADABLE or (
        ending in ARCHIVES and file_kind(PurePosixPath(path.stem)) in endings
    ):
        raise UserError(
            f"{where}: compressed as {ending}, which cannot be read",
            f"decompress it, or compress it as {', '.join(sorted(COMPRESSED))}",
            Code.UNSUPPORTED,
        )


def require_no_lake(path: PurePosixPath, where: str) -> None:
    """Raise UserError if a file shows that its folder is a table whose log says which of its files
    are current."""
    if "_delta_log" in path.parts:
        kind = "Delta"
    elif path.parent.name == "metadata" and path.name.endswith(".metadata.json"):
        kind = "Iceberg"
    elif HUDI in path.parts:
        kind = "Hudi"
    else:
        return
    raise UserError(
        f"{where}: a table of {kind}, because of {path}; its files may hold deleted rows",
        "write its current rows to Parquet files, and give those, for instance with Spark: "
        f'spark.read.format("{kind.lower()}").load(TABLE).write.parquet(FOLDER)',
        Code.UNSUPPORTED,
    )


def _is_hidden(name: str) -> bool:
    """As Spark and Hive decide: `_day=1` is the folder of a partition."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _raise(error: OSError) -> NoReturn:
    raise explain_os_error(error)
