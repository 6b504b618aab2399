"""The origin of a checkpoint: its parent models, and its training data."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from lathe_base.artifacts.metadata import Count, Positive, Sha256


class _OriginPart(BaseModel):
    model_config = ConfigDict(strict=True)


class Ancestor(_OriginPart):
    """An ancestor of a checkpoint.

    Attributes:
        sha256: its identity, see `lathe.model.folder.checkpoint_digest`.
        stage: the stage that wrote it; None for a Hugging Face model.
        step: training steps of that stage.
        hub, revision: its name and commit on the Hugging Face Hub, if it is from there.
    """

    sha256: Sha256
    stage: str | None = None
    step: Count | None = None
    hub: str | None = None
    revision: str | None = None


class Corpus(_OriginPart):
    """A token data set, or one of those in a blend.

    Attributes:
        sha256: of its metadata, which lists its files with their digests.
        text_sha256: of its documents, one JSON line each.
        source: where the text is from; None if another tool made the data set.
        license: as stated when the data set was prepared.
        weight: its weight in a blend, relative to the others'.
        left_out: number of rows and documents that were dropped, by reason.
    """

    sha256: Sha256
    documents: Positive
    tokens: Positive
    text_sha256: Sha256 | None = None
    source: str | None = None
    license: str | None = None
    weight: float = 1.0
    left_out: dict[str, Count] = {}


class TrainingData(_OriginPart):
    """The data set that a checkpoint was trained on; `sha256` is of its metadata."""

    sha256: Sha256
    corpora: list[Corpus]


class Origin(_OriginPart):
    """The keys of `lathe.json` about a checkpoint's ancestors (nearest first) and training data;
    checkpoints of earlier versions have neither."""

    ancestors: list[Ancestor] = []
    data: TrainingData | None = None

    @property
    def parent(self) -> str | None:
        """The digest of the parent model."""
        return self.ancestors[0].sha256 if self.ancestors else None

    @property
    def base_model(self) -> str | None:
        """The nearest ancestor from the Hugging Face Hub."""
        return next((ancestor.hub for ancestor in self.ancestors if ancestor.hub), None)

    def to_json(self) -> dict[str, Any]:
        """The keys of `lathe.json`."""
        return {
            "parent": self.parent,
            "ancestors": [x.model_dump(exclude_none=True) for x in self.ancestors],
            "data": self.data and self.data.model_dump(exclude_none=True),
        }
