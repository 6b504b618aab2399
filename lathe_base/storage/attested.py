"""The files of a folder that its metadata does not list: attestations and a signature.

They are written after the metadata, and belong to the folder if their payload contains the SHA-256
of its metadata.
"""

import base64
import json
from pathlib import Path

ATTESTATIONS = "provenance.intoto.jsonl"
"""DSSE envelopes, one per line."""

SIGNATURE = "model.sig"
"""A Sigstore bundle of OpenSSF Model Signing."""

NAMES = (ATTESTATIONS, SIGNATURE)


def names_digest(path: Path, sha256: str) -> bool:
    """Whether `path` is such a file, its first payload contains this digest, and all of its lines
    are valid."""
    try:
        payloads = []
        for line in path.read_bytes().splitlines():
            values = json.loads(line)
            # A line is an envelope, or a Sigstore bundle around one.
            payloads.append(base64.b64decode(values.get("dsseEnvelope", values)["payload"]))
        return bool(payloads) and sha256.encode() in payloads[0]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
