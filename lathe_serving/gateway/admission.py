"""Admission of requests: who may send them, how many, and which of them waits for a slot.

A request passes these, in this order, and is rejected by the first that has no room for it:

1. `Admission.check`: its API key. `LATHE_API_KEYS` names a file with a key per line, which a name
   may follow; keys of the same name are one `Caller`. The names, and never the keys, appear in
   logs, metrics and errors.
2. `Caller.begin`: requests and tokens per minute of that caller. `limits.yaml` in the same folder
   limits keys by their names. Both files are read again when they change.
3. `Admission.track`: concurrent requests of the caller and of all, once the body is here.
4. `Slots.hold`, for each prompt: a slot in the model's running batch. Requests wait here rather
   than in Triton, so that the gateway can estimate their wait, and reject one that is too long.
"""

import asyncio
import hmac
import logging
import math
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from starlette.datastructures import Headers
from starlette.types import Scope

from lathe_base.errors import Code, UserError, explain
from lathe_serving.gateway.errors import ApiError, shutting_down
from lathe_serving.gateway.triton import Model

log = logging.getLogger("lathe")

KEYS_VARIABLE = "LATHE_API_KEYS"
LIMITS_FILE = "limits.yaml"
KEYS_HINT = (
    "write one key per line into it, such as the output of `openssl rand -hex 32`, which a space "
    f"and a name may follow, or unset {KEYS_VARIABLE}"
)
LIMITS_HINT = (
    "write `default:`, and below `keys:` the names of keys, each with requests_per_minute, "
    "tokens_per_minute, concurrent_requests or priority"
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

AHEAD = 1
"""Number of sequences that wait in Triton, so that its batch stays full between two requests."""

DEFAULT_WAIT = 0.5
"""Maximum expected wait, relative to the recent time per prompt."""

EWMA_ALPHA = 0.1
"""Weight of the newest time in the moving average of the time per prompt."""

LOW_SHARE = 8
"""One in so many prompts that get slots is of low priority, if any of these wait."""

Lane = deque[tuple[int, asyncio.Future[None]]]
"""Waiting prompts: the number of slots that each needs, and what wakes it."""


@dataclass(frozen=True)
class Limits:
    """Limits of one gateway.

    Attributes:
        requests: requests in flight; further ones are rejected at once.
        prompts: per request.
        body: per request, in bytes.
        bodies: all request bodies being received, in bytes.
        connections: open connections; idle ones are closed for new ones.
    """

    requests: int = 256
    prompts: int = 256
    body: int = 4 * 2**20
    bodies: int = 128 * 2**20
    connections: int = 8192


class KeyLimits(BaseModel):
    """The limits of one name.

    Attributes:
        tokens_per_minute: of prompts and answers. They are counted when an answer ends, so requests
            that run at the same time may exceed it together.
        priority: requests with a low one get a slot when no others wait for it, see `Slots`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    concurrent_requests: PositiveInt | None = None
    priority: Literal["normal", "low"] = "normal"


class LimitsFile(BaseModel):
    """The contents of `limits.yaml`; the fields of a name replace those of the default."""

    model_config = ConfigDict(extra="forbid")

    default: KeyLimits = KeyLimits()
    keys: dict[str, KeyLimits] = {}

    def find(self, name: str) -> KeyLimits:
        """The limits of a name."""
        overrides = self.keys[name].model_dump(exclude_unset=True) if name in self.keys else {}
        return self.default.model_copy(update=overrides)


class Budget:
    """A token bucket: what may be used per minute, refilled continuously.

    Its level may become negative, as the tokens of an answer are known at its end.
    """

    def __init__(self) -> None:
        self._used, self._at = 0.0, time.monotonic()

    def seconds_until(self, per_minute: int) -> float:
        """Seconds until one more may be used: 0 if it may now."""
        now = time.monotonic()
        # Refilled when it is looked at: no timer runs for callers that send nothing.
        self._used = max(0.0, self._used - (now - self._at) * per_minute / 60)
        self._at = now
        return max(0.0, self._used + 1 - per_minute) * 60 / per_minute

    def use(self, count: int) -> None:
        """Use some, whether they are left or not."""
        self._used += count


class Caller:
    """Whoever sends one of the keys with a name.

    Attributes:
        name: that of the keys; empty where no key is required.
        limits: those of the name, replaced when the file changes; what is used stays used.
        in_flight: number of requests in flight.
    """

    def __init__(self, name: str, limits: KeyLimits) -> None:
        self.name, self.limits, self.in_flight = name, limits, 0
        self._requests, self._tokens = Budget(), Budget()

    @property
    def is_low(self) -> bool:
        """Whether its requests have the lower priority."""
        return self.limits.priority == "low"

    def begin(self) -> None:
        """Count a request.

        Raises:
            ApiError: it exceeds the requests or tokens per minute.
        """
        limits = self.limits
        for what, per_minute, budget in (
            ("requests", limits.requests_per_minute, self._requests),
            ("tokens", limits.tokens_per_minute, self._tokens),
        ):
            if per_minute and (wait := budget.seconds_until(per_minute)):
                raise self.exceeded(f"{per_minute} {what} per minute", math.ceil(wait))
        # Only now: a request that is rejected uses nothing up.
        self._requests.use(1)

    def charge(self, tokens: int) -> None:
        """Count the tokens of a request, at its end, when their number is known."""
        self._tokens.use(tokens)

    def exceeded(self, limit: str, retry_after: int = 1) -> ApiError:
        """The error of a request above one of the limits."""
        what = f"the key {self.name} is limited to {limit}"
        return ApiError(429, what, code="rate_limit_exceeded", retry_after=retry_after)


ANYBODY = Caller("", KeyLimits())
"""Who sends requests where no key is required, or none of the valid ones."""


class ApiKeys:
    """The keys of a file; empty lines and lines that begin with # are skipped. A key without a name
    is called `line-N`, and keys of the same name share its limits.

    Raises:
        UserError: a file cannot be read or is invalid, there are no keys, or limits are for a name
            that no key has.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._callers = path, dict[str, Caller]()
        self._stamps = self._stamp()
        self._names = self._read()

    def find(self, header: str) -> Caller | None:
        """The caller whose key an Authorization header has, in constant time."""
        scheme, _, key = header.partition(" ")
        digest_sent = sha256(key.strip().encode()).digest()
        try:
            if (stamps := self._stamp()) != self._stamps:
                self._names, self._stamps = self._read(), stamps
        except (OSError, UserError) as error:
            log.warning("keeping the previous API keys: %s", error)
        # All keys are compared, as the time must not say which key it was.
        right = [
            name for digest, name in self._names.items() if hmac.compare_digest(digest_sent, digest)
        ]
        return self._callers[right[0]] if right and scheme.lower() == "bearer" else None

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        about = []
        for path in (self._path, self._path.with_name(LIMITS_FILE)):
            # The inode too: a file that is replaced within a tick has the same time and maybe size.
            status = path.stat() if path.exists() else None
            about.append(status and (status.st_ino, status.st_mtime_ns, status.st_size))
        return about

    def _read(self) -> dict[bytes, str]:
        """The names of the keys by their digests; brings the callers up to date."""
        where = f"{KEYS_VARIABLE} {self._path}"
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UserError(f"{where}: {error}", KEYS_HINT, explain(error).code) from None
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: {error}", KEYS_HINT, Code.MALFORMED) from None
        names = {}
        for number, line in enumerate(lines, 1):
            key, *rest = line.split() or [""]
            if not key or key.startswith("#"):
                continue
            name = rest[0] if rest else f"line-{number}"
            if len(rest) > 1 or not NAME.fullmatch(name):
                # The line itself is not quoted: it has a key.
                raise UserError(
                    f"{where}: line {number} is not a key and a name", KEYS_HINT, Code.MALFORMED
                )
            names[sha256(key.encode()).digest()] = name
        if not names:
            raise UserError(f"{where}: no keys", KEYS_HINT, Code.MALFORMED)

        limits, path = LimitsFile(), self._path.with_name(LIMITS_FILE)
        if path.exists():
            try:
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
                limits = LimitsFile.model_validate({} if content is None else content)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                field = ".".join(map(str, first["loc"]))
                raise UserError(
                    f"{path}: {field}: {first['msg']}", LIMITS_HINT, Code.INVALID_VALUE
                ) from None
            except OSError as error:
                raise UserError(f"{path}: {error}", LIMITS_HINT, explain(error).code) from None
            except (UnicodeDecodeError, yaml.YAMLError) as error:
                raise UserError(f"{path}: {error}", LIMITS_HINT, Code.MALFORMED) from None
        if unknown := limits.keys.keys() - set(names.values()):
            what = f"{path}: no key has the name {min(unknown)}"
            raise UserError(
                what, f"write the name after its key in {self._path}", Code.UNKNOWN_NAME
            )

        # A name keeps its `Caller`, and so what it has used, whatever changes in the files.
        for name in set(names.values()):
            caller = self._callers.setdefault(name, Caller(name, KeyLimits()))
            caller.limits = limits.find(name)
        return names


class Admission:
    """Keys, the number of requests in flight, and the deadline that ends them; one for a gateway.

    Args:
        keys: None allows everybody.

    Attributes:
        in_flight: number of requests in flight.
        receiving: bytes of the bodies that are not complete, see `connections.read_body`.
        is_draining: whether the gateway is shutting down: it completes requests in flight until
            `expire`, and rejects new ones.
    """

    def __init__(self, limits: Limits, keys: ApiKeys | None) -> None:
        self.limits, self._keys = limits, keys
        self.in_flight = self.receiving = 0
        self.is_draining = self._has_expired = False
        self._timeouts: set[asyncio.Timeout] = set()  # of the requests in flight

    def check(self, scope: Scope) -> Caller:
        """Whose key the request has.

        Raises:
            ApiError: keys are required, and the request has no valid one.
        """
        if self._keys is None:
            return ANYBODY
        authorization = Headers(scope=scope).get("authorization", "")
        caller = self._keys.find(authorization)
        if caller is None:
            what = "invalid API key" if authorization else "no API key: send Authorization: Bearer"
            raise ApiError(401, what, code="invalid_api_key")
        return caller

    @contextmanager
    def track(self, caller: Caller) -> Iterator[None]:
        """Count a request in flight while the block runs.

        Raises:
            ApiError: there are too many, of this caller or of all, or the gateway is shutting down.
        """
        if self.is_draining:
            raise shutting_down()
        if self.in_flight >= self.limits.requests:
            what = f"{self.limits.requests} requests are already being answered"
            raise ApiError(503, what, code="overloaded")
        limit = caller.limits.concurrent_requests
        if limit is not None and caller.in_flight >= limit:
            raise caller.exceeded(f"{limit} concurrent requests")
        self.in_flight += 1
        caller.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            caller.in_flight -= 1

    @asynccontextmanager
    async def until_deadline(self) -> AsyncIterator[None]:
        """Run the block until the deadline of a gateway that shuts down, which is not known in
        advance.

        Raises:
            ApiError: the deadline has passed.
        """
        try:
            async with asyncio.timeout(0 if self._has_expired else None) as timeout:
                self._timeouts.add(timeout)
                try:
                    yield
                finally:
                    self._timeouts.remove(timeout)
        except TimeoutError:
            if not timeout.expired():  # the block's own
                raise
            raise shutting_down() from None

    def expire(self) -> None:
        """End the blocks of `until_deadline` that are running, and those that are entered from now
        on."""
        self._has_expired = True
        for timeout in self._timeouts:  # each cancels its own task, in the next turn of the loop
            timeout.reschedule(asyncio.get_running_loop().time())


class Slots:
    """The slots of one model.

    A request is rejected if the expected wait for its first sequence exceeds `model.max_wait`. By
    Little's law the wait is the number of sequences ahead of it, times the recent time per prompt,
    divided by the number of slots. Further prompts of an accepted request take turns with the first
    prompts of others.

    Requests of low priority wait for all others, except that every LOW_SHARE-th prompt is theirs.
    """

    def __init__(self, model: Model) -> None:
        self._name, self._max_wait = model.name, model.max_wait
        self._size = model.max_running + AHEAD
        self._taken = 0
        self._first: Lane = deque()
        self._further: Lane = deque()
        self._low: Lane = deque()
        self._turn = False  # of the further ones
        self._since_low = 0  # prompts
        self._recent = 0.0

    def waiting(self) -> int:
        """Number of waiting sequences."""
        lanes = self._first, self._further, self._low
        return sum(width for lane in lanes for width, _ in lane)

    def expected_wait(self, is_low: bool = False) -> float:
        """Expected wait of a new request, in seconds."""
        return self._ahead(is_low) * self._recent / self._size

    def require_room(self, is_low: bool = False) -> None:
        """Reject a request that would have to wait for too long.

        Args:
            is_low: whether it has low priority.

        Raises:
            ApiError: with the seconds after which there should be room.
        """
        wait = self.expected_wait(is_low)
        if self._max_wait is None:  # of the recent time, which need not be known for this
            is_long = self._ahead(is_low) > DEFAULT_WAIT * self._size
        else:
            is_long = wait > self._max_wait
        if is_long:
            what = f"{self._name} is busy: {self.waiting()} sequences are waiting"
            raise ApiError(503, what, code="overloaded", retry_after=max(1, math.ceil(wait)))

    @asynccontextmanager
    async def hold(self, width: int, is_first: bool, is_low: bool = False) -> AsyncIterator[None]:
        """Wait for `width` slots (all of them, if there are fewer), and hold them while the block
        runs.

        Args:
            is_first: whether the prompt is the first of its request.
            is_low: whether it has low priority.

        Raises:
            ApiError: a first prompt, and there is no room.
        """
        width = min(width, self._size)
        if is_first:
            # In the same turn of the event loop as the place in the lane: of many requests that
            # arrive at once, each sees those before it.
            self.require_room(is_low)
        lane = self._low if is_low else self._first if is_first else self._further
        turn = (width, asyncio.get_running_loop().create_future())
        lane.append(turn)
        self._admit()
        try:
            await turn[1]
        except asyncio.CancelledError:
            # The client has left. It may have got its slots in this turn of the loop, before its
            # task ran again: then nobody else would give them back.
            if not turn[1].cancelled():
                self._give(width)
            elif turn in lane:
                lane.remove(turn)
                self._admit()
            raise
        started = time.monotonic()
        try:
            yield
            seconds = time.monotonic() - started
            # The first time is taken whole: there is nothing to average it with.
            self._recent += (seconds - self._recent) * (EWMA_ALPHA if self._recent else 1.0)
        finally:
            self._give(width)

    def _ahead(self, is_low: bool) -> int:
        if is_low:
            return self.waiting()
        # Each of them may let one of the further prompts go first, as the two take turns.
        return sum(width for width, _ in self._first) * (2 if self._further else 1)

    def _give(self, width: int) -> None:
        self._taken -= width
        self._admit()

    def _admit(self) -> None:
        while self._first or self._further or self._low:
            # Alternate between the first two; an empty one gives its turn to the other.
            lane = (self._further if self._turn else self._first) or self._first or self._further
            if not lane or (self._low and self._since_low >= LOW_SHARE - 1):
                lane = self._low
            width, future = lane[0]
            if future.cancelled():  # and its task has not run since
                lane.popleft()
                continue
            if self._taken + width > self._size:
                return  # narrower ones behind it wait, or a wide one would never get its slots
            lane.popleft()
            if lane is not self._low:
                self._turn = lane is self._first
            self._since_low = 0 if lane is self._low else self._since_low + 1
            self._taken += width
            future.set_result(None)
