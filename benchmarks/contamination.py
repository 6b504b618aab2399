"""Cost of a training text's n-gram index compared to tokenizing, and its accuracy.

    python benchmarks/contamination.py --source a.jsonl.xz --clean b.jsonl.xz --tokenizer gpt2/

Planted passages of the source must all be found; passages of the other corpus are clean, unless
brute force finds half of their 8-grams in the source. Times are CPU nanoseconds per token in the
fastest of several rounds.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["RAYON_NUM_THREADS"] = "1"

import numpy as np
from numpy.typing import NDArray

from lathe.data.megatron import MegatronWriter
from lathe.data.near_duplicates import near_duplicates
from lathe.data.sources import documents
from lathe.data.spool import Spool, line
from lathe.data.tokenize import encoded, write_tokens
from lathe.data.tokenizer import load_tokenizer, vocab_size
from lathe.data.training_index import TrainingIndex, ngram_length
from lathe.evaluate.contamination import TrainingText
from lathe_base.config.settings import PrepareSettings

PASSAGES, TOKENS = 10_000, 80


def seconds(work: Callable[[], Any], rounds: int = 5) -> float:
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def passages(ids: NDArray[Any], seed: int) -> list[NDArray[Any]]:
    starts = np.random.default_rng(seed).integers(0, len(ids) - TOKENS, PASSAGES)
    return [ids[start : start + TOKENS] for start in starts]


def grams(ids: NDArray[Any], ngram: int) -> NDArray[np.uint64]:
    """Sorted 64-bit hashes of all n-grams."""
    hashes = np.zeros(len(ids) - ngram + 1, np.uint64)
    for i in range(ngram):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[i : i + len(hashes)].astype(np.uint64)
    return np.sort(hashes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="corpus to index")
    parser.add_argument("--clean", required=True, help="another corpus, to measure false positives")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer file or folder")
    settings = parser.parse_args()
    tokenizer, prepare = load_tokenizer(settings.tokenizer), PrepareSettings()
    ngram = ngram_length(vocab_size(tokenizer))
    spool = Spool(Path("contamination.spool"), map(line, documents(settings.source)), "read")

    text = list(encoded(spool, tokenizer, prepare))
    ids = np.concatenate([batch.ids for batch in text])
    sizes = np.concatenate([batch.sizes for batch in text])

    ids = ids.astype(np.uint16 if vocab_size(tokenizer) < 65_500 else np.int32)  # as in the file

    def index() -> TrainingIndex:
        return TrainingIndex.build(ids, ngram, 64 << 20)

    def tokenize() -> None:
        with MegatronWriter(Path("contamination"), vocab_size(tokenizer)) as writer:
            write_tokens(writer, encoded(spool, tokenizer, prepare), spool.documents, "tokenize")

    works: dict[str, Callable[[], Any]] = {
        "tokenizing: reading the spool, encoding, writing": tokenize,
        "index": index,
        "near copies of held-out documents": lambda: near_duplicates(
            ids, sizes, (949, 50, 1), ngram
        ),
    }
    found = {name: seconds(work) for name, work in works.items()}
    first = next(iter(found.values()))
    print("| step | ns a token | of tokenizing |\n|---|---|---|")
    for name, time_taken in found.items():
        print(f"| {name} | {time_taken / len(ids) * 1e9:.1f} | {time_taken / first:.1%} |")
    made = index()
    known = TrainingText([made])
    planted = known.marks(passages(ids, 0), 0.5)
    assert planted is not None
    print(f"\nplanted: {planted.summary()['contaminated']:,} of {PASSAGES:,} found")

    other = np.concatenate([b.ids for b in encoded(documents(settings.clean), tokenizer, prepare)])
    seen = grams(ids, ngram)
    clean = []
    for passage in passages(other, 1):
        own = grams(passage, ngram)
        at = np.minimum(np.searchsorted(seen, own), len(seen) - 1)
        if (seen[at] == own).mean() < 0.3:
            clean.append(passage)
    marks = known.marks(clean, 0.5)
    assert marks is not None
    marked, expected = marks.summary()["contaminated"], marks.summary()["by_chance"]
    print(f"clean: {marked:,} of {len(clean):,} marked, {expected} expected by chance")
    print(
        f"index: {made.filter.words.nbytes / 1e6:.0f} MB, every run of {made.shortest} tokens, "
        f"{made.rate:.2%} of windows by chance"
    )
    for path in (spool.path, Path("contamination.bin"), Path("contamination.idx")):
        path.unlink()


if __name__ == "__main__":
    main()
