"""The lineage of a checkpoint: its ancestors, and its training data."""

import re
from pathlib import Path

from lathe.data.tokens import TokenDataset
from lathe.model.folder import MARKER, CheckpointFolder, open_folder
from lathe_base.artifacts.kinds import checked
from lathe_base.artifacts.origin import Ancestor, Corpus, Origin, TrainingData

SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/([^/]+)$")
"""The end of a model's path in the Hugging Face Hub's cache."""


def training_origin(parent: Path | None, data: TokenDataset | None) -> Origin:
    """The origin of a model trained from `parent` on `data`.

    Raises:
        UserError: `parent` is not a complete checkpoint.
    """
    ancestors = read_ancestors(parent) if parent is not None else []
    return Origin(ancestors=ancestors, data=training_data(data) if data is not None else None)


def read_ancestors(folder: Path | CheckpointFolder) -> list[Ancestor]:
    """The model in `folder` and its ancestors, nearest first.

    Raises:
        UserError: not a complete checkpoint.
    """
    # Not verified here: loading it has compared its files with their digests.
    opened = open_folder(folder)
    name, revision = hub_name(opened.path) or (None, None)
    ancestor = Ancestor(
        sha256=opened.digest,
        stage=opened.meta.get("stage"),
        step=opened.meta.get("metrics", {}).get("step"),
        hub=name,
        revision=revision,
    )
    return [ancestor, *read_origin(opened.meta, opened.path).ancestors]


def hub_name(folder: Path) -> tuple[str, str] | None:
    """Name and revision of a local folder in the Hugging Face Hub's cache; None elsewhere."""
    match = SNAPSHOT.search(folder.absolute().as_posix())
    return (match[1].replace("--", "/"), match[2]) if match else None


def read_origin(meta: dict[str, object], folder: Path) -> Origin:
    """The origin in a checkpoint's metadata; earlier versions recorded only the parent's digest.

    Raises:
        UserError: an invalid value.
    """
    origin_fields = {key: meta[key] for key in ("ancestors", "data") if meta.get(key)}
    if "ancestors" not in origin_fields and meta.get("parent"):
        origin_fields["ancestors"] = [{"sha256": meta["parent"]}]
    return checked(origin_fields, Origin, str(folder / MARKER), "copy the checkpoint again")


def training_data(data: TokenDataset) -> TrainingData:
    """Metadata of a data set and its parts."""
    return TrainingData(
        sha256=data.digest,
        corpora=[
            Corpus(
                sha256=part.digest,
                documents=part.metadata["documents"],
                tokens=part.metadata["tokens"],
                text_sha256=(part.metadata.get("made_from") or {}).get("text_sha256"),
                source=part.metadata.get("source"),
                license=part.metadata.get("license"),
                weight=weight,
                left_out=part.metadata.get("left_out") or {},
            )
            for weight, part in data.parts
        ],
    )
