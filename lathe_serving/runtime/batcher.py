"""Continuous batching: requests join and leave a running batch between two steps.

One thread owns the model. Each of its steps decodes a token for every branch of every running
request, and reads a chunk of a prompt in the same pass over the weights, so neither a long prompt
nor a long generation blocks the others. Keys and values live in one buffer with one row (slot) per
branch; running branches occupy the first rows, and prompts being read the last ones.

The order of prompts: the one with the fewest tokens left is read first, so that a short prompt
waits for at most one chunk of a long one; but a step after which the oldest request has not been
served begins with that request, so that at least every other step is its own and nobody starves.
Prompts of equal length are read in the order of their arrival.

The size of chunks: with all slots taken, a step reads at most MIXED_CHUNK tokens. These saturate a
CPU's arithmetic, so larger chunks would not read prompts faster and only increase the inter-token
latency of others. For every free slot it reads TOKENS_PER_SLOT more, which takes about as long as
decoding in that slot would, so that all steps have the same bound. Prompts share this budget: they
are read one after another, the last one together with decoding. A prompt that exceeds the whole
budget does not share it, as the step would take longer for the others' first tokens. A step that
decodes nothing reads at most PREFILL_CHUNK.

Source: iteration-level scheduling, Orca (Yu et al., OSDI 2022); chunked prefill in mixed batches,
Sarathi-Serve (Agrawal et al., OSDI 2024).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from lathe_serving.runtime.contract import Watcher
from lathe_serving.runtime.exported_model import ExportedModel
from lathe_serving.runtime.kv_cache import KVCache, MixedCaches, PrefixCache
from lathe_serving.runtime.sequence_group import SequenceGroup, Step

log = logging.getLogger("lathe")

PREFILL_CHUNK = 128  # most prompt tokens of a step that decodes nothing
MIXED_CHUNK = 64  # most prompt tokens of a step that decodes in all slots
TOKENS_PER_SLOT = 2  # prompt tokens that take as long as decoding a branch
MIN_CHUNK_TOKENS = 16  # a shorter one takes as long as this one: both read all weights
ENDED = Step([], [])


class Batcher:
    """Runs at most `max_running` branches at a time; up to `max_queue` requests wait for a slot,
    and get one in the order of their arrival.

    The KV cache is bounded: `max_running` rows of `n_positions` tokens, whose memory the system
    allocates on first use, and `prefix_bytes` for shared prefixes of prompts.

    If it `speculates`, a branch that runs alone decodes drafts of several tokens.
    """

    def __init__(
        self,
        model: ExportedModel,
        max_running: int,
        max_queue: int,
        prefix_bytes: int = 0,
        speculates: bool = False,
        watcher: Watcher | None = None,
    ) -> None:
        self.model, self.max_running, self._max_queue = model, max_running, max_queue
        self._speculates, self._watcher = speculates, watcher or Watcher()
        self._cache = model.start(max_running)
        self._prefixes = PrefixCache(prefix_bytes)
        self._parts: dict[tuple[int, int], KVCache] = {}  # views of it, by their rows
        self._pairs: dict[tuple[int, int], MixedCaches] = {}
        self._waiting: deque[SequenceGroup] = deque()
        self._reading: dict[SequenceGroup, int] = {}  # rows of the prompts being read
        self._owes_oldest = False  # whether the next step begins with the oldest request
        self._owners: list[SequenceGroup] = []  # of the occupied rows
        self._tokens: list[int] = []  # last token of each row
        self._rows: dict[SequenceGroup, list[int]] = {}  # rows of its branches, in their order
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, *groups: SequenceGroup) -> bool:
        """Queue requests; returns False immediately when the queue is full. Which steps several
        requests share depends on the order given only, not on when each arrives."""
        with self._changed:
            room = self._max_queue + self._free_slots() - len(self._waiting)
            if not self._open or len(groups) > room:
                return False
            self._waiting.extend(groups)
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
            # Without the lock: nobody who submits waits for a step.
            self._step()
            rows = len(self._owners)
            kv_tokens = int(self._cache.lengths[[*range(rows), *self._reading.values()]].sum())
            kv_usage = kv_tokens / (self.max_running * self.model.n_positions)
            self._notify_watcher(self._watcher.holds, rows, len(self._waiting), kv_tokens, kv_usage)
        for group in (*self._rows, *self._reading, *self._waiting):
            group.cancel()

    def _free_slots(self) -> int:
        """Slots that neither running branches take nor those of the prompts being read."""
        reading = list(self._reading)  # another thread may be changing it
        return self.max_running - len(self._owners) - sum(group.width for group in reading)

    def _step(self) -> None:
        """Decode one token for every running branch, and read as much of the prompts as fits."""
        self._drop_cancelled()
        # How much is read at most: see the size of chunks above.
        free = self.max_running - len(self._owners)
        budget = MIXED_CHUNK + TOKENS_PER_SLOT * free if self._rows else PREFILL_CHUNK
        plan = self._plan(budget)
        for group, size in plan[:-1]:
            self._read(group, self._chunk(group, size))
        if not plan:
            self._decode()
            return
        # The last chunk shares its pass over the weights with decoding, if the graph can do that
        # and nobody wants logits at every token of the prompt.
        group, size = plan[-1]
        chunk = self._chunk(group, size)
        if not self._rows:
            self._read(group, chunk)
        elif self.model.can_mix and not group.scores_prompt:
            self._mix(group, chunk)
        else:
            self._read(group, chunk)
            self._decode()

    def _drop_cancelled(self) -> None:
        for group in list(self._rows):
            if not group.keeps_running():
                self._assign_rows(group, ENDED)
        for group in list(self._reading):
            if not group.keeps_running():
                del self._reading[group]
        with self._changed:
            self._waiting = deque(group for group in self._waiting if group.keeps_running())

    def _plan(self, budget: int) -> list[tuple[SequenceGroup, int]]:
        """The requests whose prompts are read in this step, with the number of tokens of each: at
        most `budget` in total, where a short chunk counts as MIN_CHUNK_TOKENS."""
        # Those that are being read, and those for which there are slots; in the order of arrival,
        # so that a wide request is not overtaken for ever by narrow ones.
        readable, free = list(self._reading), self._free_slots()
        for group in self._waiting:
            free -= group.width
            if free < 0:
                break
            readable.append(group)
        if not readable:
            return []

        # The shortest first, but the oldest at every other step; see above.
        readable.sort(key=lambda group: group.arrived)
        unread = {group: self._unread(group) for group in readable}
        oldest, order = readable[0], sorted(readable, key=unread.__getitem__)
        if self._owes_oldest:
            order.sort(key=lambda group: group is not oldest)
        self._owes_oldest = order[0] is not oldest

        # As many whole prompts as the budget has room for.
        plan: list[tuple[SequenceGroup, int]] = []
        total = budget
        for group in order:
            if plan and unread[group] > total:
                break  # it would only delay the first tokens of those before it
            size = min(unread[group], budget)
            plan.append((group, size))
            budget -= max(size, MIN_CHUNK_TOKENS)
            if budget < MIN_CHUNK_TOKENS:
                break
        return plan

    def _unread(self, group: SequenceGroup) -> int:
        """Tokens of a prompt that are still to be read."""
        if group in self._reading:
            return len(group.prompt) - int(self._cache.lengths[self._reading[group]])
        stored = 0 if group.scores_prompt else self._prefixes.stored(group.prompt)
        return len(group.prompt) - stored

    def _chunk(self, group: SequenceGroup, size: int) -> NDArray[np.int64]:
        """The next `size` tokens of a prompt at most; a request that waits is admitted."""
        if group not in self._reading:
            # Not before its turn: requests before it may have stored the beginning of its prompt.
            with self._changed:
                self._waiting.remove(group)
                self._reading[group] = self._last_free_row(len(self._owners))
            self._notify_watcher(self._watcher.admitted, time.monotonic() - group.arrived)
            part = self._part(self._reading[group])
            part.lengths[0] = 0
            if not group.scores_prompt:
                group.cached_tokens = self._prefixes.load(group.prompt, part)
        done = int(self._cache.lengths[self._reading[group]])
        end = done + size
        if end == len(group.prompt) - 1 and size > 1:
            end -= 1  # a last token alone may round differently, see `PrefixCache.load`
        return group.prompt[done:end]

    def _last_free_row(self, first: int) -> int:
        """The last row, `first` or after it, that holds no prompt."""
        used = set(self._reading.values())
        return next(row for row in reversed(range(first, self.max_running)) if row not in used)

    def _read(self, group: SequenceGroup, chunk: NDArray[np.int64]) -> None:
        """Read a chunk of a prompt alone."""
        part = self._part(self._reading[group])
        try:
            if group.scores_prompt:  # logits after every token, not only the last one
                done = int(part.lengths[0])
                every = self.model.read(part, chunk)
                group.read(done, every)
                logits = every[-1:]
            else:
                logits = self.model.step(part, chunk[None])
        except Exception as error:
            self._fail_prompt(group, error)
            return
        self._finish_chunk(group, logits)

    def _mix(self, group: SequenceGroup, chunk: NDArray[np.int64]) -> None:
        """Read a chunk of a prompt and decode, in one pass."""
        is_last = len(chunk) == self._unread(group)
        try:
            key = len(self._owners), self._reading[group]
            if key not in self._pairs:  # binding the buffers of a pair takes time
                rows, prompt = self._part(0, key[0]), self._part(self._reading[group])
                self._pairs[key] = self.model.pair(rows, prompt)
            pair, tokens = self._pairs[key], np.array(self._tokens)
            logits, prompt_logits = self.model.mix(pair, tokens, chunk, is_last)
        except Exception as error:
            # The prompt may be to blame: the others decode without it.
            self._fail_prompt(group, error)
            self._decode()
            return
        # Before the new request joins: this step has logits for those that were decoding.
        running = dict(self._rows)
        if is_last:
            self._finish_chunk(group, prompt_logits)
        self._choose(running, logits)

    def _fail_prompt(self, group: SequenceGroup, error: Exception) -> None:
        group.deliver(error)
        del self._reading[group]

    def _finish_chunk(self, group: SequenceGroup, logits: NDArray[np.float32]) -> None:
        """Store the tokens that were read. After the last chunk of a prompt, with logits (1, V),
        its request is running."""
        row, first = self._reading[group], len(self._owners)
        done = int(self._cache.lengths[row])
        try:
            self._prefixes.store(group.prompt[:done], self._part(self._reading[group]))
            if done < len(group.prompt):
                return
            step = group.choose(logits)
        except Exception as error:
            self._fail_prompt(group, error)
            return
        del self._reading[group]
        # Its branches get the rows after those that are occupied. Prompts that are being read there
        # move to the last free rows, in the same copy.
        branches = range(first, first + len(step.tokens))
        targets, sources = [*branches], [row] * len(branches)
        for other, its_row in self._reading.items():
            if its_row in branches:
                self._reading[other] = self._last_free_row(branches.stop)
                targets.append(self._reading[other])
                sources.append(its_row)
        self._cache.permute(targets, sources)
        seconds = time.monotonic() - group.arrived
        self._notify_watcher(self._watcher.begun, len(group.prompt), group.cached_tokens, seconds)
        self._notify_watcher(self._watcher.stepped, group.width)
        self._owners += [group] * len(branches)
        self._tokens += step.tokens
        if branches:
            self._rows[group] = list(branches)

    def _decode(self) -> None:
        """Decode one token for every running branch, or several for one that is alone."""
        if not self._rows:
            return
        # A draft makes a step longer: only for a branch that is alone, while no request waits.
        is_alone = len(self._owners) == 1 and not self._reading and not self._waiting
        draft = self._owners[0].draft() if self._speculates and is_alone else []
        try:
            part = self._part(0, len(self._tokens))
            length = int(part.lengths[0])
            if draft:
                logits = self.model.read(part, np.array([*self._tokens, *draft]))
            else:
                logits = self.model.step(part, np.array(self._tokens)[:, None])
        except Exception as error:
            for group in list(self._rows):
                group.deliver(error)
                self._assign_rows(group, ENDED)
            return
        if not draft:
            self._choose(dict(self._rows), logits)
            return

        # Choose the draft's tokens one by one from the logits, as without a draft, for as long as
        # they match it. The last logits, after a whole draft, choose one token more.
        group, accepted = self._owners[0], 0
        for accepted, drafted in enumerate((*draft, None)):
            part.lengths[0] = length + accepted + 1  # what comes after is forgotten
            self._choose({group: [0]}, logits[accepted : accepted + 1])
            self._drop_cancelled()
            if group not in self._rows or self._tokens[0] != drafted:
                break
        self._notify_watcher(self._watcher.drafted, len(draft), accepted)

    def _choose(
        self, running: Mapping[SequenceGroup, list[int]], logits: NDArray[np.float32]
    ) -> None:
        """Choose the next tokens of requests whose branches have these rows of logits (B, V)."""
        self._notify_watcher(self._watcher.stepped, sum(map(len, running.values())))
        # Copied first, because rows move meanwhile.
        group_logits = {group: logits[rows] for group, rows in running.items()}
        for group in group_logits:
            try:
                step = group.choose(group_logits[group])
            except Exception as error:
                group.deliver(error)
                step = ENDED
            self._assign_rows(group, step)

    def _assign_rows(self, group: SequenceGroup, step: Step) -> None:
        """Assign the group's rows to its next branches, and free the surplus."""
        rows = self._rows[group]
        kept, spare = rows[: len(step.tokens)], rows[len(step.tokens) :]
        # A beam may continue another's text: its row becomes a copy of the parent's.
        self._cache.permute(kept, [rows[parent] for parent in step.parents])
        for row, token in zip(kept, step.tokens, strict=True):
            self._tokens[row] = token
        self._rows[group] = kept
        # Running branches stay in the first rows: the last one moves into a row that is freed. From
        # the end, so that it is one that stays.
        for row in sorted(spare, reverse=True):
            last = len(self._owners) - 1
            if row != last:
                self._cache.permute([row], [last])
                self._tokens[row], mover = self._tokens[last], self._owners[last]
                self._owners[row] = mover
                self._rows[mover][self._rows[mover].index(last)] = row
            self._owners.pop()
            self._tokens.pop()
        if not kept:
            del self._rows[group]

    def _notify_watcher(self, what: Callable[..., None], *values: float) -> None:
        """Call the watcher; its errors must not affect requests."""
        try:
            what(*values)
        except Exception:
            log.exception("the watcher failed")

    def _part(self, first: int, last: int | None = None) -> KVCache:
        """A view of the cache's rows `first` to `last`, or of one row."""
        rows = first, first + 1 if last is None else last
        if rows not in self._parts:  # binding a runtime to memory takes time
            self._parts[rows] = self.model.rows(self._cache, *rows)
        return self._parts[rows]
