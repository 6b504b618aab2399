"""The prepare stage: turn a corpus into a token data set and its held-out sets."""

import hashlib
import heapq
import json
import logging
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe.data.chats import Chats, chat_reader, unmarked
from lathe.data.cleaning import Reading
from lathe.data.corpus_tokenizer import claim_apart
from lathe.data.fast_tokenizer import TokenBatch
from lathe.data.megatron import TokenArrays
from lathe.data.near_duplicates import copies, near_duplicates
from lathe.data.rows import TextKey
from lathe.data.run_inputs import resolve
from lathe.data.samples import PARTS, require_sample, split_boundaries
from lathe.data.sentences import sentence_rules
from lathe.data.sources import documents, named
from lathe.data.spool import Spool, line, with_validation
from lathe.data.tokenize import Batches, encoded, use_threads, write_tokens
from lathe.data.tokenizer import (
    eos_id,
    fingerprint,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
    vocab_size,
)
from lathe.data.tokens import HINT, PAIRS, WRITERS
from lathe.data.training_index import PromptIndex, TrainingIndex, ngram_length
from lathe_base.artifacts.kinds import DATA, read_intact
from lathe_base.artifacts.metadata import DataMetadata
from lathe_base.config.settings import PrepareSettings, Recipe
from lathe_base.errors import UserError
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_folder

log = logging.getLogger("lathe")

COPIED_DOCUMENTS = 256

# LAMBADA's rule for cloze passages, see `cloze_passages`.
CONTEXT_WORDS = 50
CONTEXT_SENTENCES = 2
MAX_WORDS = 150
TARGET_LETTERS = 3
PROSE_SHARE = 0.8

PUNCTUATION = string.punctuation + "\u2018\u2019\u201c\u201d\u00ab\u00bb\u2013\u2014\u2026"
JOINTS = re.compile(r"(?<=\w)['\u2019-](?=\w)")  # within "don't" and "read-only"
APART = re.compile(r"\s+([.!?])$")  # "the end ." of tokenized text, as WikiText's
PARAGRAPH = re.compile(r"\n\s*\n")
SENTENCE = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"'\u201d\u2019)\]]))"  # ends here, perhaps inside quotes,
    r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\be\.g\.)(?<!\bi\.e\.)"
    r"\s+(?=[\"'\u201c\u2018(\[]*[A-Z])"  # and another one begins
)


@dataclass(frozen=True)
class PreparedData:
    """Result of `prepare`: the folder that it wrote, or found complete and kept."""

    folder: Path
    documents: int
    tokens: int
    vocab_size: int
    boundaries: tuple[int, int, int, int]
    cloze_examples: int
    reused: bool


@dataclass(frozen=True)
class Text:
    """The documents of a data set.

    Attributes:
        source: the name of the corpus.
        tokenizer: identifies the one that they are tokenized with.
        doing: what becomes of the tokens, for the progress bar.
        left_out: rows and documents of the corpus that were left out, by reason.
        chats: what has rendered the documents; None if they are not conversations.
    """

    source: str
    spool: Spool
    tokenizer: str
    doing: str
    left_out: Mapping[str, int] = field(default_factory=dict)
    chats: Chats | None = None


Encode = Callable[[int], tuple[Tokenizer, Batches]]
"""The tokenizer, given the number of training documents, and the tokens of all documents."""


