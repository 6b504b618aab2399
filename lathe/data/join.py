"""Combine the tokenized shards of a corpus into one data set, as `prepare` would write it."""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lathe.data.chats import Chats
from lathe.data.corpus_tokenizer import trained_on
from lathe.data.fast_tokenizer import TokenBatch
from lathe.data.megatron import TokenArrays, check_ids, read_megatron
from lathe.data.prepare import PreparedData, Text, trained, write_data_set
from lathe.data.sentences import sentence_rules
from lathe.data.sources import no_text
from lathe.data.spool import Spool, read_lines, with_validation
from lathe.data.tokenize import HINT, Batches, encoded
from lathe.data.tokenizer import fingerprint, load_tokenizer, vocab_size
from lathe_base.artifacts.kinds import DATA, SHARD, read_intact
from lathe_base.artifacts.metadata import TEXT, ShardMetadata
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_folder, claim_output_folder

SAME = {
    "of": "number of shards",
    "source": "corpus",
    "corpus_sha256": "file names or sizes of the corpus",
    "text_key": "Prepare.text_key",
    "tokenizer_sha256": "tokenizer",
    "special_tokens_in_text": "Prepare.special_tokens_in_text",
    "sentences": "Prepare.split_sentences, its language or version of sentencex",
    "chat_template_sha256": "Prepare.chat or chat template",
    "trained_on": "tokenizer training data",
}
"""Metadata keys that all shards of one corpus share, and what they mean."""


@dataclass(frozen=True)
class _Opened:
    folder: Path
    metadata: ShardMetadata
    arrays: TokenArrays


@attested("join", "folders")
def join(recipe: Recipe, folders: Sequence[Path], output: Path) -> PreparedData:
    """Write the data set that `prepare` makes of the same corpus, byte for byte.

    Args:
        recipe: `Prepare`, and the split and `max_seq_len` of `Data.Train.dataset`.
        folders: every shard of the corpus once, in any order; see `lathe.data.tokenize.tokenize`.
        output: see `prepare`.

    Raises:
        UserError: a shard is missing, given twice, altered or of another corpus, tokenizer or
            number of shards; or as `prepare`. No partial output is left.
    """
    claim_output_folder(output, DATA, *folders)
    shards = [_open(folder) for folder in folders]
    _require_one_corpus(shards)
    # The shards agree with each other; they also have to agree with the recipe, which decides what
    # `prepare` would do.
    first = shards[0].metadata
    special = recipe.Prepare.special_tokens_in_text
    if first.special_tokens_in_text != special:
        raise UserError(
            f"{shards[0].folder}: was tokenized with Prepare.special_tokens_in_text="
            f"{first.special_tokens_in_text}, now {special}",
            HINT,
            Code.MISMATCH,
        )
    if first.sentences != (rules := sentence_rules(recipe.Prepare)):
        raise UserError(
            f"{shards[0].folder}: was tokenized with sentence rules {first.sentences}, now {rules}",
            f"set Prepare.split_sentences and Prepare.sentence_language as there, or {HINT}",
            Code.MISMATCH,
        )
    if bool(first.chat_template_sha256) != recipe.Prepare.chat:
        raise UserError(
            f"{shards[0].folder}: was tokenized with Prepare.chat={not recipe.Prepare.chat}, now "
            f"{recipe.Prepare.chat}",
            HINT,
            Code.MISMATCH,
        )
    documents = sum(shard.metadata.documents for shard in shards)
    if not documents:
        raise no_text(first.source)
    tokenizer = _common_tokenizer(shards)
    chats = Chats(shards[0].folder, tokenizer) if recipe.Prepare.chat else None
    with atomic_folder(output, DATA) as work:
        # The text decides whether `output` is complete already, so it comes before the tokens.
        texts = {shard.folder: read_lines(shard.folder / TEXT) for shard in shards}
        lines = (
            line
            for _, count, shard in _in_order(shards)
            for line in islice(texts[shard.folder], count)
        )
        spool = Spool(work.with_name("documents"), lines, f"read {len(shards)} shards")
        if spool.documents != documents:
            counted = f"{spool.documents:,} documents, not {documents:,} as counted"
            raise UserError(f"{len(shards)} shards: {counted}", HINT, Code.MISMATCH)
        text = spool if chats else with_validation(spool, recipe.Data.Train.dataset.split)
        # As `prepare` writes it: of a tokenizer that was trained on just this text, how.
        origin = first.trained_on
        is_own = origin is not None and origin.model_dump() == trained_on(recipe, text)
        used = trained(recipe) if is_own else fingerprint(tokenizer)

        def encode(_: int) -> tuple[Tokenizer, Batches]:
            if text is spool:
                return tokenizer, _tokens(shards)
            # Large documents were cut into pieces, which are tokenized again.
            return tokenizer, encoded(text, tokenizer, recipe.Prepare)

        left_out = sum((Counter(shard.metadata.left_out) for shard in shards), Counter[str]())
        joined = Text(first.source, text, used, "join", left_out, chats)
        return write_data_set(work, output, recipe, joined, encode)


