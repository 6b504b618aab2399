"""The files in a folder that speak of it from outside its metadata: attestations and a signature.

They are written after the metadata, which therefore cannot list them. They belong to the folder if
their payload names the SHA-256 of its metadata.
"""

import base64
import json
from pathlib import Path

ATTESTATIONS = "provenance.intoto.jsonl"
"""DSSE envelopes, one a line."""

SIGNATURE = "model.sig"
"""A Sigstore bundle of OpenSSF Model Signing."""

NAMES = (ATTESTATIONS, SIGNATURE)


def names_digest(path: Path, sha256: str) -> bool:
    """Whether `path` is a file of these whose first payload names this digest, with no line of
    another kind."""
    try:
        payloads = [_payload(json.loads(line)) for line in path.read_bytes().splitlines()]
        return bool(payloads) and sha256.encode() in payloads[0]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _payload(values: dict[str, object]) -> bytes:
    envelope = values.get("dsseEnvelope", values)
    return base64.b64decode(envelope["payload"])  # type: ignore[index]
