"""Continuous batching: requests join and leave a running batch between two steps.

One thread owns the model. In turns it reads a stretch of the next prompt, and takes one step of all
branches of all requests under way, so that neither a long prompt nor a long text keeps the others
waiting. Keys and values are in one buffer, a row a branch; those under way have the first rows, on
which a step runs, and the prompt that is being read has the row behind them.

Source: iteration-level scheduling, Orca (Yu et al., OSDI 2022); chunked prefill, Sarathi-Serve
(Agrawal et al., OSDI 2024).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from lathe.runtime.sequence_group import SequenceGroup, Step
from lathe.runtime.session import KVCache, OnnxModel

log = logging.getLogger("lathe")

PREFILL_CHUNK = 128  # tokens of a prompt that are read between two steps
ENDED = Step([], [])


class Watcher:
    """Told by a batcher what happens, on its thread; here it takes no notice. Seconds count from a
    request's arrival."""

    def admitted(self, waited: float) -> None:
        """A request has a row."""

    def begun(self, prompt_tokens: int, seconds: float) -> None:
        """A prompt is read, and its first token chosen."""

    def stepped(self, tokens: int) -> None:
        """So many branches got a token."""

    def holds(self, running: int, waiting: int, kv_tokens: int) -> None:
        """What there is between two steps: branches, requests, and tokens of the branches."""


class Batcher:
    """Runs at most `max_running` branches at a time; `max_queue` requests may wait for room, first
    come first served.

    Memory of keys and values is bounded: `max_running` rows of the model's positions, taken from
    the system as they are first used.
    """

    def __init__(
        self, model: OnnxModel, max_running: int, max_queue: int, watcher: Watcher | None = None
    ) -> None:
        self.model, self.max_running, self._max_queue = model, max_running, max_queue
        self._watcher = watcher or Watcher()
        self._cache = model.start(max_running)
        self._parts: dict[tuple[int, int], KVCache] = {}
        self._waiting: deque[SequenceGroup] = deque()
        self._reading: SequenceGroup | None = None
        self._owners: list[SequenceGroup] = []  # of the rows under way
        self._tokens: list[int] = []  # the last one of each row
        self._rows: dict[SequenceGroup, list[int]] = {}  # of each of its branches, in their order
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, group: SequenceGroup) -> bool:
        """Take a request, or return False at once where every place to wait is taken."""
        with self._changed:
            taken = len(self._owners) + (self._reading.width if self._reading else 0)
            free = self.max_running - taken
            if not self._open or len(self._waiting) >= self._max_queue + free:
                return False
            self._waiting.append(group)
            self._changed.notify()
        return True

    def close(self) -> None:
        """Cancel what is under way or waits, and end the thread."""
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting or self._reading or self._rows or not self._open
                )
                if not self._open:
                    break
                self._admit()
            self._read()
            self._step()
            rows = len(self._owners)
            kv_tokens = int(self._cache.lengths[: rows + (self._reading is not None)].sum())
            self._tell(self._watcher.holds, rows, len(self._waiting), kv_tokens)
        for group in (*self._rows, *filter(None, [self._reading]), *self._waiting):
            group.cancel()

    def _admit(self) -> None:
        """Let the request in that has waited longest, once all its branches have room."""
        self._waiting = deque(group for group in self._waiting if group.is_wanted())
        if self._reading is None and self._waiting:
            group = self._waiting[0]
            if len(self._owners) + group.width <= self.max_running:
                self._waiting.popleft()
                self._reading = group
                self._tell(self._watcher.admitted, time.monotonic() - group.arrived)
                self._cache.lengths[len(self._owners)] = 0

    def _read(self) -> None:
        """Read the next stretch of the prompt; after its last one the request is under way."""
        group, row = self._reading, len(self._owners)
        if group is None:
            return
        if not group.is_wanted():
            self._reading = None
            return
        done = int(self._cache.lengths[row])
        stretch = group.prompt[done : done + PREFILL_CHUNK]
        try:
            logits = self.model.step(self._part(row, row + 1), stretch[None])
            if done + len(stretch) < len(group.prompt):
                return
            step = group.choose(logits)
        except Exception as error:
            self._reading = None
            group.deliver(error)
            return
        self._reading = None
        branches = range(row, row + len(step.tokens))
        self._cache.permute(branches, [row] * len(branches))
        self._tell(self._watcher.begun, len(group.prompt), time.monotonic() - group.arrived)
        self._tell(self._watcher.stepped, group.width)
        self._owners += [group] * len(branches)
        self._tokens += step.tokens
        if branches:
            self._rows[group] = list(branches)

    def _step(self) -> None:
        """One more token of every branch under way."""
        for group in list(self._rows):
            if not group.is_wanted():
                self._go_on(group, ENDED)
        if not self._rows:
            return
        tokens = np.array(self._tokens)[:, None]
        try:
            logits = self.model.step(self._part(0, len(tokens)), tokens)
        except Exception as error:
            for group in list(self._rows):
                group.deliver(error)
                self._go_on(group, ENDED)
            return
        self._tell(self._watcher.stepped, len(tokens))
        own = {group: logits[rows] for group, rows in self._rows.items()}  # rows move meanwhile
        for group in own:
            try:
                step = group.choose(own[group])
            except Exception as error:
                group.deliver(error)
                step = ENDED
            self._go_on(group, step)

    def _go_on(self, group: SequenceGroup, step: Step) -> None:
        """Give the group's rows to its next branches, and free those that are too many."""
        rows = self._rows[group]
        kept, spare = rows[: len(step.tokens)], rows[len(step.tokens) :]
        self._cache.permute(kept, [rows[parent] for parent in step.parents])
        for row, token in zip(kept, step.tokens, strict=True):
            self._tokens[row] = token
        self._rows[group] = kept
        for row in sorted(spare, reverse=True):
            self._free(row)
        if not kept:
            del self._rows[group]

    def _free(self, row: int) -> None:
        """The last row under way moves into this one, and that of the prompt up."""
        last = len(self._owners) - 1
        if row != last:
            self._cache.permute([row], [last])
            self._tokens[row], mover = self._tokens[last], self._owners[last]
            self._owners[row] = mover
            self._rows[mover][self._rows[mover].index(last)] = row
        self._owners.pop()
        self._tokens.pop()
        if self._reading is not None:
            self._cache.permute([last], [last + 1])

    def _tell(self, what: Callable[..., None], *figures: float) -> None:
        """A watcher that fails is not the requests' failure."""
        try:
            what(*figures)
        except Exception:
            log.exception("the watcher failed")

    def _part(self, first: int, last: int) -> KVCache:
        if (first, last) not in self._parts:
            self._parts[first, last] = self.model.rows(self._cache, first, last)
        return self._parts[first, last]
