"""API keys: a file with one key per line, read again when it changes."""

import hmac
import logging
from hashlib import sha256
from pathlib import Path

from lathe_base.errors import UserError

log = logging.getLogger("lathe")

KEYS_VARIABLE = "LATHE_API_KEYS"
HINT = (
    "write one key per line into it, such as the output of `openssl rand -hex 32`, or unset "
    f"{KEYS_VARIABLE}"
)


class ApiKeys:
    """The keys of a file; empty lines and lines that begin with # are skipped.

    Raises:
        UserError: the file cannot be read, or has no keys.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests, self._stamp = _read(path), _stamp(path)

    def accept(self, header: str) -> bool:
        """Whether an Authorization header has one of the keys, in constant time."""
        scheme, _, key = header.partition(" ")
        given = sha256(key.strip().encode()).digest()
        try:
            if (stamp := _stamp(self._path)) != self._stamp:
                self._digests, self._stamp = _read(self._path), stamp
        except (OSError, UserError) as error:
            log.warning("keeping the previous API keys: %s", error)
        # All keys are compared before `any`, which would stop at the first: the time must not say
        # which key it was.
        right = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(right) and scheme.lower() == "bearer"


def _stamp(path: Path) -> tuple[int, int, int]:
    about = path.stat()
    return about.st_ino, about.st_mtime_ns, about.st_size


def _read(path: Path) -> list[bytes]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{KEYS_VARIABLE} {path}: {error}", HINT) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UserError(f"{KEYS_VARIABLE} {path}: no keys", HINT)
    return [sha256(key.encode()).digest() for key in keys]