@attested("prepare", "tokenizer")
def prepare(
    recipe: Recipe, output: Path, source: str | None = None, tokenizer: str | Path | None = None
) -> PreparedData:
    """Tokenize a corpus into `output`; a complete folder made from the same text is kept.

    Args:
        recipe: `Prepare`, and the split and `max_seq_len` of `Data.Train.dataset`.
        output: holds token files of `Prepare.format` (a document is one sequence, or with
            `Prepare.split_sentences` one for each sentence; stripped, with end-of-text appended to
            the last one), `tokenizer.json`, `heldout.txt` (the test documents, a blank
            line between), `cloze.jsonl` (passages from them) and the metadata `data.json`.
        source: see `documents` and `lathe.data.run_inputs`; `Prepare.source` unless given.
        tokenizer: `train` (on the training documents), or see `load_tokenizer`;
            `Prepare.tokenizer` unless given.

    Raises:
        UserError: as `documents` and `load_tokenizer`, or the training part is shorter than one
            sample. No partial output is left.
    """
    settings = recipe.Prepare
    source = resolve(settings.source if source is None else source)
    tokenizer = settings.tokenizer if tokenizer is None else tokenizer
    claim_apart(output, DATA, source, tokenizer)
    loaded_tokenizer = None if tokenizer == "train" else load_tokenizer(Path(tokenizer))
    chats = chat_reader(settings, tokenizer, loaded_tokenizer)
    use_threads(settings.num_workers)
    with atomic_folder(output, DATA) as work:
        reading = Reading(settings)
        lines = map(line, documents(source, chats or TextKey(settings.text_key), reading))
        spool = Spool(work.with_name("documents"), lines, f"read {named(source)}")
        if not chats:
            spool = with_validation(spool, recipe.Data.Train.dataset.split)

        def encode(training: int) -> tuple[Tokenizer, Batches]:
            used = loaded_tokenizer or train_tokenizer(islice(spool, training), settings.vocab_size)
            return used, encoded(spool, used, settings)

        origin = fingerprint(loaded_tokenizer) if loaded_tokenizer else trained(recipe)
        text = Text(named(source), spool, origin, "tokenize", reading.left_out, chats)
        return write_data_set(work, output, recipe, text, encode)


def trained(recipe: Recipe) -> str:
    """Identity of a tokenizer trained on the data set's own training documents."""
    return f"train {recipe.Prepare.vocab_size}"


def write_data_set(
    work: Path, output: Path, recipe: Recipe, text: Text, encode: Encode
) -> PreparedData:
    """Fill the folder `work`, which is to replace `output`, unless that is already made of the
    same text; raises UserError if the training part is shorter than one sample."""
    settings, dataset, spool = recipe.Prepare, recipe.Data.Train.dataset, text.spool
    made_from = {
        "text_sha256": spool.sha256,
        "format": settings.format,
        "tokenizer": text.tokenizer,
        "special_tokens_in_text": settings.special_tokens_in_text,
        "split": list(dataset.split),
        "cloze_examples": settings.cloze_examples,
        "heldout_characters": settings.heldout_characters,
        "keep_heldout_apart": settings.keep_heldout_apart,
        "ngram_index_megabytes": settings.ngram_index_megabytes,
        **({"sentences": rules} if (rules := sentence_rules(settings)) else {}),
        **({"chat_template": text.chats.digest} if text.chats else {}),
    }
    metadata = _whole(output, made_from, settings)
    if metadata is not None:
        _check_parts(metadata, text.source, dataset.max_seq_len)
        log.info("%s: already prepared from the same text and settings, kept", output)
        return _result(output, metadata, reused=True)
    # The tokenizer may be trained on the training part, so the parts come first. They move when
    # near copies of held-out documents are dropped.
    boundaries = split_boundaries(dataset.split, spool.documents)
    used, batches = encode(boundaries[1])
    save_tokenizer(used, work / "tokenizer.json")
    if text.chats:
        text.chats.save(work)
    size = vocab_size(used)
    arrays, left_out = _write_tokens(work, text, batches, size, recipe)
    if len(left_out):
        boundaries = split_boundaries(dataset.split, arrays.documents)
    sizes = arrays.document_sizes
    part_tokens = [int(sizes[a:b].sum(dtype=np.int64)) for a, b in pairwise(boundaries)]
    # With these indexes `lathe evaluate` finds what of its examples was in the training part.
    training = arrays.tokens[: part_tokens[0]]
    if arrays.mask is not None:
        prompts = PromptIndex.build(training, arrays.mask, sizes[: boundaries[1]]).write(work)
        index: dict[str, Any] = {"prompts": prompts}
    elif settings.ngram_index_megabytes:
        max_bytes = settings.ngram_index_megabytes << 20
        ngrams = TrainingIndex.build(training, ngram_length(size), max_bytes)
        index = {"ngrams": ngrams.write(work)}
    else:
        index = {}
    assistant_tokens = 0 if arrays.mask is None else int(arrays.mask.sum(dtype=np.int64))
    metadata = {
        "source": text.source,
        **({"license": settings.license} if settings.license else {}),
        "made_from": made_from,
        "boundaries": boundaries,
        "format": settings.format,
        "documents": arrays.documents,
        **({"sequences": len(arrays.sizes)} if settings.split_sentences else {}),
        "tokens": len(arrays.tokens),
        "vocab_size": size,
        "eos_id": eos_id(used),
        "part_tokens": part_tokens,
        **({} if arrays.mask is None else {"assistant_tokens": assistant_tokens}),
        "left_out": {
            **text.left_out,
            f"{'' if text.chats else 'near_'}copies_of_heldout": len(left_out),
        },
        **index,
    }
    # The held-out documents as text, numbered like the documents that are left.
    numbers = set(left_out.tolist())
    texts = map(unmarked, spool) if text.chats else spool
    kept = (document for number, document in enumerate(texts) if number not in numbers)
    tests = islice(kept, boundaries[2], boundaries[3])
    count = boundaries[3] - boundaries[2]
    metadata["cloze_examples"] = _write_held_out(work, tests, count, settings)
    _check_parts(metadata, text.source, dataset.max_seq_len)
    # Last: a folder without its metadata is not a data set.
    (work / DATA.metadata_file).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return _result(output, metadata, reused=False)


