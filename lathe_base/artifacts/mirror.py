"""Mirror saved states to an object store, so that a run can resume on another machine.

A training run whose output is `s3://bucket/model` works in a local folder. Its saved states are
uploaded below `s3://bucket/model.state/` as they are committed, and downloaded from there by the
next attempt, on any machine. `steps.json` is written last and lists the complete ones; `run/` has
the rest of the folder. The finished checkpoint replaces all of them.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lathe_base.artifacts.kinds import STATE, checked
from lathe_base.inputs import parse_json
from lathe_base.storage import atomic_file, exists, fetch, read_text, remove, upload, write_text

log = logging.getLogger("lathe")

STEPS = "steps.json"


@dataclass(frozen=True)
class Mirror:
    """The remote copy of the output folder `folder`, whose result goes to the address `uri`."""

    folder: Path
    uri: str

    @classmethod
    def make(cls, folder: Path, uri: str) -> "Mirror":
        """Mirror `folder` to `uri`, in this process and in the workers that it starts."""
        mirror = cls(folder, uri.rstrip("/"))
        with atomic_file(_note(folder)) as work:
            work.write_text(mirror.uri, encoding="utf-8")
        return mirror

    @classmethod
    def of(cls, folder: Path) -> "Mirror | None":
        """The mirror of a folder, or None if `make` was not called for it."""
        note = _note(folder)
        return cls(folder, note.read_text(encoding="utf-8")) if note.is_file() else None

    def restore(self) -> None:
        """Download the finished output or, without one, the newest saved state to the folder.

        Raises:
            UserError: the store does not answer, or refuses access.
        """
        if exists(f"{self.uri}/"):
            fetch(f"{self.uri}/", self.folder)
        elif steps := self.steps():
            log.info("fetching %s from %s", steps[-1], self.uri)
            fetch(self._at("run/"), self.folder)
            self.fetch(steps[-1])

    def fetch(self, step: str) -> None:
        """Download a saved state to the folder."""
        fetch(self._at(f"{step}/"), self.folder / STATE / step)

    def copy(self, step: str, files: Iterable[Path]) -> None:
        """Upload files of a step that is not committed yet."""
        for path in files:
            upload(path, self._at(f"{step}/{path.name}"))

    def commit(self, step: str, keep: int) -> None:
        """Mark a copied step as complete, and delete all but the last `keep` steps. Later ones are
        deleted too: the run did not resume from them, because they are corrupt."""
        for path in sorted(self.folder.rglob("*")):
            inside = path.relative_to(self.folder)
            if path.is_file() and inside.parts[0] != STATE:
                upload(path, self._at(f"run/{inside}"))
        # The list is written after what it names is complete, and before what it no longer names is
        # deleted: whenever this process is killed, every step in the list can be restored.
        before = self.steps()
        kept = [*(name for name in before if name < step), step][-keep:]
        write_text(self._at(STEPS), json.dumps(kept))
        for name in before:
            if name not in kept:
                remove(self._at(f"{name}/"))

    def finish(self) -> None:
        """Upload the folder to the address and delete the saved states next to it."""
        upload(self.folder, self.uri)  # whole or absent, so `restore` never prefers a part of it
        remove(self._at(""))

    def steps(self) -> list[str]:
        """Names of the complete saved states, the newest last."""
        where = self._at(STEPS)
        hint = "delete everything below the address; training then starts over"
        if not exists(where):
            return []
        return checked(parse_json(read_text(where), where, hint), list[str], where, hint)

    def _at(self, name: str) -> str:
        return f"{self.uri}.state/{name}"


def _note(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.mirror")
