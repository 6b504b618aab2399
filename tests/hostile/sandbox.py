"""Snapshots of folders, and what a command has changed in them."""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

Entry = tuple[str, ...]


def snapshot(root: Path) -> dict[str, Entry]:
    """All paths below `root` with their type, and their digest or link target."""
    found: dict[str, Entry] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = _entry(path)
    return found


def copy(source: Path, target: Path) -> None:
    """Copy a file or folder; hard links would share changes between cases."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)


def altered(before: dict[str, Entry], after: dict[str, Entry]) -> list[str]:
    """Return the paths that were deleted or changed."""
    return sorted(path for path, entry in before.items() if after.get(path) != entry)


def added(before: dict[str, Entry], after: dict[str, Entry]) -> list[str]:
    return sorted(after.keys() - before.keys())


def outside(paths: Iterable[str], folders: Iterable[str]) -> list[str]:
    """Return the paths that are neither in `folders` nor below one of them."""
    tops = tuple(folders)
    return [p for p in paths if not any(p == top or p.startswith(f"{top}/") for top in tops)]


def files_with(root: Path, text: str) -> list[str]:
    """Return the files below `root` that contain the text."""
    needle, found = text.encode(), []
    for folder, _, files in os.walk(root):
        for name in files:
            path = os.path.join(folder, name)
            if stat.S_ISREG(os.lstat(path).st_mode) and needle in Path(path).read_bytes():
                found.append(os.path.relpath(path, root))
    return found


def _entry(path: str) -> Entry:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return "link", os.readlink(path)
    if stat.S_ISDIR(mode):
        return ("folder",)
    if not stat.S_ISREG(mode):
        return "other", str(stat.S_IFMT(mode))
    with open(path, "rb") as file:
        return "file", hashlib.file_digest(file, "sha256").hexdigest()
