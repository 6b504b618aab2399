"""The kinds of folders and files that Lathe writes and reads, their JSON metadata files, and the
name of a release.

The metadata file identifies a folder. It is written last, and lists the other files.
"""

import json
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from lathe_base.artifacts.metadata import ExportMetadata, Files, Metadata
from lathe_base.errors import Code, UserError
from lathe_base.inputs import first_mistake, open_file, parse_json
from lathe_base.storage import digest, sha256
from lathe_base.storage.files import files_below, require_intact
from lathe_base.storage.ownership import ATTESTATION_FILES, FileKind, Kind

# The keys are those that every version has written: a JSON file of this name without them is not
# Lathe's, and its folder is never replaced.
DATA = Kind("token data set", "data.json", ("documents", "tokens", "vocab_size", "eos_id"))
TOKENIZER = Kind("tokenizer", "origin.json", ("source", "trained_on"))
SHARD = Kind("tokenized shard", "shard.json", ("shard", "of", "blocks"))
CHECKPOINT = Kind("checkpoint", "lathe.json", ("lathe", "stage"))
EXPORT = Kind("export", "export.json", ("flavour", "sha256"))
EVALUATION = Kind("evaluation", "metrics.json", ("model", "protocol", "digests"))
SENSITIVITY = Kind("sensitivity analysis", "sensitivity.json", ("linears", "skip"))
LOAD = Kind("load test", "load.json", ("load", "summary"))
REPOSITORY = Kind("model repository", ".lathe.json", ("kind",))
PADDLE_EXPORT = Kind("Paddle export", "paddle.json", ("source", "versions"))
PADDLE_CHECKPOINT = Kind("Paddle checkpoint", "pdparams.json", ("source", "dtype"))

STATE = "state"
"""The folder of saved states inside a training's output."""

GENERATOR = '<meta name="generator" content="Lathe">'
RELEASE_NAME = re.compile(r"sha256-[0-9a-f]{64}")


def _has_keys(*keys: str) -> Any:
    def is_one(path: Path) -> bool:
        try:
            values = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return False
        return isinstance(values, dict) and values.keys() >= set(keys)

    return is_one


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(4096)


VERDICT = FileKind("a verdict", _has_keys("verdict", "passed", "reasons"))
PAGE = FileKind("a page", _is_page)
RESUME_CERTIFICATE = FileKind(
    "a certificate of resuming", _has_keys("certifies", "kills", "uninterrupted", "resumed")
)
SEARCH = FileKind("a search's result", _has_keys("goal", "dense", "trials"))
DEPLOYMENT = FileKind("a deployment's report", _has_keys("prompts", "serving", "samples"))

M = TypeVar("M", bound=Metadata)
T = TypeVar("T")


def read_metadata(path: Path, model: type[M], hint: str) -> M:
    """Read and check a metadata file.

    Raises:
        UserError: no such file, not JSON, or wrong values; names the first one.
    """
    values = read_json(path, hint, allow_nan=model.HAS_NAN)
    try:
        metadata = model.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {first_mistake(error)}", hint, Code.MALFORMED) from None
    metadata._raw = values
    return metadata


def read_as(path: Path, kind: type[T], hint: str) -> T:
    """Read a JSON file as a dataclass or a type; raises as `read_metadata` does."""
    return checked(read_json(path, hint, dict), kind, str(path), hint)


def checked(values: Any, kind: type[T], where: str, hint: str) -> T:
    """Check `values` as a dataclass or a type; raises as `read_metadata` does, naming `where`."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise UserError(f"{where}: {first_mistake(error)}", hint, Code.MALFORMED) from None


def read_json(path: Path, hint: str, kind: type = dict, allow_nan: bool = False) -> Any:
    """Read a JSON file that contains an object (or another `kind`).

    Raises:
        UserError: no such file, unreadable, not JSON, or of another kind.
    """
    try:
        with open_file(path) as file:
            data = file.read()
    except UserError as error:
        raise UserError(error.what, hint, error.code) from None
    values = parse_json(data, str(path), hint, allow_nan)
    if not isinstance(values, kind):
        raise UserError(
            f"{path}: contains a {type(values).__name__}, not a {kind.__name__}",
            hint,
            Code.MALFORMED,
        )
    return values


def check_files(folder: Path, metadata: str, files: Files | None, hint: str) -> None:
    """Check the files of a folder against the list in its metadata, if there is one.

    Raises:
        UserError: one is missing, truncated or altered.
    """
    listed = {name: entry.sha256 for name, entry in (files or {}).items()}
    require_intact(folder, listed, metadata, hint)


def read_intact(folder: Path, name: str, model: type[M], hint: str) -> M:
    """Read the metadata file `name` of a folder, and check the files that it lists.

    Raises:
        UserError: as `read_metadata` and `check_files`.
    """
    metadata = read_metadata(folder / name, model, hint)
    check_files(folder, name, getattr(metadata, "files", None), hint)
    return metadata


def open_export(folder: Path) -> ExportMetadata:
    """Check the files of an export folder against its metadata, and return the metadata.

    Raises:
        UserError: not an export, or a file is missing, truncated or altered.
    """
    hint = "export the model again"
    if not (folder / EXPORT.metadata_file).is_file():
        raise UserError(
            f"{folder}: no {EXPORT.metadata_file}",
            "give the output folder of `lathe export`",
            Code.WRONG_KIND,
        )
    metadata = read_metadata(folder / EXPORT.metadata_file, ExportMetadata, hint)
    # The graph by its own digest, because exports of earlier versions list no files.
    require_intact(folder, {"model.onnx": metadata.sha256}, EXPORT.metadata_file, hint)
    check_files(folder, EXPORT.metadata_file, metadata.files, hint)
    return metadata


def release_name(repository: Path) -> str:
    """`sha256-` and the digest of the files' names and contents; see `release_digests`."""
    # Lines as sha256sum writes them.
    listed = sorted(release_digests(repository).items())
    return "sha256-" + digest("".join(f"{sha256}  {name}\n" for name, sha256 in listed))


def release_digests(repository: Path) -> dict[str, str]:
    """SHA-256 of the files of a release by name. Attestations and signature are excluded, because
    they refer to these files, and so are hidden files, which belong to the store."""
    return {
        name: sha256(path)
        for name, path in files_below(repository)
        if path.is_file() and not path.name.startswith(".") and path.name not in ATTESTATION_FILES
    }
