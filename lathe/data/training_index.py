"""The n-gram index of a data set's training part: what `lathe evaluate` marks examples by."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lathe.data.ngrams import NgramFilter, ngram_of
from lathe.storage.artifacts.metadata import NgramIndex

if TYPE_CHECKING:  # evaluation reads an index in Paddle's environment, which has no fastokens
    from lathe.data.fast_tokenizer import TokenBatch
    from lathe.data.tokenize import Batches

FILE = "ngrams.bloom"
BYTES_PER_NGRAM = 32


def empty_index(text_bytes: int, vocab_size: int, most_megabytes: int) -> NgramFilter | None:
    """An index for a text of so many bytes, or None if none is wanted."""
    if not most_megabytes:
        return None
    ngram = ngram_of(vocab_size)
    tokens = text_bytes * ngram // BYTES_PER_NGRAM
    return NgramFilter.of_size(tokens, most_megabytes << 20, ngram)


def indexed(
    batches: "Batches", index: NgramFilter | None, documents: int
) -> Iterator["TokenBatch"]:
    """Yield the batches, and meanwhile, in a thread, add the first `documents` documents to the
    index."""
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(lambda: None)
        for batch in batches:
            if index and documents > 0:
                adding.result()  # so that no more than one batch waits
                adding = pool.submit(index.extend, batch.ids[: batch.sizes[:documents].sum()])
                documents -= len(batch.sizes)
            yield batch
        adding.result()


def write_index(index: NgramFilter, folder: Path) -> dict[str, Any]:
    """Write the index into a data set's folder; returns what its metadata says of it."""
    index.write(folder / FILE)
    return {
        "ngram": index.ngram,
        "window": index.window,
        "finds_tokens": index.shortest,
        "false_positive_rate": index.rate,
    }


def read_index(folder: Path, metadata: NgramIndex) -> NgramFilter:
    """The index of a data set.

    Raises:
        UserError: it is missing or broken.
    """
    return NgramFilter.read(folder / FILE, metadata.ngram, metadata.window)
