"""Makes a corpus's tokenizer as a separate folder, which shards need before they can start."""

import json
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lathe.data.chats import chat_reader
from lathe.data.cleaning import Reading
from lathe.data.rows import TextKey
from lathe.data.run_inputs import NEWEST, resolve
from lathe.data.samples import split_boundaries
from lathe.data.sources import MAX_SHARDS, Shard, documents, named, opened
from lathe.data.spool import Spool, line, with_validation
from lathe.data.tokenizer import (
    FILES,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
    vocab_size,
)
from lathe_base.artifacts.kinds import TOKENIZER, read_intact
from lathe_base.artifacts.metadata import TokenizerMetadata
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_folder, claim_output_folder, is_remote
from lathe_base.storage.ownership import Kind
from lathe_base.storage.splits import locate

HINT = "make the tokenizer again: lathe tokenizer"


@dataclass(frozen=True)
class CorpusTokenizer:
    """Result of `make_tokenizer`."""

    folder: Path
    vocab_size: int
    trained: bool


@attested("tokenizer", "tokenizer")
def make_tokenizer(
    recipe: Recipe, output: Path, source: str | None = None, tokenizer: str | Path | None = None
) -> CorpusTokenizer:
    """Write the tokenizer that `prepare` would use to a folder: one trained on the training
    documents, or the given one.

    Args:
        output: holds `tokenizer.json` and, in `origin.json`, where it comes from.
        source, tokenizer: see `lathe.data.prepare.prepare`.

    Raises:
        UserError: as `prepare`. No partial output is left.
    """
    settings, split = recipe.Prepare, recipe.Data.Train.dataset.split
    source = resolve(settings.source if source is None else source)
    tokenizer = settings.tokenizer if tokenizer is None else tokenizer
    claim_apart(output, TOKENIZER, source, tokenizer)
    loaded_tokenizer = None if tokenizer == "train" else load_tokenizer(Path(tokenizer))
    chats = chat_reader(settings, tokenizer, loaded_tokenizer)
    if loaded_tokenizer:
        # Quick checks of the corpus, so that not every shard fails.
        if is_remote(source):
            with opened(source, Shard(1, MAX_SHARDS)):  # of a store, a small part is fetched
                pass
        elif source != "python":
            next(documents(source, chats or TextKey(settings.text_key), Reading(settings)))
    with atomic_folder(output, TOKENIZER) as work:
        metadata: dict[str, Any] = {"source": named(source), "trained_on": None}
        used = loaded_tokenizer
        if used is None:
            row_text = TextKey(settings.text_key)
            lines = map(line, documents(source, row_text, Reading(settings)))
            spool = Spool(work.with_name("documents"), lines, f"read {named(source)}")
            spool = with_validation(spool, split)  # pieces, if `prepare` would cut documents
            training = split_boundaries(split, spool.documents)[1]
            used = train_tokenizer(islice(spool, training), settings.vocab_size)
            metadata["trained_on"] = trained_on(recipe, spool)
        save_tokenizer(used, work / "tokenizer.json")
        if chats:
            chats.save(work)
        (work / TOKENIZER.metadata_file).write_text(
            json.dumps(metadata, indent=2) + "\n", encoding="utf-8"
        )
    return CorpusTokenizer(output, vocab_size(used), loaded_tokenizer is None)


def claim_apart(output: Path, kind: Kind, source: str, tokenizer: str | Path) -> None:
    """Check, before any work, that `output` may be written and is apart from corpus and tokenizer.

    Raises:
        UserError: see `claim_output_folder`; or no tokenizer is named.
    """
    if not tokenizer:
        raise UserError(
            "--tokenizer is empty", "give a file or a folder, or `train`", Code.INVALID_VALUE
        )
    # A corpus on this disk, or a tokenizer, must not be in the folder that is replaced.
    local = [] if source == "python" else [locate(source.removeprefix("hf://")).location]
    claim_output_folder(output, kind, *local, *(Path(tokenizer) / name for name in FILES))


def trained_on(recipe: Recipe, text: Spool) -> dict[str, Any]:
    """Everything that determines a tokenizer trained on this text with this recipe."""
    return {
        "text_sha256": text.sha256,
        "split": list(recipe.Data.Train.dataset.split),
        "vocab_size": recipe.Prepare.vocab_size,
    }


def read_origin(folder: Path) -> TokenizerMetadata | None:
    """Where the tokenizer in a folder comes from; None if `make_tokenizer` did not write it.

    Raises:
        UserError: a file was altered, or the metadata is broken.
    """
    if not os.path.lexists(folder / TOKENIZER.metadata_file):
        return None
    return read_intact(folder, TOKENIZER.metadata_file, TokenizerMetadata, HINT)


def shard_source(source: str, tokenizer: Path) -> str:
    """The corpus of a shard: every shard has to read the same, so `newest:PLACE` is the one that
    was found when the tokenizer was made.

    Raises:
        UserError: the tokenizer does not say which one that was.
    """
    if not source.startswith(NEWEST):
        return source
    origin = read_origin(tokenizer)
    if origin is None:
        raise UserError(
            f"{source}: shards may find different ones",
            "name the corpus, or give the folder of `lathe tokenizer` as --tokenizer",
            Code.CONFLICTING_OPTIONS,
        )
    return origin.source
