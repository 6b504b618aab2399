"""API keys, and how much each may be used.

`LATHE_API_KEYS` names a file with a key per line, which a name may follow. `limits.yaml` in the
same folder limits keys by their names. Both are read again when they change. The names, and never
the keys, appear in logs, metrics and errors.
"""

import hmac
import logging
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from lathe_base.errors import UserError
from lathe_serving.gateway.errors import ApiError

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
        own = self.keys[name].model_dump(exclude_unset=True) if name in self.keys else {}
        return self.default.model_copy(update=own)


class Budget:
    """A token bucket: what may be used per minute, refilled continuously.

    Its level may become negative, as the tokens of an answer are known at its end.
    """

    def __init__(self) -> None:
        self._used, self._at = 0.0, time.monotonic()

    def seconds_until(self, per_minute: int) -> float:
        """Seconds until one more may be used: 0 if it may now."""
        now = time.monotonic()
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
    """

    def __init__(self, name: str, limits: KeyLimits) -> None:
        self.name, self.limits = name, limits
        self._requests, self._tokens, self._in_flight = Budget(), Budget(), 0

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
                raise self._exceeded(f"{per_minute} {what} per minute", math.ceil(wait))
        self._requests.use(1)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count a request in flight while the block runs.

        Raises:
            ApiError: there are too many.
        """
        limit = self.limits.concurrent_requests
        if limit is not None and self._in_flight >= limit:
            raise self._exceeded(f"{limit} concurrent requests")
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def charge(self, tokens: int) -> None:
        """Count the tokens of a request."""
        self._tokens.use(tokens)

    def _exceeded(self, limit: str, retry_after: int = 1) -> ApiError:
        what = f"the key {self.name} is limited to {limit}"
        return ApiError(429, what, code="rate_limit_exceeded", retry_after=retry_after)


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
        given = sha256(key.strip().encode()).digest()
        try:
            if (stamps := self._stamp()) != self._stamps:
                self._names, self._stamps = self._read(), stamps
        except (OSError, UserError) as error:
            log.warning("keeping the previous API keys: %s", error)
        # All keys are compared, as the time must not say which key it was.
        right = [name for digest, name in self._names.items() if hmac.compare_digest(given, digest)]
        return self._callers[right[0]] if right and scheme.lower() == "bearer" else None

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        about = []
        for path in (self._path, self._path.with_name(LIMITS_FILE)):
            found = path.stat() if path.exists() else None
            about.append(found and (found.st_ino, found.st_mtime_ns, found.st_size))
        return about

    def _read(self) -> dict[bytes, str]:
        """The names of the keys by their digests; brings the callers up to date."""
        names = _read_keys(self._path)
        limits_path = self._path.with_name(LIMITS_FILE)
        limits = _read_limits(limits_path) if limits_path.exists() else LimitsFile()
        if unknown := limits.keys.keys() - set(names.values()):
            what = f"{limits_path}: no key has the name {min(unknown)}"
            raise UserError(what, f"write the name after its key in {self._path}")
        for name in set(names.values()):
            caller = self._callers.setdefault(name, Caller(name, KeyLimits()))
            caller.limits = limits.find(name)
        return names


def _read_keys(path: Path) -> dict[bytes, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{KEYS_VARIABLE} {path}: {error}", KEYS_HINT) from None
    names = {}
    for number, line in enumerate(lines, 1):
        key, *rest = line.split() or [""]
        if not key or key.startswith("#"):
            continue
        name = rest[0] if rest else f"line-{number}"
        if len(rest) > 1 or not NAME.fullmatch(name):
            what = f"{KEYS_VARIABLE} {path}: line {number} is not a key and a name"
            raise UserError(what, KEYS_HINT)
        names[sha256(key.encode()).digest()] = name
    if not names:
        raise UserError(f"{KEYS_VARIABLE} {path}: no keys", KEYS_HINT)
    return names


def _read_limits(path: Path) -> LimitsFile:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return LimitsFile.model_validate({} if content is None else content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}: {first['msg']}", LIMITS_HINT) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {error}", LIMITS_HINT) from None
