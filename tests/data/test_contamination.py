"""N-grams of a training text, and near copies of held-out documents, against slow searches."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lathe.config.settings import Recipe
from lathe.data.apart import near_copies
from lathe.data.megatron import read_megatron
from lathe.data.ngrams import BLOCK, NgramFilter, winnow
from lathe.data.prepare import prepare
from lathe.data.samples import split_boundaries
from lathe.errors import UserError
from lathe.evaluate.contamination import TrainingText, training_text

Ids = NDArray[np.int64]
RNG = np.random.default_rng(0)


def text(tokens: int) -> Ids:
    """Ids with the frequencies of words."""
    return RNG.zipf(1.2, tokens) % 5000


def grams(tokens: Ids, ngram: int = 8) -> set[bytes]:
    return {tokens[i : i + ngram].tobytes() for i in range(len(tokens) - ngram + 1)}


def smallest_of_windows(tokens: Ids, window: int, ends: list[int]) -> set[int]:
    """The keys of 8-grams that winnowing keeps, one window at a time, in Python's integers."""
    order = []
    for i in range(len(tokens) - 7):
        value = 0
        for token in tokens[i : i + 8].tolist():
            value = (value * 0x9E3779B1 + token) % 2**32
        across = any(i < end < i + 8 for end in ends)
        order.append(2**32 - 1 if across else value * 0x85EBCA6B % 2**32)
    smallest = {min(order[i : i + window]) for i in range(len(order) - window + 1)}
    return {value * 0xC2B2AE35 % 2**32 for value in smallest if value < 2**32 - 1}


@pytest.mark.parametrize("length", [12, 13, 14, 300, BLOCK + 12, BLOCK + 30])
@pytest.mark.parametrize(("window", "ends"), [(6, []), (19, []), (6, [5, 17, 18, 40, 200])])
def test_winnowing_keeps_the_smallest_of_every_window(
    length: int, window: int, ends: list[int]
) -> None:
    tokens = text(length)
    inner = [end for end in ends if end < length]
    given = np.array([*inner, length]) if ends else None
    kept = [keys for _, keys in winnow(tokens, 8, window, given)]
    found = set(np.concatenate([*kept, np.zeros(0, np.uint32)]).tolist())
    assert found == smallest_of_windows(tokens, window, inner)


def test_all_planted_passages_are_found_and_clean_ones_by_the_stated_rate() -> None:
    training = text(400_000)
    index = NgramFilter.of_size(len(training), 1 << 18, 8)  # so small that slots are shared
    for part in np.array_split(training, 7):
        index.extend(part)
    known = TrainingText([index])
    starts = RNG.integers(0, len(training) - 80, 500)
    planted = [training[start : start + RNG.integers(index.shortest, 80)] for start in starts]
    marks = known.marks(planted, 0.5)
    assert marks.overlap == (1.0,) * 500

    clean = [text(RNG.integers(index.shortest, 80)) for _ in range(10_000)]
    seen = grams(training)
    clean = [t for t in clean if len(own := grams(t)) and len(own & seen) < 0.02 * len(own)]
    assert len(clean) > 9_500
    marks = known.marks(clean, 0.5)
    marked = marks.summary()["contaminated"]
    assert abs(marked - marks.by_chance) < 4 * np.sqrt(marks.by_chance) + 1
    assert 0 < index.rate < 0.07 and 0 < marks.by_chance < 300

    half = np.concatenate((planted[0][:40], text(200)))
    assert 0 < (known.marks([half], 0.5).overlap[0] or 0) < 0.5
    assert known.marks([training[: index.shortest - 1]], 0.5).summary()["too_short"] == 1


def test_a_larger_text_has_larger_windows_and_no_more_memory() -> None:
    small, large = (NgramFilter.of_size(n, 1 << 16, 8) for n in (50_000, 5_000_000))
    assert (small.shortest, len(small.bits) <= 1 << 16) == (13, True)
    assert large.shortest > 100 and len(large.bits) == 1 << 16
    training = text(5_000_000)
    large.extend(training)
    assert large.rate < 1 / 16
    assert TrainingText([large]).marks([training[777 : 777 + large.shortest]], 0.5).overlap == (1,)


def test_near_copies_of_held_out_documents_are_left_out() -> None:
    documents = [text(RNG.integers(15, 400)) for _ in range(2000)]
    first = split_boundaries((90, 10, 0), 2000)[1]
    planted = RNG.choice(first, 60, replace=False)
    for number, place in enumerate(planted):
        own = documents[RNG.integers(first + 100, 2000)]  # some after the boundary will move
        edited = np.where(RNG.random(len(own)) < 0.02, 1, own)
        quoting = np.concatenate((text(500), own, text(300)))
        documents[place] = (own, edited, quoting, own[len(own) // 2 :])[number % 4]
    sizes = np.array([len(document) for document in documents])
    left_out = near_copies(np.concatenate(documents), sizes, (90, 10, 0), 8).tolist()

    sets = [grams(document) for document in documents]

    def shared(a: int, b: int) -> float:
        return len(sets[a] & sets[b]) / max(1, min(len(sets[a]), len(sets[b])))

    kept = [number for number in range(2000) if number not in set(left_out)]
    boundary = split_boundaries((90, 10, 0), len(kept))[1]
    held_out = [number for number in kept[boundary:]]
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
    with pytest.raises(UserError, match=r"ngrams\.bloom"):
        training_text(done.folder)


def test_nothing_is_left_out_or_indexed_unless_asked(tmp_path: Path, prose: list[str]) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in [*prose[:20], prose[3]])
    (tmp_path / "corpus.jsonl").write_text(lines)
    settings = recipe(keep_heldout_apart=False, ngram_index_megabytes=0)
    done = prepare(settings, tmp_path / "out", str(tmp_path / "corpus.jsonl"))
    assert done.documents == 21 and not (done.folder / "ngrams.bloom").exists()
    assert training_text(done.folder) is None
