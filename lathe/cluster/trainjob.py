"""Run a training command on a cluster, as a Kubeflow TrainJob that never outlives its launcher.

The launcher owns the budget of restarts. A TrainJob's own retries (JobSet's `maxRestarts`, Job's
`backoffLimit`) are the runtime's, the same for all of its users, and cannot tell a mistake of the
user's from a lost node: the runtime has none, and any failure ends the TrainJob. The launcher
reads why, and starts again what is worth it: after a preemption always, until the deadline; after
other failures `Launch.restarts` times; after a user's mistake never. The saved states that the
workers mirror into the store make the next one go on.

Every attempt has the same name, and waits until the one before is gone with all of its pods: two
never write to the same output. A launcher that comes up again (a
step's retry, in a new pod) finds the TrainJob by that name and makes itself the owner; one that is
being deleted, because its owner is, is waited for and made anew.

The TrainJob is deleted in every end of `run`; after a `kill -9` by the garbage collector, as it
belongs to the launcher's pod, or by `lathe.cluster.janitor`.
"""

import logging
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from lathe.cluster.api import DEADLINE, FAILURES, Cluster, TrainJob, connect
from lathe.cluster.follow import Follower, Patience
from lathe.cluster.manifest import Launcher, build, find_launcher, pods_of
from lathe.config.settings import LaunchSettings
from lathe.errors import Preempted, StageError, UserError
from lathe.launch.shape import Shape, WorkerFailed

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DELETE_PATIENCE = 20.0
"""Seconds for an API server that does not answer, when all that is left is to delete."""


def run(
    command: Sequence[str],
    shape: Shape,
    settings: LaunchSettings,
    patience: Patience | None = None,
) -> None:
    """Run `lathe <command>` on every node of `shape`, as a TrainJob, until it has succeeded.

    What the first node writes goes to our standard output. Call it from the main thread of a pod,
    whose service account has the Role `lathe-pipeline`.

    Raises:
        WorkerFailed: a node failed more than `settings.restarts` times, with the last one's reason
            and last lines; its status is 2 where the worker says that the user is wrong.
        UserError: forbidden, no such image, no place for the pods.
        StageError: the deadline has passed, or somebody else deleted the TrainJob.
        SystemExit: on a signal to end, with the shell's status, 128 + signal.
    """
    cluster = connect()
    with _signals_raised():
        launcher = find_launcher(cluster)
        attempts = _Attempts(cluster, launcher, command, shape, settings)
        try:
            while True:
                job = attempts.begin()
                try:
                    Follower(cluster, job, settings, patience or Patience()).run()
                    return
                except (Preempted, WorkerFailed) as error:
                    attempts.end(error)
        finally:
            _delete(replace(cluster, patience=DELETE_PATIENCE), attempts.name)


class _Attempts:
    """One TrainJob after another, all of one name, within one deadline and budget of restarts."""

    def __init__(
        self,
        cluster: Cluster,
        launcher: Launcher,
        command: Sequence[str],
        shape: Shape,
        settings: LaunchSettings,
    ) -> None:
        self._cluster, self._launcher, self._settings = cluster, launcher, settings
        self._command, self._shape = command, shape
        self._deadline = datetime.now(UTC) + timedelta(hours=settings.deadline_hours)
        self._failures = 0
        self.name: str = self._build()["metadata"]["name"]

    def begin(self) -> TrainJob:
        """A TrainJob of ours: the one that an earlier launcher of this run left, or a new one.

        What is left of one that is being deleted is waited for: its pods may still write.
        """
        told = False
        while True:
            found = self._cluster.get(self.name)
            if found and "deletionTimestamp" not in found["metadata"]:
                if self._adopt(found):
                    return found
            elif found or self._cluster.pods(pods_of(self.name)):
                if not told:
                    log.info("TrainJob %s is being deleted: waiting for its pods to end", self.name)
                    told = True
                if datetime.now(UTC) > self._deadline:
                    raise StageError(f"TrainJob {self.name} is still being deleted at its deadline")
                time.sleep(1)
            elif self._cluster.create(job := self._build()):
                log.info("TrainJob %s created, on %d nodes", self.name, self._shape.nodes)
                return job

    def end(self, error: Preempted | WorkerFailed) -> None:
        """Make room for another attempt, or raise `error`."""
        if isinstance(error, WorkerFailed):
            if error.status == UserError.status or self._failures == self._settings.restarts:
                raise error
            self._failures += 1
        left = self._settings.restarts - self._failures
        log.warning("%s: %s\nstarting again; restarts left: %d", self.name, error, left)
        self._cluster.delete(self.name)

    def _adopt(self, found: TrainJob) -> bool:
        if not self._cluster.set_owners(found, [self._launcher.owner]):
            return False
        log.info("TrainJob %s adopted from an earlier launcher", self.name)
        annotations = found["metadata"]["annotations"]
        self._failures = int(annotations[FAILURES])
        self._deadline = datetime.fromisoformat(annotations[DEADLINE])
        return True

    def _build(self) -> TrainJob:
        return build(
            self._command,
            self._shape,
            self._settings,
            self._launcher,
            self._deadline,
            self._failures,
        )


def _delete(cluster: Cluster, name: str) -> None:
    """Whatever ended the run is the news, not that the API cannot be asked to clean up."""
    try:
        cluster.delete(name)
    except (StageError, UserError) as error:
        log.warning("TrainJob %s is left to the janitor: %s", name, error)


@contextmanager
def _signals_raised() -> Iterator[None]:
    """A signal to end raises SystemExit, once: what cleans up is not interrupted."""

    def handler(number: int, frame: object) -> None:
        for name in SIGNALS:
            signal.signal(name, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {name: signal.signal(name, handler) for name in SIGNALS}
    try:
        yield
    finally:
        for name, old in before.items():
            signal.signal(name, old)
