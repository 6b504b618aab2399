"""`provenance.intoto.jsonl`: the attestation of a folder's step, followed by those of earlier
steps."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lathe_base.errors import Code, UserError
from lathe_base.inputs import parse_json, read_text
from lathe_base.provenance.envelope import AGAIN, Attestation
from lathe_base.provenance.keys import load_signer
from lathe_base.storage import atomic_file
from lathe_base.storage.attested import ATTESTATIONS

EMBEDDED = "attestations"
"""The key of the envelopes in a JSON output."""


def read(place: Path) -> list[Attestation]:
    """The attestations of a folder, or in a JSON file; empty without any.

    Raises:
        UserError: a file that is not text, or is not JSON.
    """
    if place.is_file():
        embedded = _values(place).get(EMBEDDED, [])
        if not isinstance(embedded, list):
            raise UserError(f"{place}: {EMBEDDED} is not a list", AGAIN, Code.MALFORMED)
        return _all([json.dumps(line) for line in embedded], f"{place}: {EMBEDDED}")
    path = place / ATTESTATIONS
    if not path.is_file():
        return []
    return _all(read_text(path, AGAIN).splitlines(), str(path))


def write(folder: Path, attestations: Iterable[Attestation]) -> None:
    """Write the attestations of a folder, that of its own step first."""
    with atomic_file(folder / ATTESTATIONS) as work:
        work.write_text("".join(f"{a.line}\n" for a in attestations), encoding="utf-8")


def embed(path: Path, attestations: Iterable[Attestation]) -> None:
    """Put attestations into a JSON file."""
    values = json.loads(path.read_bytes())
    values[EMBEDDED] = [json.loads(a.line) for a in attestations]
    with atomic_file(path) as work:
        work.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def sign_unsigned(folder: Path, key: Path) -> int:
    """Sign the unsigned attestations of a folder; returns their number."""
    entries, signer = read(folder), load_signer(key)
    unsigned = sum(not attestation.is_signed for attestation in entries)
    if unsigned:
        write(folder, [a if a.is_signed else a.signed(signer) for a in entries])
    return unsigned


def content(path: Path) -> bytes:
    """The subject of a JSON file's statement: its values without the attestations.

    Raises:
        UserError: not a JSON object.
    """
    values = _values(path)
    values.pop(EMBEDDED, None)
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _values(path: Path) -> dict[str, Any]:
    values = parse_json(path.read_bytes(), str(path), AGAIN)
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object", AGAIN, Code.MALFORMED)
    return values


def merged(own: Attestation, inputs: Iterable[Path]) -> list[Attestation]:
    """The attestation of a step and those of its inputs, without duplicates."""
    by_identity = {own.identity: own}
    for path in inputs:
        for attestation in read(path):
            by_identity.setdefault(attestation.identity, attestation)
    return list(by_identity.values())


def _all(lines: list[str], where: str) -> list[Attestation]:
    return [Attestation(line, f"{where}, line {n}") for n, line in enumerate(lines, 1) if line]
