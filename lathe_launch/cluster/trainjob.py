"""Run a training command on a cluster, as a Kubeflow TrainJob that never outlives its launcher.

The launcher owns the restart budget. A TrainJob's own retries (JobSet's `maxRestarts`, Job's
`backoffLimit`) belong to the runtime, are the same for all of its users, and cannot distinguish a
user's mistake from a lost node. So the runtime has none: any failure ends the TrainJob, and the
launcher reads the cause and decides. After a preemption it always restarts, until the deadline;
after other failures `Launch.restarts` times; after a user's mistake never. If a worker was killed
for memory, one more attempt has 1.5 times as much, if quota and nodes have it. The next attempt
resumes from the saved states that the workers mirror to the object store.

All attempts have the same label, and each waits until the previous one is gone with its JobSet and
all of its pods, so two never write to the same output. A restarted launcher (a step's retry, in a
new pod) finds the TrainJob by that label and becomes its owner; if the TrainJob is being deleted
because its owner is gone, the launcher waits and creates it again. Every attempt has a unique name:
Trainer keeps a snapshot of the runtime in a ConfigMap named after the TrainJob, which may outlive
it, and refuses a new TrainJob that finds another's (Trainer 2.3).

`run` always deletes the TrainJob when it returns; after a `kill -9` the garbage collector does, as
the launcher's pod owns it, or else `lathe_launch.cluster.janitor`.
"""

import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from lathe_base.config.settings import LaunchSettings
from lathe_base.errors import Code, Preempted, StageError, UserError
from lathe_launch.cluster.api import DEADLINE, FAILURES, JOBSETS, WORK, Cluster, TrainJob, connect
from lathe_launch.cluster.follow import Follower, Patience
from lathe_launch.cluster.manifest import (
    Launcher,
    attempt_name,
    build,
    find_launcher,
    runtime_name,
    work_label,
)
from lathe_launch.cluster.nodes import more_memory, require_room
from lathe_launch.cluster.reasons import NodeFailed
from lathe_launch.parent import first_signal_raises
from lathe_launch.shape import Shape, WorkerFailed
from lathe_launch.usage import Usage

log = logging.getLogger("lathe")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DELETE_PATIENCE = 20.0
"""Seconds to retry the final deletion if the API server does not answer."""
MAX_PAUSE_SECONDS = 300.0
RAN_WELL = 600.0
"""Seconds after which a failed attempt does not lengthen the pause before the next."""


def run(
    command: Sequence[str],
    shape: Shape,
    settings: LaunchSettings,
    patience: Patience | None = None,
) -> Usage:
    """Run `lathe <command>` on every node of `shape`, as a TrainJob, until it has succeeded.

    The first node's log is printed to standard output. Call it from the main thread of a pod whose
    service account has the Role `lathe-pipeline`.

    Returns:
        What the workers of all attempts have used.

    Raises:
        WorkerFailed: nodes failed more than `settings.restarts` times; has the reason and last
            lines of the last failure, and status 2 if the worker reported a user's mistake.
        UserError: a forbidden request, a missing image, or pods that cannot be scheduled.
        StageError: the deadline has passed, or something else deleted the TrainJob.
        SystemExit: on a termination signal, with the shell's status, 128 + signal.
    """
    cluster = connect()
    with first_signal_raises(lambda number: SystemExit(128 + number), SIGNALS):
        launcher = find_launcher(cluster)
        patience = patience or Patience()
        attempts = _Attempts(cluster, launcher, command, shape, settings, patience.backoff)
        used = Usage()
        try:
            while True:
                job = attempts.begin()
                follower = Follower(cluster, job, attempts.settings, patience)
                try:
                    follower.run()
                    return used + follower.used
                except (Preempted, WorkerFailed) as error:
                    used += follower.used
                    attempts.end(error)
        finally:  # also of one that has succeeded: its pods are no longer needed
            if attempts.name:
                try:
                    replace(cluster, patience=DELETE_PATIENCE).delete(attempts.name)
                except (StageError, UserError) as error:  # it must not hide the run's error
                    log.warning("leaving TrainJob %s to the janitor: %s", attempts.name, error)


