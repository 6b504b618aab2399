"""Atomic folders: written to a temporary name, listed in their metadata, then renamed into
place."""

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lathe_base.errors import Code, UserError, explain_os_error
from lathe_base.storage.files import files_below, sha256
from lathe_base.storage.ownership import (
    OWNER,
    REPLACED,
    Kind,
    claim_output_folder,
    our_files,
    real_path,
    scratch_folders,
    scratch_prefix,
)

log = logging.getLogger("lathe")


@contextmanager
def atomic_folder(output: Path, kind: Kind) -> Iterator[Path]:
    """Yield an empty folder that replaces `output` after the block has written its metadata file.

    The list of all other files is added to the metadata. If the block fails, or writes no metadata
    file, `output` stays as it was. The block may put temporary files beside the yielded folder.

    An earlier output is moved aside and deleted file by file, as its own metadata lists them. A
    symbolic link is kept, and the folder that it points to is replaced. A mount point, a folder
    that contains the working directory, and one whose parent is not writable are kept: their files
    are replaced one by one, the metadata last.

    Raises:
        UserError: see `claim_output_folder`; another process is writing to `output`.
    """
    target = real_path(output)
    _recover_interrupted(target)
    with ExitStack() as stack:
        stack.enter_context(locked(output))
        claim_output_folder(output, kind)
        _sweep(target, kind)
        stays = _must_stay(target)
        # On the same file system as the target, so that a rename is all that is left to do.
        parent = target if stays else target.parent
        scratch = Path(tempfile.mkdtemp(prefix=scratch_prefix(target, stays), dir=parent))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        scratch.chmod(0o755)
        (scratch / OWNER).write_bytes(os.fsencode(target))
        work = scratch / "new"
        work.mkdir()
        yield work
        metadata = work / kind.metadata_file
        if not metadata.is_file():
            return
        values = json.loads(metadata.read_bytes())
        if "files" not in values:
            values["files"] = {
                name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
                for name, path in files_below(work)
                if path != metadata
            }
            text = json.dumps(values, indent=2, ensure_ascii=False)
            metadata.write_text(f"{text}\n", encoding="utf-8")
        if stays:
            claim_output_folder(output, kind)  # again: the block may have taken hours
            _replace_files(work, target, kind)
        else:
            _replace_folder(work, target, scratch / "old", kind)


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Lock the folder `output`, which is created if needed and removed again if it stays empty.

    Raises:
        UserError: another process holds the lock.
    """
    target = real_path(output)
    missing = [path for path in (target, *target.parents) if not path.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(OSError(error.errno, error.strerror, str(output))) from None
    handle = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{output}: another process is writing to it",
                "wait until it has finished, or give another --output",
                Code.IN_USE,
            ) from None
        except OSError as error:  # a network file system without locks
            log.debug("%s: not locked: %s", output, error)
        yield
    finally:
        os.close(handle)
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete these files of a folder, and the folders in it that are empty afterwards."""
    paths = [folder / name for name in names]
    for path in paths:
        path.unlink(missing_ok=True)
    parents = {parent for path in paths for parent in path.parents if folder in parent.parents}
    for parent in sorted(parents, reverse=True):
        with suppress(OSError):
            parent.rmdir()


def _must_stay(target: Path) -> bool:
    here = Path.cwd()
    return (
        target.is_mount()
        or here == target
        or target in here.parents
        or not os.access(target.parent, os.W_OK)
    )


def _replace_files(work: Path, target: Path, kind: Kind) -> None:
    """Replace the files one by one. If that is interrupted, the folder has no metadata file, and
    the next attempt still recognizes its files."""
    # The metadata goes first and comes last: at no moment does it list files that are not there.
    if (target / kind.metadata_file).exists():
        os.replace(target / kind.metadata_file, target / REPLACED)
    remove_files(target, our_files(target, kind) - {kind.metadata_file, REPLACED})
    names = [name for name, _ in files_below(work) if name != kind.metadata_file]
    for name in (*names, kind.metadata_file):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if name == kind.metadata_file:
            (target / REPLACED).unlink(missing_ok=True)
        os.replace(work / name, target / name)


def _replace_folder(new: Path, target: Path, old: Path, kind: Kind) -> None:
    """Replace the folder by two renames; one that is killed between them is mended by
    `_recover_interrupted`."""
    os.rename(target, old)  # a folder with files cannot be replaced by one rename
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    remove_files(old, our_files(old, kind))
    with suppress(OSError):
        old.rmdir()
    if old.exists():  # files were added while it was being replaced: they are not ours
        kept = Path(tempfile.mkdtemp(prefix=f"{target.name[:100]}.kept-", dir=target.parent))
        os.rename(old, kept)
        log.warning("%s: files that were added during the replacement are in %s", target, kept)


def _sweep(target: Path, kind: Kind) -> None:
    """Delete the leftovers of a killed attempt: a partial replacement, and its scratch folders."""
    if (target / REPLACED).exists() or not (target / kind.metadata_file).exists():
        remove_files(target, our_files(target, kind))
    for inside in (True, False):
        for stale in scratch_folders(target, inside):
            shutil.rmtree(stale)


def _recover_interrupted(target: Path) -> None:
    """Restore an earlier output that a killed attempt had moved aside."""
    is_gone = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    for scratch in scratch_folders(target, inside=False):
        if is_gone and (scratch / "old").is_dir():
            os.rename(scratch / "old", target)
            return
