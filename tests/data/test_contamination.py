"""N-grams of a training text and near copies of held-out documents, against brute force."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lathe.data.megatron import read_megatron
from lathe.data.near_duplicates import near_duplicates
from lathe.data.prepare import prepare
from lathe.data.samples import split_boundaries
from lathe.data.training_index import BLOCK, BloomFilter, TrainingIndex, expected_rate, ngram_keys
from lathe.evaluate.contamination import TrainingText, training_text
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from tests.support.errors import raises

Ids = NDArray[np.int64]
RNG = np.random.default_rng(0)


def text(tokens: int) -> Ids:
    """Random ids with a Zipf distribution, like words."""
    return RNG.zipf(1.2, tokens) % 5000


def grams(tokens: Ids, ngram: int = 8) -> set[bytes]:
    return {tokens[i : i + ngram].tobytes() for i in range(len(tokens) - ngram + 1)}


def ngram_key(gram: list[int]) -> int:
    """Key of an n-gram, computed with Python integers."""
    factor, key = 0x9E3779B97F4A7C15, 0
    for i in range(0, len(gram), 2):
        key += (gram[i] + (gram[i + 1] << 32)) * pow(factor, i // 2)
    key %= 2**64
    return (key ^ key >> 32) * factor % 2**64


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize(("ngram", "stride"), [(8, 1), (8, 6), (16, 7), (32, 6), (8, 200_000)])
def test_keys_are_those_of_every_stride_th_ngram(ngram: int, stride: int, dtype: type) -> None:
    for length in (ngram - 1, ngram, ngram + stride, BLOCK + 3 * stride):
        tokens = text(length).astype(dtype)
        keys = ngram_keys(tokens, ngram, stride)
        starts = range(0, length - ngram + 1, stride)
        assert len(keys) == len(starts)
        for i in {0, 1, len(starts) // 2, len(starts) - 1} & set(range(len(starts))):
            assert keys[i] == ngram_key(tokens[starts[i] : starts[i] + ngram].tolist())


def test_a_filter_misses_no_key_and_finds_others_at_its_rate() -> None:
    keys, others = RNG.integers(0, 2**64, (2, 100_000), dtype=np.uint64)
    for max_bytes in (1 << 16, 1 << 18, 1 << 30):
        known = BloomFilter.of_size(len(keys), max_bytes)
        known.add(keys)
        assert known.contains(keys).all()
        found = known.contains(others).sum()
        for rate in (known.rate, expected_rate(64 * len(known.words) / len(keys))):
            assert abs(found - rate * len(others)) < 5 * np.sqrt(rate * len(others)) + 1
    assert len(known.words) * 8 <= 4 * 2 * len(keys)


def test_all_planted_passages_are_found_and_clean_ones_by_the_stated_rate() -> None:
    training = text(400_000)
    index = TrainingIndex.build(training, 8, 1 << 17)  # small enough for n-grams to share words
    assert index.shortest == 13
    known = TrainingText([index])
    starts = RNG.integers(0, len(training) - 80, 3_000)
    planted = [training[start : start + RNG.integers(index.shortest, 80)] for start in starts]
    marks = known.marks(planted, 0.5)
    assert marks.overlap == (1.0,) * 3_000

    clean = [text(RNG.integers(index.shortest, 80)) for _ in range(3_000)]
    seen = grams(training)
    clean = [t for t in clean if not grams(t) & seen]
    assert len(clean) > 2_700
    marks = known.marks(clean, 0.5)
    marked = marks.summary()["contaminated"]
    assert abs(marked - marks.by_chance) < 4 * np.sqrt(marks.by_chance) + 1
    assert 0 < index.rate < 0.05 and 0 < marks.by_chance < 30

    half = np.concatenate((planted[0][:40], text(200)))
    assert 0 < (known.marks([half], 0.5).overlap[0] or 0) < 0.5
    assert known.marks([training[: index.shortest - 1]], 0.5).summary()["too_short"] == 1


def test_a_larger_text_has_a_larger_stride_and_no_more_memory() -> None:
    small, training = text(50_000), text(2_000_000)
    index, large = (TrainingIndex.build(tokens, 8, 1 << 15) for tokens in (small, training))
    assert (index.shortest, index.filter.words.nbytes <= 1 << 15) == (13, True)
    assert large.shortest > 100 and large.filter.words.nbytes == 1 << 15
    assert large.rate < 0.06
    at = slice(777, 777 + large.shortest)
    assert TrainingText([large]).marks([training[at]], 0.5).overlap == (1,)


def test_near_copies_of_held_out_documents_are_left_out() -> None:
    documents = [text(RNG.integers(15, 400)) for _ in range(1000)]
    first = split_boundaries((90, 10, 0), 1000)[1]
    planted = RNG.choice(first, 60, replace=False)
    for number, place in enumerate(planted):
        own = documents[RNG.integers(first + 50, 1000)]  # held out even if the boundary moves
        edited = np.where(RNG.random(len(own)) < 0.02, 1, own)
        quoting = np.concatenate((text(500), own, text(300)))
        documents[place] = (own, edited, quoting, own[len(own) // 2 :])[number % 4]
    sizes = np.array([len(document) for document in documents])
    left_out = near_duplicates(np.concatenate(documents), sizes, (90, 10, 0), 8).tolist()

    sets = [grams(document) for document in documents]

    def shared(a: int, b: int) -> float:
        return len(sets[a] & sets[b]) / max(1, min(len(sets[a]), len(sets[b])))

    kept = [number for number in range(1000) if number not in set(left_out)]
    boundary = split_boundaries((90, 10, 0), len(kept))[1]
    held_out = kept[boundary:]
    most = {a: max(shared(a, b) for b in held_out) for a in kept[:boundary]}
    assert max(most.values()) < 0.6
    assert set(left_out) <= set(planted.tolist())
    assert len(left_out) > 50


def recipe(**changes: object) -> Recipe:
    return Recipe.model_validate(
        {
            "Prepare": {"vocab_size": 600, **changes},
            "Data": {"Train": {"dataset": {"split": "8,1,1", "max_seq_len": 32}}},
        }
    )


def test_prepare_leaves_copies_out_and_indexes_the_rest(tmp_path: Path, prose: list[str]) -> None:
    texts = prose[:40]
    copies = {3: texts[37], 11: f"{texts[38]} And a last word.", 20: texts[35]}
    given = [copies.get(number, text) for number, text in enumerate(texts)]
    corpora = {"copied": given, "clean": [t for n, t in enumerate(given) if n not in copies]}
    for name, lines in corpora.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": t}) + "\n" for t in lines)
        )
    made = prepare(recipe(), tmp_path / "clean", str(tmp_path / "clean.jsonl"))
    tokenizer = str(tmp_path / "clean")
    done = prepare(recipe(), tmp_path / "copied", str(tmp_path / "copied.jsonl"), tokenizer)
    metadata = json.loads((done.folder / "data.json").read_text())
    assert metadata["left_out"] == {"near_copies_of_heldout": 3}
    for name in ("tokens.bin", "tokens.idx", "heldout.txt", "cloze.jsonl"):
        assert (done.folder / name).read_bytes() == (made.folder / name).read_bytes(), name
    assert done.boundaries == made.boundaries

    known = training_text(done.folder)
    assert known is not None
    arrays = read_megatron(done.folder / "tokens.bin", done.folder / "tokens.idx")
    units = [
        arrays.tokens[start : start + size]
        for start, size in zip(arrays.starts, arrays.sizes, strict=True)
    ]
    marks = [row["contaminated"] for row in known.marks(units, 0.5).rows()]
    assert marks == [True] * done.boundaries[1] + [False] * (len(units) - done.boundaries[1])

    index = done.folder / "ngrams.bloom"
    index.write_bytes(index.read_bytes()[:-1])
    with raises(Code.CORRUPT, index):
        training_text(done.folder)


def test_nothing_is_dropped_or_indexed_by_default(tmp_path: Path, prose: list[str]) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in [*prose[:20], prose[3]])
    (tmp_path / "corpus.jsonl").write_text(lines)
    settings = recipe(keep_heldout_apart=False, ngram_index_megabytes=0)
    done = prepare(settings, tmp_path / "out", str(tmp_path / "corpus.jsonl"))
    assert done.documents == 21 and not (done.folder / "ngrams.bloom").exists()
    assert training_text(done.folder) is None