class _Attempts:
    """Successive TrainJobs of one step, within one deadline and restart budget.

    Attributes:
        name: of the last one; None before the first.
        settings: of the last one, which may have more memory than the first.
    """

    def __init__(
        self,
        cluster: Cluster,
        launcher: Launcher,
        command: Sequence[str],
        shape: Shape,
        settings: LaunchSettings,
        backoff: float,
    ) -> None:
        self._backoff, self._began = backoff, time.monotonic()
        self._cluster, self._launcher, self.settings = cluster, launcher, settings
        self._command, self._shape = command, shape
        self._deadline = datetime.now(UTC) + timedelta(hours=settings.deadline_hours)
        self._failures = self._pauses = 0
        self._first_memory = settings.memory_per_node
        self._work = work_label(command, shape, settings, launcher)
        self._runtime: TrainJob | None = None
        try:  # None, too, if it does not exist, which Trainer reports
            self._runtime = cluster.runtime(runtime_name(settings))
        except UserError as error:
            log.warning("tolerations of the training runtime are replaced: %s", error)
        self.name: str | None = None

    def begin(self) -> TrainJob:
        """Adopt the TrainJob that an earlier launcher of this run left, or create one.

        Waits for the pods of a deleted TrainJob, which may still write.
        """
        told = False
        while True:
            jobs = self._cluster.trainjobs(**{WORK: self._work})
            for job in jobs:
                if "deletionTimestamp" in job["metadata"]:
                    continue
                if not self._cluster.set_owners(job, [self._launcher.owner]):
                    continue  # deleted in the meantime
                # Deadline and failures go on from those of the earlier launcher.
                self.name = job["metadata"]["name"]
                log.info("TrainJob %s adopted from an earlier launcher", self.name)
                annotations = job["metadata"]["annotations"]
                self._failures = int(annotations[FAILURES])
                self._deadline = datetime.fromisoformat(annotations[DEADLINE])
                memory = job["spec"]["trainer"]["resourcesPerNode"]["limits"]["memory"]
                self.settings = self.settings.model_copy(update={"memory_per_node": memory})
                return job
            if (
                jobs
                or (self.name and self._cluster.get(JOBSETS, self.name))
                or self._cluster.pods(f"{WORK}={self._work}")
            ):
                if not told:
                    log.info(
                        "the previous TrainJob is being deleted: waiting for its pods to terminate"
                    )
                    told = True
                if datetime.now(UTC) > self._deadline:
                    raise StageError(
                        f"TrainJob {self.name} is still being deleted at its deadline", Code.TIMEOUT
                    )
                time.sleep(1)
                continue
            self.name = attempt_name(self._command[0], self.name)
            job = build(
                self._command,
                self._shape,
                self.settings,
                self._launcher,
                self.name,
                self._deadline,
                self._failures,
                self._runtime,
            )
            if self._cluster.create(job):  # else the name is taken: look again
                self._began = time.monotonic()
                log.info("TrainJob %s created, on %d nodes", self.name, self._shape.nodes)
                return job

    def end(self, error: Preempted | WorkerFailed) -> None:
        """Delete the failed attempt so that another can start, or raise `error`."""
        # Neither a preemption nor the attempt with more memory costs a restart.
        lacked_memory = isinstance(error, NodeFailed) and error.out_of_memory
        if isinstance(error, WorkerFailed) and not (lacked_memory and self._takes_more_memory()):
            if error.status == UserError.status or self._failures == self.settings.restarts:
                raise error
            self._failures += 1
        left = self.settings.restarts - self._failures
        # Doubled with each failure in a row: an attempt that ran well begins anew.
        if time.monotonic() - self._began > RAN_WELL:
            self._pauses = 0
        self._pauses += 1
        seconds = min(self._backoff * 2.0 ** (self._pauses - 1), MAX_PAUSE_SECONDS)
        log.warning(
            "%s: %s\nrestarting in %.0f s; restarts left: %d", self.name, error, seconds, left
        )
        # Deleted before the pause: its pods terminate in the meantime.
        if self.name:
            self._cluster.delete(self.name)
        time.sleep(seconds)

    def _takes_more_memory(self) -> bool:
        """Give the next attempt more memory, once; False if there is none."""
        before = self.settings.memory_per_node
        if before != self._first_memory:  # it has had more already
            return False
        amount = more_memory(before)
        try:
            require_room(self._cluster, self.settings, amount, self._work)
        except (StageError, UserError) as error:
            log.warning("not tried with %s of memory instead of %s: %s", amount, before, error)
            return False
        log.warning(
            "%s ran out of memory: one more attempt has %s instead of %s, which costs no restart "
            "(to begin with it: MEMORY=%s, or Launch.memory_per_node)",
            *(self.name, amount, before, amount),
        )
        self.settings = self.settings.model_copy(update={"memory_per_node": amount})
        return True
