"""The files of a checkpoint folder, for any framework, and the lineage that they state.

They are `config.json`, `model.safetensors` (HF names and layout), `tokenizer.json`, `README.md`
(the model card), and `lathe.json`, which is written last: a folder that Lathe wrote without it is
not a checkpoint. Nothing is ever unpickled.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from lathe.data.chat_template import CHAT_FILES
from lathe.data.sources import named
from lathe.data.tokenizer import FILES as TOKENIZER_FILES
from lathe.data.tokenizer import load_tokenizer, save_tokenizer, vocab_size
from lathe.data.tokens import TokenDataset
from lathe.model.architecture import HEAD, Architecture
from lathe.model.card import CARD, README, checkpoint_card
from lathe.model.config import GPTConfig, read_config, write_config
from lathe_base import __version__
from lathe_base.artifacts.kinds import CHECKPOINT, checked, read_json, read_metadata
from lathe_base.artifacts.metadata import Ancestor, CheckpointMetadata, Corpus, Origin, TrainingData
from lathe_base.artifacts.sampling import GENERATION
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError, os_errors
from lathe_base.storage import atomic_folder, digest, sha256
from lathe_base.storage.files import require_intact

HUB = "hf://"
FOREIGN = (
    (("model.pdparams", "mp_*_pp_*/model.pdparams"), "PaddleFleetX", "import-paddle"),
    (
        (
            "*_model_states.pt",
            "global_step*/*_model_states.pt",
            "latest_checkpointed_iteration.txt",
        ),
        "Megatron",
        "import-megatron",
    ),
)
"""Checkpoints of other tools: files in their folders, the tool, and the verb that imports them."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HINT = "copy the checkpoint again"
MARKER_HINT = f"{HINT}, or run the stage that wrote it again"
MARKER = CHECKPOINT.metadata_file
SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/([^/]+)$")
"""The end of a model's path in the Hugging Face Hub's cache."""
FLOATS = ("F32", "F16", "BF16", "F64")
MIN_PARAMETER_BYTES = 2  # bytes of the smallest of them


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint or Hugging Face folder that was located, and will be verified, only once.

    Attributes:
        path: the local folder.
        meta: its `lathe.json`; empty for a plain Hugging Face folder.
        listed: the files that `lathe.json` lists, with their digests.
    """

    path: Path
    config: GPTConfig
    meta: dict[str, Any]
    listed: Mapping[str, str]

    @cached_property
    def verified(self) -> "CheckpointFolder":
        """This folder, whose files have the digests in `lathe.json`; read tensors from it.

        Raises:
            UserError: a file has changed or is missing.
        """
        if self.meta:
            require_intact(self.path, self.listed, MARKER, MARKER_HINT)
        return self

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of `lathe.json`, or of the weights of a Hugging Face folder.

        Raises:
            UserError: there are no weights.
        """
        if self.meta:
            return sha256(self.path / MARKER)
        if not (self.path / WEIGHTS).is_file() and not (self.path / INDEX).is_file():
            raise UserError(
                f"{self.path}: no {WEIGHTS}", "give the folder of a checkpoint", Code.NOT_FOUND
            )
        first, *others = self.weights
        if not others:  # the digest that the Hub shows for the file
            return sha256(first)
        return digest("".join(f"{sha256(path)}  {path.name}\n" for path in (first, *others)))

    @cached_property
    def weights(self) -> list[Path]:
        """The safetensors files; see `weight_files`."""
        return weight_files(self.path)

    @property
    def n_bytes(self) -> int:
        """Size of the weights."""
        return sum(path.stat().st_size for path in self.weights)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights.

        Raises:
            UserError: there is none, or it has more ids than the model.
        """
        tokenizer = load_tokenizer(self.path)
        hint = "put the tokenizer that the model was trained with into the folder"
        require_vocabulary(tokenizer, self.config, self.path, hint)
        return tokenizer


def open_folder(folder: Path | str | CheckpointFolder) -> CheckpointFolder:
    """Locate a checkpoint or Hugging Face folder, or `hf://NAME`, and read its configuration and
    metadata; its tensors are neither read nor verified yet.

    Raises:
        UserError: no such folder or model, an unsupported model, broken metadata, or an incomplete
            checkpoint.
    """
    if isinstance(folder, CheckpointFolder):
        return folder
    path = resolve(folder)
    config = read_config(path)
    marker = path / MARKER
    if marker.is_file():
        metadata = read_metadata(marker, CheckpointMetadata, MARKER_HINT)
        return CheckpointFolder(path, config, metadata.raw, metadata.files)
    if "lathe" in read_json(path / "config.json", HINT):
        raise UserError(
            f"{path}: no {MARKER}: the checkpoint is incomplete",
            "run the stage that writes it again; it resumes where it stopped",
            Code.INCOMPLETE,
        )
    return CheckpointFolder(path, config, {}, {})


def checkpoint_digest(folder: Path) -> str:
    """Digest of a checkpoint; see `CheckpointFolder.digest`.

    Raises:
        UserError: no such folder, or it contains no checkpoint.
    """
    marker = resolve(folder) / MARKER
    return sha256(marker) if marker.is_file() else open_folder(folder).digest


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: `model.safetensors`, or the shards of its index.

    Raises:
        UserError: none, or a shard that is missing or not within the folder.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).is_file() or not index.is_file():
        return [folder / WEIGHTS]
    shards = checked(read_json(index, HINT).get("weight_map"), dict[str, str], str(index), HINT)
    names = sorted(set(shards.values()))
    if not names:
        raise UserError(f"{index}: lists no shards", HINT, Code.MALFORMED)
    for name in names:
        # What a file names is not followed out of its folder.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"{index}: names {name!r}, which is not a shard in its folder", HINT, Code.UNSAFE
            )
        if not (folder / name).is_file():
            raise UserError(
                f"{index}: names {name}, which is not in the folder", HINT, Code.INCOMPLETE
            )
    return [folder / name for name in names]


def resolve(folder: Path | str) -> Path:
    """The local folder; `hf://NAME` is downloaded from the Hugging Face Hub.

    Raises:
        UserError: no such folder, or no such model on the Hub.
    """
    name = str(folder)
    if name.startswith(HUB):
        from huggingface_hub import snapshot_download

        # Not the pickled weights that many repositories have beside these.
        wanted = ["config.json", WEIGHTS, *TOKENIZER_FILES]
        wanted += [INDEX, "model-*.safetensors", GENERATION, *CHAT_FILES]
        try:
            return Path(snapshot_download(name.removeprefix(HUB), allow_patterns=wanted))
        except (OSError, ValueError) as error:  # no such model, or no network
            raise UserError(
                f"{name}: cannot be downloaded: {str(error).splitlines()[0]}",
                "check the name, as in hf://openai-community/gpt2, and the network; or give the "
                "folder of a local copy",
                Code.NOT_FOUND,
            ) from None
    path = Path(folder)
    if not (path / "config.json").exists():  # perhaps a checkpoint of another tool
        files = [path] if path.is_file() else sorted(path.glob("*"))
        if gguf := [file for file in files if file.suffix == ".gguf"]:
            raise UserError(
                f"{gguf[0]}: a GGUF file",
                f"convert it first: lathe import {gguf[0]} --output FOLDER",
                Code.WRONG_KIND,
            )
        is_prefix = bool(path.name) and path.with_name(f"{path.name}.pdparams").is_file()
        for patterns, tool, verb in FOREIGN:
            is_in_folder = path.is_dir() and any(any(path.glob(pattern)) for pattern in patterns)
            if is_in_folder or (is_prefix and verb == "import-paddle"):
                raise UserError(
                    f"{path}: a checkpoint of {tool}",
                    f"convert it first: lathe {verb} {path} --output FOLDER",
                    Code.WRONG_KIND,
                )
    if not path.is_dir():
        raise UserError(
            f"{folder}: no such folder", "give the folder of a checkpoint", Code.NOT_FOUND
        )
    return path


def read_marker(folder: Path) -> dict[str, Any]:
    """Read `lathe.json` and check the digests in it; empty for a plain Hugging Face folder.

    Raises:
        UserError: the checkpoint is incomplete, or changed since; broken metadata.
    """
    return open_folder(folder).verified.meta


def require_checkpoint(folder: Path) -> CheckpointFolder:
    """Check that a folder is a complete checkpoint or a Hugging Face model, without reading the
    tensors.

    Raises:
        UserError: it is not.
    """
    opened = open_folder(folder).verified
    assert opened.tokenizer
    if not opened.weights[0].is_file():
        raise UserError(f"{folder}: no {WEIGHTS}", "save the model as safetensors", Code.NOT_FOUND)
    return opened


def require_vocabulary(tokenizer: Tokenizer, config: GPTConfig, path: Path, hint: str) -> None:
    """Raise UserError if the tokenizer at `path` has more ids than the model."""
    if (ids := vocab_size(tokenizer)) > config.vocab_size:
        what = f"{path}: the tokenizer has {ids} ids, the model {config.vocab_size}"
        raise UserError(what, hint, Code.WRONG_TOKENIZER)


def read_tensors(
    path: Path, framework: str, architecture: Architecture
) -> Iterator[tuple[str, Any]]:
    """Yield (name without the family's prefix, tensor) of a safetensors file, one in memory at a
    time.

    Args:
        framework: `pt` for torch's tensors, `np` for arrays.

    Raises:
        UserError: no such file, not safetensors, a duplicate tensor, or one that is not float.
    """
    if not path.is_file():
        pickled = [p.name for p in path.parent.glob("*.bin")]
        detail = f" (found {', '.join(pickled)}, which Lathe never unpickles)" if pickled else ""
        raise UserError(
            f"{path}: no such file{detail}", "save the model as safetensors", Code.NOT_FOUND
        )
    hint = "copy the file again"
    # The header alone: names and types are checked before any tensor is read.
    try:
        with safe_open(path, framework) as file:
            names = list(file.keys())
            stored = [name for name in names if not name.endswith(architecture.not_weights)]
            types = {name: file.get_slice(name).get_dtype() for name in stored}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not safetensors: {error}", hint, Code.MALFORMED) from None
    names = [architecture.parameter_name(name) for name in stored]
    # With and without the prefix, as transformers writes a model with and without its head.
    if twice := [name for name in names if names.count(name) > 1]:
        prefix = architecture.prefix
        raise UserError(
            f"{path}: contains {twice[0]} twice, with and without the prefix {prefix}",
            hint,
            Code.DUPLICATE,
        )
    for name, dtype in types.items():
        if dtype not in FLOATS:
            raise UserError(
                f"{path}: {name} is {dtype}, not one of {', '.join(FLOATS)}",
                "save the model's float weights; Lathe quantizes them itself",
                Code.UNSUPPORTED,
            )
    for name, short in zip(stored, names, strict=True):
        with safe_open(path, framework) as file:
            tensor = file.get_tensor(name)
        yield short, tensor


def drop_tied_head(tensors: dict[str, Any], architecture: Architecture, path: Path) -> None:
    """Remove the head from the tensors of a model with a tied head: many files contain the matrix
    twice.

    Raises:
        UserError: the head differs from the embedding.
    """
    name, table = f"{HEAD}.weight", architecture.table
    head = tensors.pop(name, None)
    if head is not None and table in tensors and not bool((head == tensors[table]).all()):
        raise UserError(
            f"{path}: {name} differs from {table}, but config.json says that they are tied",
            "if the model's output layer is separate, set tie_word_embeddings to false in "
            "config.json (not for GPT-2, where Lathe supports only tied embeddings)",
            Code.MISMATCH,
        )


def require_size(files: Sequence[Path], config: GPTConfig) -> None:
    """Raise UserError if weights files are too small for their `config.json`, so that a model of
    absurd size is never allocated."""
    needed = config.n_params * MIN_PARAMETER_BYTES
    if not all(path.is_file() for path in files):
        return  # `read_tensors` says which is missing
    size = sum(path.stat().st_size for path in files)
    if size < needed:
        raise UserError(
            f"{files[0]}: does not fit config.json: {size:,} bytes, but its "
            f"{config.n_params:,} parameters take {needed:,} or more",
            "use the config.json that belongs to these weights",
            Code.MISMATCH,
        )


def require_fit(
    path: Path, shapes: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]
) -> None:
    """Raise UserError unless the tensor shapes in `path` match its `config.json`."""
    wrong = [
        f"{name}: {tuple(shapes[name]) if name in shapes else 'absent'}, not {tuple(shape)}"
        for name, shape in wanted.items()
        if name not in shapes or tuple(shapes[name]) != tuple(shape)
    ] + [f"{name}: unknown" for name in shapes.keys() - wanted.keys()]
    if wrong:
        raise UserError(
            f"{path}: does not fit config.json: {'; '.join(wrong[:3])}",
            "use the config.json that belongs to these weights",
            Code.MISMATCH,
        )


def non_finite(path: Path, name: str) -> UserError:
    """The error for a tensor with NaN or infinity."""
    return UserError(
        f"{path}: {name} holds NaN or infinity", "use an earlier checkpoint", Code.NOT_FINITE
    )


def write_folder(
    folder: Path,
    write_weights: Callable[[Path], None],
    config: GPTConfig,
    tokenizer: Tokenizer,
    stage: str,
    recipe: Recipe,
    origin: Origin | None = None,
    metrics: dict[str, Any] | None = None,
    engine: str = "torch",
    write_more: Callable[[Path], Sequence[str]] | None = None,
) -> None:
    """Write a checkpoint into `folder`, `lathe.json` last; other files in it are kept, among them a
    `README.md` that Lathe did not write.

    Args:
        write_weights: writes `model.safetensors` to the given path.
        engine: the framework that trained it.
        write_more: writes further files into the given folder, and returns their names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / ".checkpoint.partial"
    shutil.rmtree(work, ignore_errors=True)  # left by an attempt that was killed
    work.mkdir()
    try:
        with os_errors(folder / WEIGHTS):
            write_weights(work / WEIGHTS)
        write_config(work, config)
        save_tokenizer(tokenizer, work / "tokenizer.json")
        names = [WEIGHTS, "config.json", "tokenizer.json"]
        names += write_more(work) if write_more else []
        settings = recipe.model_dump(mode="json")
        if "Prepare" in settings:  # not in the excerpt of a training step
            settings["Prepare"]["source"] = named(recipe.Prepare.source)  # not a signed address
        meta: dict[str, Any] = {
            "lathe": __version__,
            "stage": stage,
            "engine": engine,
            **(origin or Origin()).to_json(),
            "n_params": config.n_params,
            "metrics": metrics or {},
            "files": {},
            "recipe": settings,
        }
        if not (folder / README).exists() or CARD.is_one(folder / README):
            (work / README).write_text(checkpoint_card(config, meta), encoding="utf-8")
            names.append(README)
        meta["files"] = {name: sha256(work / name) for name in names}
        (work / MARKER).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        # Without its marker, a half-replaced folder is incomplete rather than wrong.
        (folder / MARKER).unlink(missing_ok=True)
        for name in [*names, MARKER]:
            (folder / name).parent.mkdir(exist_ok=True)
            os.replace(work / name, folder / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_imported(
    output: Path,
    weights: Mapping[str, NDArray[Any]],
    config: GPTConfig,
    tokenizer: Tokenizer,
    recipe: Recipe,
    engine: str,
) -> None:
    """Write what was read from another framework's files as a checkpoint folder.

    Args:
        weights: float32, by Hugging Face's names without the prefix.
        engine: the framework that they come from.
    """
    stored = config.architecture.stored_name

    def write_weights(file: Path) -> None:
        save_file({stored(name): array for name, array in weights.items()}, file, {"format": "pt"})

    with atomic_folder(output, CHECKPOINT) as work:
        write_folder(work, write_weights, config, tokenizer, "import", recipe, engine=engine)


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
    # The cache spells the slash of owner/name as two hyphens.
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
