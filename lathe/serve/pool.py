"""A few worker threads behind a bounded queue."""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Pool:
    """Runs jobs on `workers` threads; `max_queue` more may wait their turn, first come first
    served."""

    def __init__(self, workers: int, max_queue: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._room = threading.Semaphore(workers + max_queue)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> bool:
        """Take the job, or return False at once where every worker and place is taken."""
        if not self._room.acquire(blocking=False):
            return False
        self._jobs.put(job)
        return True

    def close(self) -> None:
        """Run what was taken, then end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                self._room.release()
