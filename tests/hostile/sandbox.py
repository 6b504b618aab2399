"""What lies in a folder, byte for byte, and what a command has done to it."""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

Entry = tuple[str, ...]


def snapshot(root: Path) -> dict[str, Entry]:
    """Every path below `root` with its type, and its link's target or its digest."""
    found: dict[str, Entry] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = _entry(path)
    return found


def copy(source: Path, target: Path) -> None:
    """A real copy: hard links would share what a case alters."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)


def altered(before: dict[str, Entry], after: dict[str, Entry]) -> list[str]:
    """What is gone, or has other bytes."""
    return sorted(path for path, entry in before.items() if after.get(path) != entry)


def added(before: dict[str, Entry], after: dict[str, Entry]) -> list[str]:
    return sorted(after.keys() - before.keys())


def outside(paths: Iterable[str], folders: Iterable[str]) -> list[str]:
    """Those that are none of `folders`, nor below one."""
    tops = tuple(folders)
    return [p for p in paths if not any(p == top or p.startswith(f"{top}/") for top in tops)]


def files_with(root: Path, text: str) -> list[str]:
    """Files below `root` that hold the text."""
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
