"""The prepare stage: turn a corpus into a token data set and its held-out sets."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lathe.artifacts.kinds import DATA, check_files, read_metadata
from lathe.artifacts.metadata import DataMetadata
from lathe.config.settings import PrepareSettings, Recipe
from lathe.data.cloze import cloze_passages
from lathe.data.newest import resolve
from lathe.data.samples import PARTS, require_sample, split_boundaries
from lathe.data.sources import documents, named
from lathe.data.tokenizer import (
    FILES,
    eos_id,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
    vocab_size,
)
from lathe.data.tokens import HINT, WRITERS
from lathe.errors import UserError
from lathe.progress import bar
from lathe.storage import atomic_folder, claim_output_folder

log = logging.getLogger("lathe")

# A batch is tokenized by all cores at once; its size bounds the encodings to some 100 MB.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 1 << 21


@dataclass(frozen=True)
class PreparedData:
    """What `prepare` wrote, or found complete and kept."""

    folder: Path
    documents: int
    tokens: int
    vocab_size: int
    boundaries: tuple[int, int, int, int]
    cloze_examples: int
    reused: bool


class Spool:
    """The corpus on local disk, so that it can be counted, digested and read again in order."""

    def __init__(self, path: Path, source: str, text_key: str) -> None:
        self.path, self.documents = path, 0
        digest = hashlib.sha256()
        with path.open("wb") as file, bar(f"read {named(source)}") as progress:
            for text in documents(source, text_key):
                line = json.dumps(text, ensure_ascii=False).encode() + b"\n"
                digest.update(line)
                file.write(line)
                self.documents += 1
                progress.advance()
        self.sha256 = digest.hexdigest()

    def __iter__(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            for line in file:
                yield json.loads(line)


def prepare(
    recipe: Recipe, output: Path, source: str | None = None, tokenizer: str | None = None
) -> PreparedData:
    """Tokenize a corpus into `output`; a complete folder made from the same text is kept.

    Args:
        recipe: `Prepare`, and the split and `max_seq_len` of `Data.Train.dataset`.
        output: holds token files of `Prepare.format` (a document is one sequence, stripped, with
            end-of-text appended), `tokenizer.json`, `heldout.txt` (the test documents, a blank
            line between), `cloze.jsonl` (passages from them) and the metadata `data.json`.
        source: see `documents` and `lathe.data.newest`; `Prepare.source` unless given.
        tokenizer: `train` (on the training documents), or see `load_tokenizer`;
            `Prepare.tokenizer` unless given.

    Raises:
        UserError: as `documents` and `load_tokenizer`, or the training part is shorter than one
            sample. Nothing is left half written.
    """
    settings, dataset = recipe.Prepare, recipe.Data.Train.dataset
    source = resolve(settings.source if source is None else source)
    tokenizer = settings.tokenizer if tokenizer is None else tokenizer
    if not tokenizer:
        raise UserError("--tokenizer is empty", "give a file or a folder, or `train`")
    local = [] if source == "python" else [source.removeprefix("hf://")]
    claim_output_folder(output, DATA, *local, *(Path(tokenizer) / name for name in FILES))
    given = None if tokenizer == "train" else load_tokenizer(Path(tokenizer))
    if settings.num_workers:
        os.environ["RAYON_NUM_THREADS"] = str(settings.num_workers)
    with atomic_folder(output, DATA) as work:
        spool = Spool(work.with_name("documents.jsonl"), source, settings.text_key)
        made_from = {
            "text_sha256": spool.sha256,
            "format": settings.format,
            "tokenizer": _fingerprint(given) if given else f"train {settings.vocab_size}",
            "split": list(dataset.split),
            "cloze_examples": settings.cloze_examples,
            "heldout_characters": settings.heldout_characters,
        }
        metadata = _whole(output, made_from)
        if metadata is not None:
            _check_parts(metadata, named(source), dataset.max_seq_len)
            log.info("%s: already prepared from the same text and settings, kept", output)
            return _result(output, metadata, reused=True)
        boundaries = split_boundaries(dataset.split, spool.documents)
        used = given or train_tokenizer(islice(spool, boundaries[1]), settings.vocab_size)
        save_tokenizer(used, work / "tokenizer.json")
        metadata = {"source": named(source), "made_from": made_from, "boundaries": boundaries}
        metadata |= _write_tokens(work, settings.format, spool, used, boundaries)
        metadata["cloze_examples"] = _write_held_out(
            work,
            islice(spool, boundaries[2], boundaries[3]),
            boundaries[3] - boundaries[2],
            settings,
        )
        _check_parts(metadata, named(source), dataset.max_seq_len)
        (work / DATA.metadata_file).write_text(
            json.dumps(metadata, indent=2) + "\n", encoding="utf-8"
        )
    return _result(output, metadata, reused=False)


def _write_tokens(
    work: Path, format: str, spool: Spool, tokenizer: Tokenizer, boundaries: Sequence[int]
) -> dict[str, Any]:
    size, eos = vocab_size(tokenizer), eos_id(tokenizer)
    started, tokens = time.perf_counter(), 0
    with (
        WRITERS[format](work / "tokens", size) as writer,
        bar("tokenize", total=spool.documents) as progress,
    ):
        for batch in _batches(spool):
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                writer.append([*encoding.ids, eos])
                tokens += writer.sizes[-1]
            seconds = time.perf_counter() - started
            rates = (len(writer.sizes) / seconds, tokens / seconds)
            status = f"{rates[0]:,.0f} documents/s, {rates[1]:,.0f} tokens/s"
            progress.advance(len(batch), status)
    log.info(
        "tokenized %s documents, %s tokens in %.1f s: %s",
        *(f"{spool.documents:,}", f"{tokens:,}", seconds, status),
    )
    return {
        "format": format,
        "documents": spool.documents,
        "tokens": tokens,
        "vocab_size": size,
        "eos_id": eos,
        "part_tokens": [sum(writer.sizes[a:b]) for a, b in pairwise(boundaries)],
    }


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_held_out(
    work: Path, texts: Iterable[str], documents: int, settings: PrepareSettings
) -> int:
    """Write `heldout.txt` and `cloze.jsonl` in one pass; returns the number of passages.

    Of long documents only the beginnings go into `heldout.txt`, each of the same length.
    """
    share = settings.heldout_characters // max(documents, 1)
    with (work / "heldout.txt").open("w", encoding="utf-8") as held_out:

        def written() -> Iterator[str]:
            for text in texts:
                end = len(text) if len(text) <= share else text.rfind("\n", 0, share) + 1
                held_out.write(f"{text[: end or share].rstrip()}\n\n")
                yield text

        passages = cloze_passages(written(), settings.cloze_examples)
    lines = [json.dumps({"text": passage}, ensure_ascii=False) + "\n" for passage in passages]
    (work / "cloze.jsonl").write_text("".join(lines), encoding="utf-8")
    if not passages:
        log.warning("the test documents hold no cloze passage: cloze.jsonl is empty")
    return len(passages)


def _check_parts(metadata: dict[str, Any], source: str, seq_len: int) -> None:
    parts = list(zip(PARTS, pairwise(metadata["boundaries"]), metadata["part_tokens"], strict=True))
    for part, (first, end), tokens in parts:
        if part == PARTS[0]:
            require_sample(f"{source}: {part} part", end - first, tokens, seq_len)
        elif 0 < tokens <= seq_len:
            log.warning("%s part: %d tokens, fewer than one sample", part, tokens)


def _whole(output: Path, made_from: dict[str, Any]) -> dict[str, Any] | None:
    """The metadata of a folder made from the same inputs, if none of its files has changed."""
    try:
        metadata = read_metadata(output / DATA.metadata_file, DataMetadata, HINT)
        check_files(output, DATA.metadata_file, metadata.files, HINT)
    except UserError:
        return None
    same = bool(metadata.files) and metadata.raw.get("made_from") == made_from
    return metadata.raw if same else None


def _fingerprint(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def _result(folder: Path, metadata: dict[str, Any], reused: bool) -> PreparedData:
    return PreparedData(
        folder=folder,
        documents=metadata["documents"],
        tokens=metadata["tokens"],
        vocab_size=metadata["vocab_size"],
        boundaries=tuple(metadata["boundaries"]),
        cloze_examples=metadata["cloze_examples"],
        reused=reused,
    )