def _open(folder: Path) -> _Opened:
    if not (folder / SHARD.metadata_file).is_file():
        raise UserError(
            f"{folder}: not a tokenized shard: no {SHARD.metadata_file}",
            "give the folders that `lathe tokenize` wrote",
            Code.WRONG_KIND,
        )
    metadata = read_intact(folder, SHARD.metadata_file, ShardMetadata, HINT)
    arrays = read_megatron(folder / "tokens.bin", folder / "tokens.idx")
    counts = arrays.documents, len(arrays.tokens)
    if counts != (metadata.documents, metadata.tokens):
        raise UserError(
            f"{folder / SHARD.metadata_file}: counts {metadata.documents:,} documents and "
            f"{metadata.tokens:,} tokens, but the files contain {counts[0]:,} and {counts[1]:,}",
            HINT,
            Code.MISMATCH,
        )
    return _Opened(folder, metadata, arrays)


def _require_one_corpus(shards: Sequence[_Opened]) -> None:
    """Raise UserError unless these are the shards of one corpus, each of them once."""
    first = shards[0]
    for shard in shards[1:]:
        for key, what in SAME.items():
            if getattr(shard.metadata, key) != getattr(first.metadata, key):
                raise UserError(
                    f"{shard.folder} and {first.folder}: different {what}",
                    "tokenize all shards with the same corpus and settings",
                    Code.MISMATCH,
                )
    shards_by_number: dict[int, Path] = {}
    for shard in shards:
        number, of = shard.metadata.shard, shard.metadata.of
        if number in shards_by_number:
            raise UserError(
                f"{shards_by_number[number]} and {shard.folder}: both are shard {number}/{of}",
                "give every shard once",
                Code.DUPLICATE,
            )
        shards_by_number[number] = shard.folder
    if missing := [f"{n}/{of}" for n in range(1, of + 1) if n not in shards_by_number]:
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise UserError(
            f"{len(missing)} of {of} shards missing: {shown}",
            f"create it with lathe tokenize --shard {missing[0]}, and give all shards",
            Code.INCOMPLETE,
        )


def _common_tokenizer(shards: Sequence[_Opened]) -> Tokenizer:
    first = shards[0]
    tokenizer = load_tokenizer(first.folder)
    if fingerprint(tokenizer) != first.metadata.tokenizer_sha256:
        raise UserError(
            f"{first.folder / 'tokenizer.json'}: differs from the one in {SHARD.metadata_file}",
            HINT,
            Code.MISMATCH,
        )
    for shard in shards:
        check_ids(shard.arrays, vocab_size(tokenizer), shard.folder)
    return tokenizer


def _in_order(shards: Sequence[_Opened]) -> Iterator[tuple[int, int, _Opened]]:
    """First document in its shard, number of documents and shard of each block of the corpus."""

    def blocks(shard: _Opened) -> Iterator[tuple[int, int, int, int, _Opened]]:
        first = 0
        for file, block, documents in shard.metadata.blocks:
            yield file, block, first, documents, shard
            first += documents

    # Each shard has its blocks in the order of the corpus, by file and number in the file.
    merged = heapq.merge(*map(blocks, shards), key=lambda block: block[:2])
    for _, _, first, documents, shard in merged:
        yield first, documents, shard


def _tokens(shards: Sequence[_Opened]) -> Batches:
    all_bounds = {shard.folder: shard.arrays.document_bounds for shard in shards}
    for first, documents, shard in _in_order(shards):
        bounds = all_bounds[shard.folder][first : first + documents + 1]
        sizes = shard.arrays.sizes[bounds[0] : bounds[-1]].astype(np.int64)
        begin = shard.arrays.starts[bounds[0]]
        tokens = shard.arrays.tokens[begin : begin + sizes.sum()]
        mask = None
        if shard.arrays.mask is not None:
            mask = shard.arrays.mask[begin : begin + sizes.sum()]
        yield TokenBatch(tokens, sizes, np.diff(bounds), mask)
