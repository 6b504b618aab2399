"""The folder of a run's saved states: each is written to a temporary name and committed by rename.

Nodes may share a disk or have separate ones. With separate disks each node keeps what its processes
write, and the output must have a mirror that collects all of it.
"""

import logging
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from lathe.train.group import Group
from lathe.train.saved import (
    METADATA,
    PARTIAL,
    committed_steps,
    compute_digests,
    damage,
    step_name,
    write_metadata,
)
from lathe_base.artifacts.mirror import Mirror
from lathe_base.errors import Code, StageError, UserError

log = logging.getLogger("lathe")


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
        return self.folder / f"{step_name(step)}{PARTIAL}"

    def seal(self, partial: Path) -> None:
        """Compute the digests of the files on this disk, which all its processes have written, and
        upload them to the mirror, if there is one."""
        if not self._leads_disk:
            return
        self._digests = compute_digests(partial.iterdir())
        if self.mirror:
            self.mirror.copy(_final(partial).name, sorted(partial.iterdir()))

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
        if not self.is_one_disk:
            files = self.group.gather(files[0])
        if not self._leads_disk:
            return
        final = _final(partial)
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
        names: set[str] = {name for names in self.group.gather(self._names()) for name in names}
        skipped: list[str] = []
        for name in sorted(names, reverse=True):
            path = self.folder / name
            reasons = self.group.gather(self._damage(path) if self._leads_disk else "")
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

    def _names(self) -> list[str]:
        """Names of the states on this disk and in the mirror."""
        if not self._leads_disk:
            return []
        copied = self.mirror.steps() if self.mirror else []
        return [*(path.name for path in committed_steps(self.folder)), *copied]

    def _damage(self, path: Path) -> str:
        """What is wrong with a state on this disk, where it is fetched to if it is absent."""
        if self.mirror and not (path / METADATA).is_file() and path.name in self.mirror.steps():
            self.mirror.fetch(path.name)
        return damage(path)


def unwritable(partial: Path, reason: BaseException) -> StageError:
    """The error for a state that could not be saved."""
    return StageError(
        f"{partial}: cannot be written: {reason}\n  hint: free space or repair the storage, and "
        "run the same command again; it resumes from the last checkpoint",
        Code.IO,
    )


def _final(partial: Path) -> Path:
    return partial.with_name(partial.name.removesuffix(PARTIAL))


def _leads_disk(folder: Path, group: Group) -> bool:
    """Whether this process does what is done once per disk: it has rank 0, or is the first of a
    node that does not see the files of rank 0."""
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
