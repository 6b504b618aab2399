"""Tokenize a corpus, or one shard of it, on all cores."""

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from lathe.data.chats import ChatEncoder, chat_reader
from lathe.data.cleaning import Reading
from lathe.data.corpus_tokenizer import claim_apart, read_origin, shard_source
from lathe.data.fast_tokenizer import Encoder, TokenBatch
from lathe.data.megatron import MegatronWriter
from lathe.data.paddle import PaddleWriter
from lathe.data.rows import TextKey
from lathe.data.sentences import SentenceSplitter, sentence_rules
from lathe.data.sources import Document, Shard, named, no_text, opened
from lathe.data.spool import Spool, line
from lathe.data.tokenizer import (
    end_token,
    eos_id,
    fingerprint,
    load_tokenizer,
    save_tokenizer,
    vocab_size,
)
from lathe_base.artifacts.kinds import SHARD, read_intact
from lathe_base.artifacts.metadata import TEXT, ShardMetadata
from lathe_base.config.settings import PrepareSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_base.progress import bar
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_folder
from lathe_serving.runtime.text import bos_ids

log = logging.getLogger("lathe")

# A batch is tokenized by all cores at once; its size bounds the encodings to some 100 MB.
BATCH_DOCUMENTS = 1 << 14
BATCH_CHARACTERS = 1 << 21

HINT = "make the shard again: lathe tokenize"
Batches = Iterable[TokenBatch]


@dataclass(frozen=True)
class TokenizedShard:
    """Result of `tokenize`: the folder that it wrote, or found complete and kept."""

    folder: Path
    shard: int
    of: int
    documents: int
    tokens: int
    reused: bool


@attested("tokenize", "tokenizer")
def tokenize(
    recipe: Recipe,
    output: Path,
    shard: Shard,
    source: str | None = None,
    tokenizer: str | None = None,
) -> TokenizedShard:
    """Tokenize one shard of a corpus into `output`; a complete folder of the same text is kept.

    Shards are independent, and `lathe.data.join.join` combines them into the data set that
    `prepare` would write.

    Args:
        recipe: `Prepare`.
        output: holds the shard's tokens and documents, the tokenizer, and which documents of the
            corpus these are, in `shard.json`.
        source: see `prepare`; `newest:PLACE` is the corpus for which the tokenizer was made.
        tokenizer: see `load_tokenizer`; `Prepare.tokenizer` unless given.

    Raises:
        UserError: as `prepare`, or the tokenizer has yet to be trained. No partial output is
            written.
    """
    settings = recipe.Prepare
    tokenizer = settings.tokenizer if tokenizer is None else tokenizer
    if tokenizer == "train":
        raise UserError(
            "--tokenizer train: every shard needs the same tokenizer",
            "train it first, with `lathe tokenizer`, and give its folder as --tokenizer",
            Code.CONFLICTING_OPTIONS,
        )
    if settings.duplicates != "keep":
        raise UserError(
            f"Prepare.duplicates={settings.duplicates}: shards do not see each other's documents",
            "use lathe prepare, or remove duplicates from the corpus first",
            Code.CONFLICTING_OPTIONS,
        )
    source = shard_source(settings.source if source is None else source, Path(tokenizer))
    claim_apart(output, SHARD, source, tokenizer)
    used, origin = load_tokenizer(Path(tokenizer)), read_origin(Path(tokenizer))
    special, chats = settings.special_tokens_in_text, chat_reader(settings, tokenizer, used)
    use_threads(settings.num_workers)
    with atomic_folder(output, SHARD) as work, opened(source, shard.checked()) as corpus:
        if not any(file.size for file in corpus.files):
            raise no_text(source)
        counts: dict[tuple[int, int], int] = {}
        reading = Reading(settings)
        row_text = chats or TextKey(settings.text_key)
        lines = _counted(corpus.documents(row_text, shard, reading), counts)
        spool = Spool(work / TEXT, lines, f"read shard {shard} of {named(source)}")
        metadata: dict[str, Any] = {
            "shard": shard.number,
            "of": shard.of,
            "source": named(source),
            "corpus_sha256": corpus.digest,
            "text_key": settings.text_key,
            "tokenizer_sha256": fingerprint(used),
            "special_tokens_in_text": special,
            "trained_on": origin.raw["trained_on"] if origin else None,
            "text_sha256": spool.sha256,
            "documents": spool.documents,
            "left_out": dict(reading.left_out),
            "blocks": [(file, block, count) for (file, block), count in counts.items()],
            **({"sentences": rules} if (rules := sentence_rules(settings)) else {}),
            **({"chat_template_sha256": chats.digest} if chats else {}),
        }
        if tokens := _kept(output, metadata):
            log.info("%s: already tokenized from the same text, kept", output)
            return _result(output, metadata | {"tokens": tokens}, reused=True)
        save_tokenizer(used, work / "tokenizer.json")
        if chats:
            chats.save(work)
        with MegatronWriter(work / "tokens", vocab_size(used), chats is not None) as writer:
            write_tokens(writer, encoded(spool, used, settings), spool.documents, "tokenize")
        metadata["tokens"] = sum(writer.sizes)
        (work / SHARD.metadata_file).write_text(json.dumps(metadata) + "\n", encoding="utf-8")
    return _result(output, metadata, reused=False)


def use_threads(count: int) -> None:
    """Tokenize on so many threads; 0 for one on each core."""
    if count:
        os.environ["RAYON_NUM_THREADS"] = str(count)


