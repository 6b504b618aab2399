"""Attestations, from the inside out: a statement, its envelope, and the file of a folder.

A step's statement is an in-toto statement v1 with a SLSA provenance v1 predicate
(https://github.com/in-toto/attestation/tree/main/spec/v1,
https://slsa.dev/spec/v1.0/provenance). It is put into a DSSE envelope
(https://github.com/secure-systems-lab/dsse), one JSON line each. `provenance.intoto.jsonl` has the
attestation of a folder's step, followed by those of earlier steps.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlparse

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from lathe_base.artifacts.metadata import Sha256
from lathe_base.errors import Code, UserError
from lathe_base.inputs import first_mistake, parse_json, read_text
from lathe_base.provenance.keys import load_signer
from lathe_base.storage import atomic_file, digest
from lathe_base.storage.ownership import ATTESTATIONS

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner, SSlibKey

STATEMENT: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
PROVENANCE: Literal["https://slsa.dev/provenance/v1"] = "https://slsa.dev/provenance/v1"
STEP: Literal["urn:lathe:step:v1"] = "urn:lathe:step:v1"
"""The build type: the command with this recipe and these inputs."""

ENVIRONMENT = ("source code", "libraries", "lock file", "image", "pipeline")
"""Kinds of dependencies that are not inputs."""

PAYLOAD_TYPE = "application/vnd.in-toto+json"
AGAIN = "copy the folder again, or run the step that wrote it again"
EMBEDDED = "attestations"
"""The key of the envelopes in a JSON output."""


# --- statements ---


class Part(BaseModel):
    """Base class of the parts of a statement, with keys in camel case."""

    model_config = ConfigDict(
        extra="ignore", alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True
    )


class Digests(Part):
    """Digests of a file, or of a revision of source code."""

    sha256: Sha256 | None = None
    git_commit: str | None = None


class Resource(Part):
    """A file or a folder (https://github.com/in-toto/attestation, ResourceDescriptor).

    Attributes:
        name: file name of a subject, or the stage's parameter for a material.
        digest: for a folder that Lathe wrote, that of its metadata file, which lists all other
            files.
        annotations: `kind`; for a folder that Lathe wrote, one of `lathe_base.artifacts.kinds`,
            and then a statement with this digest must exist.
    """

    name: str
    digest: Digests | None = None
    uri: str | None = None
    annotations: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        """The kind of material."""
        return str((self.annotations or {}).get("kind", ""))

    @property
    def sha256(self) -> str | None:
        """The SHA-256, if the digest is one."""
        return self.digest.sha256 if self.digest else None

    @property
    def path(self) -> Path | None:
        """The path, if it was on the step's machine."""
        parts = urlparse(self.uri or "")
        return Path(unquote(parts.path)) if parts.scheme == "file" else None


class Parameters(Part):
    """The parameters of the step.

    Attributes:
        step: verb of the command line.
        recipe: all settings.
    """

    step: str
    recipe: dict[str, Any] = {}


class BuildDefinition(Part):
    """The build definition: the step's parameters and inputs."""

    build_type: Literal["urn:lathe:step:v1"] = STEP
    external_parameters: Parameters
    internal_parameters: dict[str, Any] = {}
    resolved_dependencies: list[Resource] = []


class Builder(Part):
    """The builder: Lathe on this machine or in a pod, with the versions of its libraries."""

    id: str
    version: dict[str, str] = {}


class Run(Part):
    """Start and end, ISO 8601 in UTC. A resumed training has those of its last attempt."""

    invocation_id: str | None = None
    started_on: str
    finished_on: str


class RunDetails(Part):
    """Details of the run."""

    builder: Builder
    metadata: Run
    byproducts: list[Resource] = []


class Predicate(Part):
    """SLSA provenance."""

    build_definition: BuildDefinition
    run_details: RunDetails


class Statement(Part):
    """A step: its outputs (the subject), its inputs (the materials), and how it ran."""

    # `_type` in JSON, which cannot be the name of a pydantic field.
    type: Literal["https://in-toto.io/Statement/v1"] = Field(
        default=STATEMENT, validation_alias="_type", serialization_alias="_type"
    )
    subject: list[Resource] = Field(min_length=1)
    predicate_type: Literal["https://slsa.dev/provenance/v1"] = PROVENANCE
    predicate: Predicate

    @property
    def step(self) -> str:
        """The verb."""
        return self.predicate.build_definition.external_parameters.step

    @property
    def recipe(self) -> dict[str, Any]:
        """All settings."""
        return self.predicate.build_definition.external_parameters.recipe

    @property
    def materials(self) -> list[Resource]:
        """The step's inputs, without its code and libraries."""
        return [
            resource
            for resource in self.predicate.build_definition.resolved_dependencies
            if resource.kind not in ENVIRONMENT
        ]

    @property
    def products(self) -> dict[str, str]:
        """SHA-256 of every output file by name."""
        return {resource.name: str(resource.sha256) for resource in self.subject}

    def result(self, name: str) -> dict[str, Any]:
        """The figures of a byproduct; empty if there is none with this name."""
        byproducts = self.predicate.run_details.byproducts
        return next((b.annotations or {} for b in byproducts if b.name == name), {})

    def to_json(self) -> bytes:
        """The payload for an envelope."""
        return self.model_dump_json(exclude_none=True).encode()


# --- envelopes ---


@dataclass(frozen=True)
class Attestation:
    """A statement in its envelope.

    Attributes:
        line: the envelope as JSON.
        where: file and line, for messages.
    """

    line: str
    where: str

    @cached_property
    def envelope(self) -> "Envelope":
        """The envelope; raises UserError if the line is not one."""
        from securesystemslib.dsse import Envelope
        from securesystemslib.exceptions import FormatError

        try:
            parsed = Envelope.from_dict(json.loads(self.line))
        except (ValueError, KeyError, TypeError, AttributeError, FormatError) as error:
            raise UserError(
                f"{self.where}: not a DSSE envelope ({error})", AGAIN, Code.MALFORMED
            ) from None
        if parsed.payload_type != PAYLOAD_TYPE:
            raise UserError(
                f"{self.where}: {parsed.payload_type}, not {PAYLOAD_TYPE}", AGAIN, Code.WRONG_KIND
            )
        return parsed

    @cached_property
    def statement(self) -> Statement:
        """The statement, whether signed or not; raises UserError if it is not one of Lathe's."""
        from google.protobuf import json_format
        from in_toto_attestation.v1 import statement as in_toto
        from in_toto_attestation.v1 import statement_pb2

        # Checked twice: by in-toto's own rules for any statement, then by the types above.
        payload = self.envelope.payload
        try:
            message = json_format.Parse(payload, statement_pb2.Statement())
            in_toto.Statement.copy_from_pb(message).validate()
            return Statement.model_validate_json(payload)
        except ValidationError as error:
            what = first_mistake(error)
        except (ValueError, json_format.ParseError) as error:
            what = str(error)
        raise UserError(
            f"{self.where}: not a statement of a Lathe step ({what})", AGAIN, Code.WRONG_KIND
        )

    @property
    def is_signed(self) -> bool:
        """Whether there is a signature, valid or not."""
        return bool(self.envelope.signatures)

    @cached_property
    def identity(self) -> str:
        """Digest of the statement."""
        # Of the payload, not of the line: an attestation keeps its identity when it is signed.
        return digest(self.envelope.payload.decode("utf-8", "surrogateescape"))

    def is_signed_by(self, keys: "Sequence[SSlibKey]") -> bool:
        """Whether one of these keys has signed it."""
        from securesystemslib.exceptions import VerificationError

        try:
            return bool(self.envelope.verify(list(keys), 1))
        except (VerificationError, ValueError):  # ValueError: there are no keys
            return False

    def signed(self, signer: "CryptoSigner") -> "Attestation":
        """A copy with a signature by this signer."""
        self.envelope.sign(signer)  # the library adds the signature in place
        return Attestation(_line(self.envelope), self.where)


def seal(statement: Statement, signer: "CryptoSigner | None", where: str) -> Attestation:
    """Put a statement into an envelope, and sign it if there is a signer."""
    from securesystemslib.dsse import Envelope

    envelope = Envelope(statement.to_json(), PAYLOAD_TYPE, {})
    if signer:
        envelope.sign(signer)
    return Attestation(_line(envelope), where)


def _line(envelope: "Envelope") -> str:
    values: dict[str, Any] = envelope.to_dict()
    return json.dumps(values, separators=(",", ":"))


# --- files ---


def read(output: Path) -> list[Attestation]:
    """The attestations of a folder, or in a JSON file; empty without any.

    Raises:
        UserError: a file that is not text, or is not JSON.
    """
    if output.is_file():
        embedded = _values(output).get(EMBEDDED, [])
        if not isinstance(embedded, list):
            raise UserError(f"{output}: {EMBEDDED} is not a list", AGAIN, Code.MALFORMED)
        lines, where = [json.dumps(line) for line in embedded], f"{output}: {EMBEDDED}"
    else:
        path = output / ATTESTATIONS
        lines = read_text(path, AGAIN).splitlines() if path.is_file() else []
        where = str(path)
    return [Attestation(line, f"{where}, line {n}") for n, line in enumerate(lines, 1) if line]


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
    # In one form, because the file may have been indented in another way since.
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _values(path: Path) -> dict[str, Any]:
    values = parse_json(path.read_bytes(), str(path), AGAIN)
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object", AGAIN, Code.MALFORMED)
    return values


def merged(attestation: Attestation, inputs: Iterable[Path]) -> list[Attestation]:
    """The attestation of a step and those of its inputs, without duplicates."""
    by_identity = {attestation.identity: attestation}
    for path in inputs:
        for earlier in read(path):
            by_identity.setdefault(earlier.identity, earlier)
    return list(by_identity.values())
