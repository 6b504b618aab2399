"""The folder of a run's saved states: each is written to a temporary name and committed by rename.

`state/step_00000200/` holds the tensors of every process and, written last, `trainer.json` with the
size and SHA-256 of each file and of itself. States of earlier versions list only the sizes.

Nodes may share a disk or have separate ones. With separate disks each node keeps what its processes
write, and the output must have a mirror that collects all of it.
"""

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lathe.train.group import Group
from lathe_base.artifacts.kinds import checked
from lathe_base.artifacts.kinds import read_metadata as read_saved
from lathe_base.artifacts.metadata import Count, FileName, Metadata, Sha256
from lathe_base.artifacts.mirror import Mirror
from lathe_base.errors import Code, StageError, UserError
from lathe_base.storage import digest, sha256

log = logging.getLogger("lathe")
STEP = re.compile(r"step_(\d{8})")
METADATA = "trainer.json"
METADATA_DIGEST = "metadata_sha256"
"""Key of the digest of all other values of the metadata."""
PARTIAL = ".partial"
HASHING_THREADS = 8
HINT = "delete the folder: the run then resumes from the checkpoint before it"
T = TypeVar("T")


class StateFolder:
    """Every process of `group` creates one and calls its methods.

    Attributes:
        is_one_disk: whether all processes see the same files.
        current: the state that this run resumed from, or has committed since; None before.

    Raises:
        UserError: the nodes have separate disks, and the output has no mirror.
    """

    def __init__(self, folder: Path, keep: int, group: Group) -> None:
        self.folder, self.keep, self.group = folder, keep, group
        self.mirror = Mirror.of(folder.parent)
        self.current: Path | None = None
        self._digests: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._leads_disk, self.is_one_disk = group.is_first, True
        if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:  # torchrun's number of nodes
            self._leads_disk = _leads_disk(folder, group)
            self.is_one_disk = sum(group.gather(self._leads_disk)) == 1
        if not self.is_one_disk and self.mirror is None:
            raise UserError(
                f"{folder.parent}: the nodes do not share this folder",
                "give an address (s3://bucket/prefix) as output, or a folder on a shared disk",
                Code.INVALID_VALUE,
            )
        if self._leads_disk:
            for partial in folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(partial)
        group.barrier()

    def partial(self, step: int) -> Path:
        """The temporary folder for the files of a step, each written by one process."""
        return self.folder / f"step_{step:08d}{PARTIAL}"

    def seal(self, partial: Path) -> None:
        """Compute the digests of the files on this disk, which all its processes have written, and
        upload them to the mirror, if there is one."""
        if not self._leads_disk:
            return
        self._digests = compute_digests(partial.iterdir())
        if self.mirror:
            self.mirror.copy(partial.name.removesuffix(PARTIAL), sorted(partial.iterdir()))

    def commit(self, partial: Path, extra: dict[str, Any]) -> None:
        """Make it the newest saved state, and delete all but the last `keep`; call it after `seal`.
        Later states are corrupt, because the run resumed from an earlier one: they are deleted.

        On a shared disk the first process does this alone.

        Args:
            extra: JSON values of the run.
        """
        files: list[dict[str, tuple[int, str]]] = [{}]
        if self._leads_disk:
            files = [{n: ((partial / n).stat().st_size, d) for n, d in self._digests.items()}]
        if not self.is_one_disk:  # the metadata lists the files of all nodes
            files = self.group.gather(files[0])
        if not self._leads_disk:
            return
        final = partial.with_name(partial.name.removesuffix(PARTIAL))
        listed = dict(pair for by_name in files for pair in by_name.items())
        sizes = {name: size for name, (size, _) in listed.items()}
        digests = {name: value for name, (_, value) in listed.items()}
        # The rename is the commit: before it the folder has a name that no run resumes from, after
        # it the folder is complete. Earlier states go only then, so that a kill leaves one.
        write_metadata(partial, extra, sizes, digests)
        shutil.rmtree(final, ignore_errors=True)  # a broken one, skipped on resuming
        os.replace(partial, final)
        self.current = final
        states = committed_steps(self.folder)
        kept = [path for path in states if path.name <= final.name][-self.keep :]
        for path in states:
            if path not in kept:
                shutil.rmtree(path)
        # The metadata is uploaded last, for the same reason.
        if self.mirror and self.group.is_first:
            self.mirror.copy(final.name, [final / METADATA])
            self.mirror.commit(final.name, self.keep)

    def newest(self) -> Path | None:
        """The newest saved state that is intact on every disk, or None if there is none yet. All
        processes call it together, and get the same one.

        Raises:
            UserError: there are states, and all of them are corrupt.
        """
        # One process per disk lists its states and those in the mirror, and verifies each of them.
        local: list[str] = []
        if self._leads_disk:
            local = [path.name for path in committed_steps(self.folder)]
            local += self.mirror.steps() if self.mirror else []
        names: set[str] = {name for names in self.group.gather(local) for name in names}
        skipped: list[str] = []
        for name in sorted(names, reverse=True):
            path, reason = self.folder / name, ""
            if self._leads_disk:
                is_absent = not (path / METADATA).is_file()
                if self.mirror and is_absent and name in self.mirror.steps():
                    self.mirror.fetch(name)
                reason = damage(path)
            # Corrupt on one node is corrupt for all: every process resumes from the same state.
            reasons = self.group.gather(reason)
            if not any(reasons):
                if self.group.is_first:
                    for reason in skipped:
                        log.warning(
                            "skipping corrupt checkpoint %s; resuming from %s", reason, path
                        )
                self.current = path
                return path
            skipped.append(f"{path} ({'; '.join(dict.fromkeys(filter(None, reasons)))})")
        if skipped:
            raise UserError(
                f"no saved state can be resumed, all are corrupt: {', '.join(skipped)}",
                f"delete {self.folder} to train from the start",
                Code.CORRUPT,
            )
        return None

    def last(self) -> Path:
        """The state at the end of the run, for the first process.

        Raises:
            StageError: it is corrupt.
        """
        assert self.current is not None
        if not self.is_one_disk:
            assert self.mirror is not None
            self.mirror.restore()
        if reason := damage(self.current):
            raise StageError(
                f"{self.current}: corrupt since it was saved ({reason})\n  hint: run the same "
                "command again; it resumes from the checkpoint before",
                Code.CORRUPT,
            )
        return self.current


