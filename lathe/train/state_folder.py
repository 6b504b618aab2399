"""The folder of a run's saved states: each is written to a temporary name and committed by rename.

Nodes may share a disk or have separate ones. With separate disks each node keeps what its processes
write, and the output must have a mirror that collects all of it.
"""

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from lathe.train.group import Group
from lathe.train.saved import METADATA, PARTIAL, committed_steps, saved_steps, step_name
from lathe_base.artifacts.mirror import Mirror
from lathe_base.errors import StageError, UserError


class StateFolder:
    """Every process of `group` creates one and calls its methods.

    Attributes:
        is_one_disk: whether all processes see the same files.

    Raises:
        UserError: the nodes have separate disks, and the output has no mirror.
    """

    def __init__(self, folder: Path, keep: int, group: Group) -> None:
        self.folder, self.keep, self.group = folder, keep, group
        self.mirror = Mirror.of(folder.parent)
        folder.mkdir(parents=True, exist_ok=True)
        self._leads_disk, self.is_one_disk = group.is_first, True
        if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:  # torchrun's number of nodes
            self._leads_disk = _leads_disk(folder, group)
            self.is_one_disk = sum(group.gather(self._leads_disk)) == 1
        if not self.is_one_disk and self.mirror is None:
            raise UserError(
                f"{folder.parent}: the nodes do not share this folder",
                "give an address (s3://bucket/prefix) as output, or a folder on a shared disk",
            )
        if self._leads_disk:
            for partial in folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(partial)
        group.barrier()

    def partial(self, step: int) -> Path:
        """The temporary folder for the files of a step, each written by one process."""
        return self.folder / f"{step_name(step)}{PARTIAL}"

    def copy(self, partial: Path) -> None:
        """Upload the files on this disk to the mirror, if there is one."""
        if self.mirror and self._leads_disk:
            self.mirror.copy(_final(partial).name, sorted(partial.iterdir()))

    def commit(self, partial: Path, extra: dict[str, Any]) -> None:
        """Make it the newest saved state, and delete all but the last `keep`; call it after `copy`.

        On a shared disk the first process does this alone.

        Args:
            extra: JSON values of the run.
        """
        files: list[dict[str, int]] = [{}]
        if self._leads_disk:
            files = [{path.name: path.stat().st_size for path in partial.iterdir()}]
        if not self.is_one_disk:
            files = self.group.gather(files[0])
        if not self._leads_disk:
            return
        final = _final(partial)
        sizes = dict(pair for found in files for pair in found.items())
        (partial / METADATA).write_text(json.dumps({**extra, "files": sizes}), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)  # a broken one, skipped on resuming
        os.replace(partial, final)
        for old in committed_steps(self.folder)[: -self.keep]:
            shutil.rmtree(old)
        if self.mirror and self.group.is_first:
            self.mirror.copy(final.name, [final / METADATA])
            self.mirror.commit(final.name, self.keep)

    def newest(self) -> Path:
        """The last complete saved state, for the first process."""
        if not self.is_one_disk:
            assert self.mirror is not None
            self.mirror.restore()
        return saved_steps(self.folder)[-1]


def unwritable(partial: Path, reason: BaseException) -> StageError:
    """The error for a state that could not be saved."""
    return StageError(
        f"{partial}: cannot be written: {reason}\n  hint: free space or repair the storage, and "
        "run the same command again; it resumes from the last checkpoint"
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
    sees = probe.is_file() and probe.read_text(encoding="utf-8") == token
    group.barrier()
    if group.is_first:
        probe.unlink()
    return group.is_first or (int(os.environ.get("LOCAL_RANK", 0)) == 0 and not sees)