def _write_tokens(
    work: Path, text: Text, batches: Batches, size: int, recipe: Recipe
) -> tuple[TokenArrays, NDArray[np.int64]]:
    """Write the token files without near copies of held-out documents. Returns the tokens and the
    indices of the dropped documents.

    Args:
        size: of the vocabulary.
    """
    settings, split, spool = recipe.Prepare, recipe.Data.Train.dataset.split, text.spool
    write, (*ends, read) = WRITERS[settings.format], PAIRS[settings.format]

    def written(folder: Path, batches: Batches, documents: int, doing: str) -> TokenArrays:
        has_mask = {"has_mask": True} if text.chats else {}
        with write(folder / "tokens", size, **has_mask) as writer:
            write_tokens(writer, batches, documents, doing)
        return read(folder / f"tokens{ends[0]}", folder / f"tokens{ends[1]}")

    arrays = written(work, batches, spool.documents, text.doing)
    left_out = np.zeros(0, np.int64)
    if settings.keep_heldout_apart:
        sizes = arrays.document_sizes
        # Before the files are final, since what is near a held-out document shows in the ids.
        if text.chats:  # whose system prompts are often longer than all else, and the same
            left_out = copies(arrays.tokens, sizes, split)
        else:
            left_out = near_duplicates(arrays.tokens, sizes, split, ngram_length(size))
    if not len(left_out):
        return arrays, left_out
    log.warning(
        "dropped %d training documents that are %scopies of held-out ones; "
        "Prepare.keep_heldout_apart=false keeps them",
        *(len(left_out), "" if text.chats else "near "),
    )
    # Into other files first: `arrays` maps those that they replace.
    with TemporaryDirectory(dir=work) as folder:
        count = spool.documents - len(left_out)
        arrays = written(Path(folder), _without(arrays, left_out), count, "leave out")
        for path in Path(folder).iterdir():
            path.replace(work / path.name)
    return arrays, left_out


def _without(arrays: TokenArrays, left_out: NDArray[np.int64]) -> Batches:
    """All other documents, in batches."""
    first_sequences = arrays.document_bounds
    first_tokens = np.concatenate(([0], np.cumsum(arrays.document_sizes, dtype=np.int64)))
    edges = [-1, *left_out.tolist(), arrays.documents]
    # What lies between two dropped documents is copied, some documents at a time.
    for before, after in pairwise(edges):
        for begin in range(before + 1, after, COPIED_DOCUMENTS):
            end = min(begin + COPIED_DOCUMENTS, after)
            ids = arrays.tokens[first_tokens[begin] : first_tokens[end]]
            sizes = arrays.sizes[first_sequences[begin] : first_sequences[end]]
            sequences = np.diff(first_sequences[begin : end + 1])
            mask = None
            if arrays.mask is not None:
                mask = arrays.mask[first_tokens[begin] : first_tokens[end]]
            yield TokenBatch(ids, sizes.astype(np.int64), sequences, mask)


def _write_held_out(
    work: Path, texts: Iterable[str], documents: int, settings: PrepareSettings
) -> int:
    """Write `heldout.txt` and `cloze.jsonl` in one pass; returns the number of passages.

    Long documents are truncated in `heldout.txt`, all to the same length.
    """
    # Of long documents the beginning, up to a line end: each has the same share of the characters.
    share = settings.heldout_characters // max(documents, 1)
    with (work / "heldout.txt").open("w", encoding="utf-8") as held_out:

        def written() -> Iterator[str]:
            for text in texts:
                end = len(text) if len(text) <= share else text.rfind("\n", 0, share) + 1
                held_out.write(f"{text[: end or share].rstrip()}\n\n")
                yield text

        passages = cloze_passages(written(), settings.cloze_examples)
    lines = [json.dumps(asdict(passage), ensure_ascii=False) + "\n" for passage in passages]
    (work / "cloze.jsonl").write_text("".join(lines), encoding="utf-8")
    if not passages:
        log.warning("no cloze passage in the test documents: cloze.jsonl is empty")
    return len(passages)