def _leads_disk(folder: Path, group: Group) -> bool:
    """Whether this process does what is done once per disk: it has rank 0, or is the first of a
    node that does not see the files of rank 0."""
    # Nodes may have mounted different disks under one path, so the path says nothing: rank 0 writes
    # a token of its own, and a process that reads another one, or none, does not share its disk.
    token, probe = group.gather(secrets.token_hex())[0], folder / ".first"
    if group.is_first:
        probe.write_text(token, encoding="utf-8")
    group.barrier()
    # Between two barriers: the file is written, and not yet deleted.
    sees = probe.is_file() and probe.read_text(encoding="utf-8") == token
    group.barrier()
    if group.is_first:
        probe.unlink()
    return group.is_first or (int(os.environ.get("LOCAL_RANK", 0)) == 0 and not sees)


def unwritable(partial: Path, reason: BaseException) -> StageError:
    """The error for a state that could not be saved."""
    return StageError(
        f"{partial}: cannot be written: {reason}\n  hint: free space or repair the storage, and "
        "run the same command again; it resumes from the last checkpoint",
        Code.IO,
    )


def committed_steps(folder: Path) -> list[Path]:
    """Saved states, oldest first; on a node with its own disk, its part of them."""
    return sorted(p for p in folder.glob("step_*") if STEP.fullmatch(p.name))


class SavedMetadata(Metadata):
    """`trainer.json`; a loss that could not be measured is NaN."""

    HAS_NAN = True
    files: dict[FileName, Count]
    sha256: dict[FileName, Sha256] | None = None
    metadata_sha256: Sha256 | None = None
    progress: dict[str, Any]
    loss_scale: dict[str, Any]


def read_metadata(path: Path) -> dict[str, Any]:
    """The `extra` of a save.

    Raises:
        UserError: it is broken.
    """
    return read_saved(path / METADATA, SavedMetadata, HINT).raw


def restored(path: Path, values: Any, kind: type[T]) -> T:
    """A part of a metadata file as the object that was saved; raises as `read_metadata` does."""
    return checked(values, kind, str(path / METADATA), HINT)


def write_metadata(
    path: Path, extra: dict[str, Any], sizes: dict[str, int], digests: dict[str, str]
) -> None:
    """Write the metadata of a state; sizes (bytes) and digests by file name."""
    values = {**extra, "files": sizes, "sha256": digests}
    text = json.dumps({**values, METADATA_DIGEST: digest(json.dumps(values))})
    (path / METADATA).write_text(text, encoding="utf-8")


def compute_digests(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of files by name, computed in several threads."""
    paths = sorted(files)
    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as pool:
        return {
            path.name: value for path, value in zip(paths, pool.map(sha256, paths), strict=True)
        }


def damage(path: Path) -> str:
    """What is wrong with a saved state, for a message; empty if it is intact. Reads all its files
    if their digests are known."""
    try:
        metadata = read_metadata(path)
        expected = metadata.pop(METADATA_DIGEST, None)
        if expected not in (None, digest(json.dumps(metadata))):
            return f"{METADATA} differs from its SHA-256"
        sizes = metadata["files"]
        broken = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
        if broken:
            return f"{', '.join(broken)}: not the size that {METADATA} lists"
        listed = metadata.get("sha256") or {}
        actual = compute_digests(path / name for name in listed)
    except OSError as error:
        return str(error)
    except UserError as error:
        return error.what
    changed = [name for name, value in listed.items() if actual[name] != value]
    return f"{', '.join(changed)}: not the SHA-256 that {METADATA} lists" if changed else ""
