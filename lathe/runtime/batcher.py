"""Continuous batching: requests join and leave a running batch between two steps.

One thread owns the model. It alternates between prefilling one chunk of the next prompt and one
decoding step for every branch of every running request, so neither a long prompt nor a long
generation blocks the others. Keys and values live in one buffer with one row (slot) per branch;
running branches occupy the first rows, on which a step runs, and the prompt being prefilled has the
row behind them.

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

PREFILL_CHUNK = 128  # prompt tokens that are prefilled between two decoding steps
ENDED = Step([], [])


class Watcher:
    """Receives a batcher's events, on its thread; this base class ignores them. Seconds count from
    a request's arrival."""

    def admitted(self, waited: float) -> None:
        """A request got its slots."""

    def begun(self, prompt_tokens: int, seconds: float) -> None:
        """A prompt was prefilled and its first token chosen."""

    def stepped(self, tokens: int) -> None:
        """A decoding step gave this many branches a token each."""

    def holds(self, running: int, waiting: int, kv_tokens: int) -> None:
        """The load between two steps: running branches, waiting requests, cached tokens."""


class Batcher:
    """Runs at most `max_running` branches at a time; up to `max_queue` requests wait for a slot,
    first come, first served.

    The KV cache is bounded: `max_running` rows of `n_positions` tokens, whose memory is taken from
    the system when it is first touched.
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
        self._owners: list[SequenceGroup] = []  # of the occupied rows
        self._tokens: list[int] = []  # last token of each row
        self._rows: dict[SequenceGroup, list[int]] = {}  # rows of its branches, in their order
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, group: SequenceGroup) -> bool:
        """Queue a request; returns False immediately when the queue is full."""
        with self._changed:
            taken = len(self._owners) + (self._reading.width if self._reading else 0)
            free = self.max_running - taken
            if not self._open or len(self._waiting) >= self._max_queue + free:
                return False
            self._waiting.append(group)
            self._changed.notify()
        return True

    def close(self) -> None:
        """Cancel all running and waiting requests, and end the thread."""
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
        """Admit the request at the head of the queue once all its branches fit."""
        self._waiting = deque(group for group in self._waiting if group.is_wanted())
        if self._reading is None and self._waiting:
            group = self._waiting[0]
            if len(self._owners) + group.width <= self.max_running:
                self._waiting.popleft()
                self._reading = group
                self._tell(self._watcher.admitted, time.monotonic() - group.arrived)
                self._cache.lengths[len(self._owners)] = 0

    def _read(self) -> None:
        """Prefill the next chunk of the prompt; after the last one the request is running."""
        group, row = self._reading, len(self._owners)
        if group is None:
            return
        if not group.is_wanted():
            self._reading = None
            return
        done = int(self._cache.lengths[row])
        stretch = group.prompt[done : done + PREFILL_CHUNK]
        try:
            part = self._part(row, row + 1)
            if group.scores_prompt:
                every = self.model.read(part, stretch)
                group.read(done, every)
                logits = every[-1:]
            else:
                logits = self.model.step(part, stretch[None])
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
        """Decode one token for every running branch."""
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
        """Assign the group's rows to its next branches, and free the surplus."""
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
        """Free a row: the last running one moves into it, and the prompt's row moves up."""
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
        """Call the watcher; its failure must not fail the requests."""
        try:
            what(*figures)
        except Exception:
            log.exception("the watcher failed")

    def _part(self, first: int, last: int) -> KVCache:
        if (first, last) not in self._parts:
            self._parts[first, last] = self.model.rows(self._cache, first, last)
        return self._parts[first, last]
