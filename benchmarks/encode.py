"""Tokenization speed: fastokens against tokenizers, on one thread.

    python benchmarks/encode.py --source novels.jsonl.xz --tokenizers gpt2/ run/data/tokenizer.json

Both encode the same documents in turns; all ids are compared. Speeds are megabytes of UTF-8 per
second of CPU time.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"

import numpy as np

from lathe.data.fast_tokenizer import Encoder
from lathe.data.sources import documents
from lathe.data.tokenizer import load_tokenizer


def texts(source: str, megabytes: float) -> Iterator[str]:
    left = megabytes * 1e6
    for document in documents(source):
        if left <= 0:
            return
        left -= len(document.encode())
        yield document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="python", help="corpus, as for lathe prepare")
    parser.add_argument(
        "--tokenizers", nargs="+", type=Path, required=True, help="tokenizer files or folders"
    )
    parser.add_argument("--megabytes", type=float, default=16, help="MB of text to encode")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    settings = parser.parse_args()
    batch = list(texts(settings.source, settings.megabytes))
    megabytes = sum(len(text.encode()) for text in batch) / 1e6
    print("| tokenizer | documents | MB | tokenizers, MB/s | fastokens, MB/s | times |")
    print("|---|---|---|---|---|---|")
    for path in settings.tokenizers:
        tokenizer = load_tokenizer(path)
        encoders = [Encoder(tokenizer, False, is_fast) for is_fast in (False, True)]
        speeds: list[list[float]] = [[], []]
        for _ in range(settings.rounds):
            found = []
            for speed, encode in zip(speeds, encoders, strict=True):
                started = time.process_time()
                found.append(encode(batch).ids)
                speed.append(megabytes / (time.process_time() - started))
            assert np.array_equal(found[0], found[1]), f"{path}: ids differ"
        slow, fast = (float(np.median(speed)) for speed in speeds)
        ratio = f"{fast / slow:.0f}x"
        row = (path, len(batch), f"{megabytes:.1f}", f"{slow:.1f}", f"{fast:.1f}", ratio)
        print("|", " | ".join(map(str, row)), "|")


if __name__ == "__main__":
    main()