def _check_parts(metadata: dict[str, Any], source: str, seq_len: int) -> None:
    if "assistant_tokens" in metadata:  # conversations, each of which is a sample
        return
    parts = list(zip(PARTS, pairwise(metadata["boundaries"]), metadata["part_tokens"], strict=True))
    for part, (first, end), tokens in parts:
        if part == PARTS[0]:
            require_sample(f"{source}: {part} part", end - first, tokens, seq_len)
        elif 0 < tokens <= seq_len:
            log.warning("%s part: %d tokens, fewer than one sample", part, tokens)


def _whole(
    output: Path, made_from: dict[str, Any], settings: PrepareSettings
) -> dict[str, Any] | None:
    """The metadata of a folder made from the same inputs, if none of its files has changed."""
    try:
        metadata = read_intact(output, DATA.metadata_file, DataMetadata, HINT)
    except UserError:
        return None
    same = bool(metadata.files) and metadata.raw.get("made_from") == made_from
    same &= metadata.license == (settings.license or None)
    return metadata.raw if same else None


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


@dataclass(frozen=True)
class Passage:
    """A passage, and the index of its document."""

    text: str
    document: int


def cloze_passages(documents: Iterable[str], limit: int) -> list[Passage]:
    """Unique passages that end with the word to predict, without punctuation: a cloze set from any
    prose, by the rule of LAMBADA (Paperno et al. 2016, section 3.1).

    A passage is a target sentence after the shortest run of whole sentences with at least 50 words.
    In the paper, people selected the passages whose last word needs the wider context; here the
    word must occur earlier in the passage.

    The last word has three letters or more, nothing but letters, and occurs earlier in the passage;
    before its sentence stand at least two sentences with at least 50 words. A sentence is the
    target of one passage at most, and may be context of others. Runs of white space become one
    space. Passages of more than 150 words, or with a fifth or more that is not plain words (code,
    tables), are dropped. If there are more than `limit`, the ones with the smallest SHA-256 are
    taken: a uniform and reproducible sample.
    """
    seen: set[bytes] = set()

    def fresh() -> Iterator[tuple[bytes, int, Passage]]:
        for index, document in enumerate(documents):
            for passage in _passages(document):
                digest = hashlib.sha256(passage.encode()).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield digest, len(seen), Passage(passage, index)

    chosen = heapq.nsmallest(limit, fresh(), key=lambda item: item[:2])
    return [passage for _, _, passage in sorted(chosen, key=lambda item: item[1])]


def _passages(document: str) -> Iterator[str]:
    context: list[list[str]] = []  # the sentences before, as words
    for paragraph in PARAGRAPH.split(document):
        for sentence in SENTENCE.split(paragraph.strip()):
            words = APART.sub(r"\1", sentence).split()
            # The shortest run of last sentences that is a context, or all if there is none. What is
            # further back will not be needed again.
            for count in range(CONTEXT_SENTENCES, len(context)):
                if sum(map(len, context[-count:])) >= CONTEXT_WORDS:
                    context = context[-count:]
                    break
            if passage := _passage(context, words):
                yield passage
            context.append(words)


def _passage(context: list[list[str]], sentence: list[str]) -> str | None:
    before = [word for earlier in context for word in earlier]
    if len(context) < CONTEXT_SENTENCES or len(before) < CONTEXT_WORDS or not sentence:
        return None
    last = sentence[-1]
    target = last.rstrip(PUNCTUATION)
    words = [*before, *sentence[:-1]]
    bare = [word.strip(PUNCTUATION) for word in words]
    # Words that are nothing but letters, once quotes, hyphens and apostrophes are taken off.
    plain = sum(map(str.isalpha, (JOINTS.sub("", word) for word in bare)))
    if (
        len(words) < MAX_WORDS
        and len(target) >= TARGET_LETTERS
        and target.isalpha()
        and last[len(target) :].startswith((".", "!", "?"))
        and target in bare
        and plain >= PROSE_SHARE * len(bare)
    ):
        return " ".join([*words, target])
    return None
