"""Which files an output may replace: an earlier one of its own kind, provably, and nothing else.

A folder that Lathe wrote has a metadata file, a JSON file that lists every other file in it with
its SHA-256. Such a folder with nothing else in it may be replaced, and so may an empty one.
Everything else is the user's. Stages decide before their work, by `claim_output_folder` and
`claim_output_file`.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lathe.errors import UserError
from lathe.storage.files import files_below, sha256
from lathe.storage.manifest import is_digest, is_relative
from lathe.storage.verified import is_intact

REPLACED = (
    ".lathe.replaced.json"  # the metadata of a folder whose files are being replaced one by one
)
OWNER = ".lathe.owner"  # in a scratch folder: the output that it is for
SHOWN = 3  # names of files in the way
SYSTEM = {"lost+found"}  # in the root of a file system of its own

Source = Path | str | None


@dataclass(frozen=True)
class Kind:
    """A kind of folder.

    Attributes:
        name: as messages call it.
        metadata_file: its JSON file, which lists the others under `files`.
        keys: what every metadata file of the kind has.
    """

    name: str
    metadata_file: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class FileKind:
    """A kind of single file; `is_one` looks into one that is there."""

    name: str
    is_one: Callable[[Path], bool]


def claim_output_folder(output: Path, kind: Kind, *inputs: Source) -> None:
    """Decide, before any work, whether `output` may become a new folder of this kind.

    Args:
        inputs: files and folders that the work reads; addresses do not count.

    Raises:
        UserError: it holds what is not provably an earlier output of the kind; it is an input, or
            lies in one or holds one; it cannot be written.
    """
    require_apart(output, *inputs)
    target = real_path(output)
    if not target.exists():
        require_writable(existing_parent(target), output)
        return
    require_writable(target, output)
    if foreign := not_ours(target, kind):
        raise in_the_way(output, foreign, f"an earlier {kind.name} of Lathe's")


def claim_output_file(output: Path, kind: FileKind, *inputs: Source) -> None:
    """Decide, before any work, whether `output` may become a new file of this kind; raises as
    `claim_output_folder` does."""
    require_apart(output, *inputs)
    target = real_path(output)
    if target.exists() and not (target.is_file() and kind.is_one(target)):
        raise UserError(
            f"{output}: exists, and is not {kind.name} that Lathe wrote",
            "give another name as --output, or move it away",
        )
    require_writable(existing_parent(target), output)


def require_apart(output: Path, *inputs: Source) -> None:
    """Raise UserError where `output` is one of the inputs, lies in one or holds one."""
    target = real_path(output)
    for given in inputs:
        if not given or "://" in str(given):
            continue
        source = real_path(Path(given))
        if source == target or source in target.parents or target in source.parents:
            how = "is" if source == target else "lies in" if source in target.parents else "holds"
            raise UserError(
                f"{output}: {how} the input {given}", "give a folder of its own as --output"
            )


def in_the_way(output: Path, names: list[str], wanted: str) -> UserError:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return UserError(
        f"{output}: holds {', '.join(names[:SHOWN])}{more}: not provably {wanted}",
        "give a new or an empty folder as --output, or move what is there away",
    )


def not_ours(folder: Path, kind: Kind) -> list[str]:
    """What lies in a folder and is not listed, with its digest, by a metadata file of this kind."""
    known, scratch = known_files(folder, kind), scratch_folders(folder, inside=True)
    parents = {str(parent) for name in known for parent in PurePosixPath(name).parents}
    files = [
        (name, path)
        for name, path in files_below(folder)
        if not (name in known and _is_plain(path) and any(is_intact(path, d) for d in known[name]))
    ]
    empty = [(name, path) for name, path in _empty_folders(folder) if name not in SYSTEM | parents]
    return [
        name
        for name, path in (*files, *empty)
        if not any(path.is_relative_to(own) for own in scratch)
    ]


def our_files(folder: Path, kind: Kind) -> set[str]:
    """The names of a folder's files that its metadata files list and that are as they say."""
    return set(known_files(folder, kind)) - set(not_ours(folder, kind))


def known_files(folder: Path, kind: Kind) -> dict[str, set[str]]:
    """The SHA-256 that files of a folder may have by its metadata files, themselves included;
    several where a replacement was broken off."""
    known: dict[str, set[str]] = defaultdict(set)
    for metadata in _metadata_files(folder, kind):
        if listed := listed_files(metadata, kind):
            if metadata.parent == folder:
                known[metadata.name].add(sha256(metadata))
            for name, found in listed.items():
                known[name].add(found)
    for path in filter(_is_plain, bytecode(folder, list(known))):
        known[path.relative_to(folder).as_posix()].add(sha256(path))
    return known


def bytecode(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """What Python has compiled of those of these files that are modules."""
    for module in (folder / name for name in names if name.endswith(".py")):
        yield from (module.parent / "__pycache__").glob(f"{module.stem}.cpython-*.pyc")


def listed_files(metadata: Path, kind: Kind) -> dict[str, str]:
    """SHA-256 by name of the files that a metadata file lists; empty where it is no metadata file
    of the kind."""
    if not _is_plain(metadata):
        return {}
    try:
        values = json.loads(metadata.read_bytes())
        files = {
            name: entry if isinstance(entry, str) else entry["sha256"]
            for name, entry in values["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    is_metadata = values.keys() >= set(kind.keys) and all(map(is_digest, files.values()))
    return files if is_metadata and all(map(is_relative, files)) else {}


def scratch_folders(target: Path, inside: bool) -> list[Path]:
    """Folders that attempts to write `target` work in: in it, or beside it."""
    parent = target if inside else target.parent
    prefix = scratch_prefix(target, inside)
    try:
        found = [path for path in parent.iterdir() if path.name.startswith(prefix)]
        owned = [path for path in found if _is_plain(path / OWNER)]
        return [path for path in owned if (path / OWNER).read_bytes() == os.fsencode(target)]
    except OSError:
        return []


def scratch_prefix(target: Path, inside: bool) -> str:
    return ".lathe-" if inside else f".{target.name[:100]}.lathe-"


def real_path(path: Path) -> Path:
    """What a path means behind symbolic links, whether it is there or not.

    Raises:
        UserError: no path, or links that lead nowhere.
    """
    if "\0" in str(path):
        raise UserError(f"{str(path)!r}: no name of a file", "take the NUL out")
    found = Path(os.path.realpath(path))
    if found.is_symlink():
        raise UserError(f"{path}: symbolic links in a circle", "remove one of them")
    return found


def _metadata_files(folder: Path, kind: Kind) -> Iterator[Path]:
    yield folder / kind.metadata_file
    yield folder / REPLACED
    for scratch in scratch_folders(folder, inside=True):
        yield scratch / "new" / kind.metadata_file


def _empty_folders(folder: Path) -> Iterator[tuple[str, Path]]:
    for parent, folders, names in os.walk(folder):
        path = Path(parent)
        if path != folder and not folders and not names:
            yield path.relative_to(folder).as_posix(), path


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def existing_parent(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.exists())


def require_writable(folder: Path, output: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{output}: {folder} is a file", "give another --output")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"{output}: {folder} cannot be written to",
            "give another --output, or ask for the permission",
        )
