"""The statement of a step: an in-toto statement v1 with a SLSA provenance v1 predicate.

Sources: https://github.com/in-toto/attestation/tree/main/spec/v1 and
https://slsa.dev/spec/v1.0/provenance.
"""

from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlparse

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from lathe_base.artifacts.metadata import Sha256

STATEMENT: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
PROVENANCE: Literal["https://slsa.dev/provenance/v1"] = "https://slsa.dev/provenance/v1"
STEP: Literal["urn:lathe:step:v1"] = "urn:lathe:step:v1"
"""The build type: the command with this recipe and these inputs."""

ENVIRONMENT = ("source code", "libraries", "lock file", "image", "pipeline")
"""Kinds of dependencies that are not inputs."""


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
