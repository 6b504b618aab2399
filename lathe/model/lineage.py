"""The lineage of a checkpoint: its ancestors, and its training data."""

import re
from pathlib import Path

from lathe.data.tokens import TokenDataset
from lathe.model.folder import MARKER, checkpoint_digest, read_marker, resolve
from lathe_base.artifacts.kinds import checked
from lathe_base.artifacts.origin import Ancestor, Corpus, Origin, TrainingData

SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/([^/]+)$")
"""The end of a model's path in the Hugging Face Hub's cache."""


def origin_of(parent: Path | None, data: TokenDataset | None) -> Origin:
    """The origin of a model trained from `parent` on `data`.

    Raises:
        UserError: `parent` is not a complete checkpoint.
    """
    ancestors = ancestors_of(parent) if parent is not None else []
    return Origin(ancestors=ancestors, data=training_data(data) if data is not None else None)


def ancestors_of(folder: Path) -> list[Ancestor]:
    """The model in `folder` and its ancestors, nearest first.

    Raises:
        UserError: not a complete checkpoint.
    """
    meta = read_marker(folder)
    name, revision = hub_name(folder) or (None, None)
    own = Ancestor(
        sha256=checkpoint_digest(folder),
        stage=meta.get("stage"),
        step=meta.get("metrics", {}).get("step"),
        hub=name,
        revision=revision,
    )
    return [own, *read_origin(meta, folder).ancestors]


def hub_name(folder: Path) -> tuple[str, str] | None:
    """Name and revision of a model in the Hugging Face Hub's cache; None elsewhere."""
    found = SNAPSHOT.search(resolve(folder).absolute().as_posix())
    return (found[1].replace("--", "/"), found[2]) if found else None


def read_origin(meta: dict[str, object], folder: Path) -> Origin:
    """The origin in a checkpoint's metadata; earlier versions recorded only the parent's digest.

    Raises:
        UserError: an invalid value.
    """
    found = {key: meta[key] for key in ("ancestors", "data") if meta.get(key)}
    if "ancestors" not in found and meta.get("parent"):
        found["ancestors"] = [{"sha256": meta["parent"]}]
    return checked(found, Origin, str(folder / MARKER), "copy the checkpoint again")


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