def encoded(texts: Iterable[str], tokenizer: Tokenizer, settings: PrepareSettings) -> Batches:
    """Yield the token ids of documents in batches, each after what the tokenizer puts before a
    text, and with end-of-text appended.

    With `Prepare.split_sentences` every sentence is a sequence: the first one of a document begins
    with what the tokenizer puts before a text, and the last one ends with end-of-text. Of
    conversations (`Prepare.chat`), all tokens are the chat template's, and masks tell which ones
    the assistant writes.
    """
    if settings.chat:
        yield from map(ChatEncoder(tokenizer), _batches(texts))
        return
    end = end_token(tokenizer)
    bos, eos = bos_ids(tokenizer), eos_id(tokenizer)
    special_in_text = settings.special_tokens_in_text
    encode = Encoder(tokenizer, special_in_text, settings.fast_tokenizer)
    splitter = SentenceSplitter(settings.sentence_language) if settings.split_sentences else None
    for batch in _batches(texts):
        # Told once; `Encoder` encodes such a text as ordinary text.
        if end and not special_in_text and any(end in text for text in batch):
            log.warning(
                "a document contains %s, which is tokenized as ordinary text; to make it the "
                "special token, set Prepare.special_tokens_in_text=true",
                end,
            )
            end = None
        if splitter is None:
            yield _framed(encode(batch), bos, eos)
        else:
            sentences, counts = splitter.split(batch)
            ids, sizes = encode(sentences)[:2]
            # Sequences without a token, such as those of characters that a tokenizer ignores, are
            # dropped; but one is kept for every document.
            documents = np.repeat(np.arange(len(counts)), counts)
            kept = sizes > 0
            kept_counts = np.bincount(documents[kept], minlength=len(counts))
            kept[(np.cumsum(counts) - 1)[kept_counts == 0]] = True
            sequences = np.maximum(kept_counts, 1)
            yield _framed(TokenBatch(ids, sizes[kept], sequences), bos, eos)


def _framed(batch: TokenBatch, bos: list[int], eos: int) -> TokenBatch:
    """The documents, each between `bos`, at its first sequence, and `eos`, at its last one."""
    sequences = np.ones_like(batch.sizes) if batch.sequences is None else batch.sequences
    lasts = np.cumsum(sequences) - 1
    firsts = lasts + 1 - sequences
    sizes = batch.sizes.copy()
    sizes[firsts] += len(bos)
    sizes[lasts] += 1
    ends = np.cumsum(sizes)
    begins = (ends - sizes)[firsts]
    # Frame tokens first, the text's own into the places that are left, all in one copy.
    ids = np.empty(ends[-1], batch.ids.dtype)
    is_text = np.ones(len(ids), bool)
    frame = [(ends[lasts] - 1, eos), *((begins + i, token) for i, token in enumerate(bos))]
    for positions, token in frame:
        ids[positions] = token
        is_text[positions] = False
    ids[is_text] = batch.ids
    return TokenBatch(ids, sizes, batch.sequences)


def write_tokens(
    writer: MegatronWriter | PaddleWriter, batches: Batches, documents: int, doing: str
) -> None:
    """Append all batches to token files, and log the speed."""
    started, tokens = time.perf_counter(), 0
    seconds, status = 0.0, ""
    # The batches are lazy: their time is that of reading and tokenizing, too.
    with bar(doing, total=documents) as progress:
        for batch in batches:
            sequences = None if batch.sequences is None else batch.sequences.tolist()
            if batch.mask is not None:
                assert isinstance(writer, MegatronWriter)
                writer.extend(batch.ids, batch.sizes.tolist(), sequences, batch.mask)
            else:
                writer.extend(batch.ids, batch.sizes.tolist(), sequences)
            tokens += len(batch.ids)
            seconds = time.perf_counter() - started
            rates = (len(writer.sequences) / seconds, tokens / seconds)
            status = f"{rates[0]:,.0f} documents/s, {rates[1]:,.0f} tokens/s"
            progress.advance(batch.documents, status)
    time_taken = f" in {seconds:.1f} s: {status}" if status else ""
    log.info("%s: %s documents, %s tokens%s", doing, f"{documents:,}", f"{tokens:,}", time_taken)


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


def _counted(documents: Iterable[Document], counts: dict[tuple[int, int], int]) -> Iterator[bytes]:
    """Yield the documents as lines, and count those of every block."""
    for span, block in groupby(documents, key=lambda document: document[:2]):
        for document in block:
            counts[span] = counts.get(span, 0) + 1
            yield line(document.text)


def _kept(output: Path, wanted: dict[str, Any]) -> int | None:
    """The tokens of a folder made from the same inputs, if none of its files has changed."""
    try:
        metadata = read_intact(output, SHARD.metadata_file, ShardMetadata, HINT)
    except UserError:
        return None
    wanted = json.loads(json.dumps(wanted))  # tuples become lists, as in the file
    is_same = wanted.items() <= metadata.raw.items()
    # Keys that do not apply are absent, so a shard that has them would pass.
    is_same &= metadata.sentences == wanted.get("sentences")
    is_same &= metadata.chat_template_sha256 == wanted.get("chat_template_sha256")
    return metadata.tokens if is_same else None


def _result(folder: Path, metadata: dict[str, Any], reused: bool) -> TokenizedShard:
    numbers = {key: metadata[key] for key in ("shard", "of", "documents", "tokens")}
    return TokenizedShard(folder=folder, **numbers, reused=reused)
