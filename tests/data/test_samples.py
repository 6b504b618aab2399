"""The sample index, as Megatron builds it, against a slow direct implementation."""

import hashlib
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe.data import samples
from lathe.data.megatron import TokenArrays
from lathe.data.samples import BLOCK, SampleIndex, Samples, split_boundaries, split_sequences
from lathe.data.tokens import TokenSequences
from lathe_base.errors import Code
from tests.support.errors import raises


def data_set(sizes: list[int]) -> TokenSequences:
    """Documents of these sizes in which every token is unique."""
    lens = np.array(sizes, np.int32)
    ends = np.cumsum(lens, dtype=np.int64)
    arrays = TokenArrays(np.arange(lens.sum()), ends - lens, lens, np.arange(len(sizes) + 1))
    return TokenSequences(Path("memory"), {}, arrays)


def reference(
    dataset: TokenSequences, documents: range, seq_len: int, num_samples: int, seed: int
) -> tuple[int, list[int], list[tuple[int, int]], list[int], list[list[int]]]:
    """Slow reference; returns epochs, doc_idx, sample_idx, shuffle_idx and samples."""
    rng = np.random.RandomState(seed)
    per_epoch = sum(int(dataset.sizes[d]) for d in documents)
    epochs = 1
    while (epochs * per_epoch - 1) // seq_len < num_samples:
        epochs += 1

    before_last = ((epochs - 1) * per_epoch - 1) // seq_len
    in_last = num_samples - before_last
    apart = epochs > 1 and in_last < int(0.80 * ((per_epoch - 1) // seq_len))

    def shuffled(values: list[int]) -> list[int]:
        array = np.array(values)
        rng.shuffle(array)
        return [int(value) for value in array]

    if apart:
        doc_idx = shuffled(list(documents) * (epochs - 1)) + shuffled(list(documents))
    else:
        doc_idx = shuffled(list(documents) * epochs)

    flat = [(p, o) for p, d in enumerate(doc_idx) for o in range(int(dataset.sizes[d]))]
    total = (epochs * per_epoch - 1) // seq_len
    starts = [(0, 0)] + [flat[i * seq_len] for i in range(1, total + 1)]

    order = list(range(total))
    if apart:
        shuffle_idx = shuffled(order[:before_last]) + shuffled(order[before_last:])
    else:
        shuffle_idx = shuffled(order)
    tokens = [int(token) for d in doc_idx for token in dataset[d]]
    samples = [tokens[i * seq_len : i * seq_len + seq_len + 1] for i in shuffle_idx]
    return epochs, doc_idx, starts, shuffle_idx, samples


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    window=st.tuples(st.integers(0, 11), st.integers(1, 12)),
    seq_len=st.integers(1, 9),
    num_samples=st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_literal_rules(
    sizes: list[int], window: tuple[int, int], seq_len: int, num_samples: int, seed: int
) -> None:
    dataset = data_set(sizes)
    documents = range(len(sizes))[window[0] : window[0] + window[1]]
    if sum(sizes[d] for d in documents) <= seq_len:
        with raises(Code.TOO_LITTLE_DATA):
            Samples(dataset, documents, seq_len, num_samples, seed)
        return
    built = Samples(dataset, documents, seq_len, num_samples, seed)
    epochs, doc_idx, starts, shuffle_idx, samples = reference(
        dataset, documents, seq_len, num_samples, seed
    )
    assert built.epochs == epochs
    assert built.doc_idx.tolist() == doc_idx
    assert [tuple(row) for row in built.sample_idx.tolist()] == starts
    assert built.shuffle_idx.tolist() == shuffle_idx
    assert [built[i].tolist() for i in range(len(built))] == samples
    assert len(built) >= num_samples


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    split=st.tuples(*[st.integers(0, 9)] * 3).filter(sum),
)
def test_a_document_of_several_sequences_is_in_one_part(
    counts: list[int], split: tuple[int, int, int]
) -> None:
    marks = np.cumsum([0, *counts])
    sizes = np.ones(marks[-1], np.int32)
    arrays = TokenArrays(np.arange(len(sizes)), np.arange(len(sizes)), sizes, marks)
    documents = [count for count in counts if count]
    parts = split_boundaries(split, len(documents))
    assert split_sequences(split, arrays) == [sum(documents[:end]) for end in parts]
    assert (arrays.documents, arrays.document_sizes.tolist()) == (len(documents), documents)
    of = [document for document, count in enumerate(documents) for _ in range(count)]
    assert [arrays.containing_document(i) for i in range(len(sizes))] == of


@given(gaps=st.lists(st.integers(1, 3), max_size=40), split=st.tuples(*[st.integers(0, 9)] * 3))
def test_documents_of_one_sequence_are_divided_as_before(
    gaps: list[int], split: tuple[int, int, int]
) -> None:
    """Megatron's `doc_idx` repeats a number for every document without text, or is missing."""
    n, split = len(gaps), split if sum(split) else (1, 0, 0)
    repeated = np.repeat(np.arange(n + 1), [1, *gaps])
    for marks in (np.arange(n + 1), repeated, np.zeros(0, np.int64)):
        arrays = TokenArrays(np.zeros(n), np.arange(n), np.ones(n, np.int32), marks)
        assert split_sequences(split, arrays) == split_boundaries(split, n)
        assert arrays.document_sizes is arrays.sizes


def test_golden_example() -> None:
    """Tokens 0-3, 4-5 and 6-10 are documents; RandomState(7) orders them 2, 1, 0."""
    built = Samples(data_set([4, 2, 5]), range(3), seq_len=2, num_samples=5, seed=7)
    assert built.doc_idx.tolist() == [2, 1, 0]
    assert built.sample_idx.tolist() == [[0, 0], [0, 2], [0, 4], [1, 1], [2, 1], [2, 3]]
    assert built.shuffle_idx.tolist() == [2, 1, 0, 4, 3]
    in_order = [[6, 7, 8], [8, 9, 10], [10, 4, 5], [5, 0, 1], [1, 2, 3]]
    assert [built[i].tolist() for i in range(5)] == [in_order[k] for k in [2, 1, 0, 4, 3]]
    assert (built[0].dtype, built.sample_idx.dtype) == (np.int64, np.int32)
    assert (built.doc_idx.dtype, built.shuffle_idx.dtype) == (np.int32, np.uint32)


def test_last_epoch_is_apart_below_80_percent() -> None:
    """100 documents of one token and EOS give 199 samples per epoch, of which 159 are 80 %."""
    dataset = data_set([2] * 100)
    for extra, apart in ((158, True), (159, False)):
        built = Samples(dataset, range(100), seq_len=1, num_samples=199 + extra, seed=0)
        assert built.epochs == 2 and len(built) == 399
        assert (sorted(built.doc_idx[:100].tolist()) == list(range(100))) == apart
        assert (sorted(built.shuffle_idx[:199].tolist()) == list(range(199))) == apart


@pytest.mark.parametrize(
    ("num_samples", "seq_len", "seed", "epochs", "samples", "digest"),
    [
        (300, 64, 1234, 1, 748, "b386e587e236ae64"),
        (1100, 64, 1024, 2, 1496, "072c7c654ae02b64"),  # the second epoch is separate
        (1450, 64, 7, 2, 1496, "6802de064233d869"),  # 80 % of it or more: not separate
        (5000, 32, 99, 4, 5987, "4c31f61bcbf7ec6a"),
        (40, 1024, 1234, 1, 46, "5e790c8096ec4c8b"),
        (160, 1024, 0, 4, 187, "685385701a4e4323"),
    ],
)
def test_equals_the_index_files_of_megatron(
    num_samples: int, seq_len: int, seed: int, epochs: int, samples: int, digest: str
) -> None:
    """The digests are SHA-256 of the three arrays that Megatron-LM's functions return."""
    sizes = (np.arange(500) * 7919 % 211 + 1).astype(np.int32)
    built = SampleIndex(sizes, range(20, 470), seq_len, num_samples, seed)
    assert (built.epochs, len(built)) == (epochs, samples)
    arrays = (built.doc_idx, built.sample_idx, built.shuffle_idx)
    assert hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()[:16] == digest


def test_blocks_of_documents_and_of_samples_join() -> None:
    """Documents and samples span several blocks; the reference lists every token's position."""
    sizes = np.random.RandomState(0).randint(0, 5, BLOCK + 1000).astype(np.int32)
    built = SampleIndex(sizes, range(len(sizes)), seq_len=1, num_samples=1, seed=3)
    laid_out = sizes[built.doc_idx]
    positions = np.repeat(np.arange(len(sizes)), laid_out)
    begins = np.repeat(np.cumsum(laid_out) - laid_out, laid_out)
    assert len(built) == len(positions) - 1 > 2 * BLOCK
    np.testing.assert_array_equal(built.sample_idx[1:, 0], positions[1:])
    np.testing.assert_array_equal(built.sample_idx[1:, 1], (np.arange(len(positions)) - begins)[1:])


def test_origin_names_the_documents_with_tokens_in_the_sample() -> None:
    built = Samples(data_set([4, 2, 0, 5]), range(4), seq_len=3, num_samples=3, seed=5)
    document_ids = [0] * 4 + [1] * 2 + [3] * 5  # by token, whose value is its position
    for i in range(len(built)):
        spanned = dict.fromkeys(document_ids[token] for token in built[i].tolist())
        assert built.origin(i) == ", ".join(map(str, spanned))


@pytest.mark.parametrize(
    ("split", "n", "expected"),
    [
        ((949, 50, 1), 1000, [0, 949, 999, 1000]),
        ((949, 50, 1), 10, [0, 10, 10, 10]),
        ((949, 50, 1), 0, [0, 0, 0, 0]),
        ((1, 0, 0), 7, [0, 7, 7, 7]),
        ((98, 2, 0), 1000, [0, 980, 1000, 1000]),
        # .5 rounds to even: 2 + 2 + 0 overshoots nothing, 2 + 2 + 2 overshoots 5 by 1
        ((0.5, 0.5, 0), 3, [0, 1, 3, 3]),
        ((0.3, 0.3, 0.4), 5, [0, 1, 3, 5]),
        # Megatron's own arithmetic results in -1 here
        ((0, 0.5, 0.5), 3, [0, 0, 1, 3]),
    ],
)
def test_split_boundaries(split: tuple[float, ...], n: int, expected: list[int]) -> None:
    assert split_boundaries(split, n) == expected


@given(
    split=st.tuples(*[st.floats(0, 1000)] * 3).filter(lambda s: sum(s) > 1e-3),
    n=st.integers(0, 10**7),
)
def test_split_boundaries_cover_all_documents(split: tuple[float, ...], n: int) -> None:
    boundaries = split_boundaries(split, n)
    assert boundaries[0] == 0 and boundaries[-1] == n
    assert boundaries == sorted(boundaries)


def test_an_empty_part_is_reported_once_with_counts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "lathe"):
        with monkeypatch.context() as worker:
            worker.setenv("RANK", "1")
            split_boundaries((949, 50, 1), 11)
        for _ in range(3):  # as for every data set that is opened
            split_boundaries((949, 50, 1), 10)
    assert caplog.messages == [
        "split 949,50,1 of 10 documents leaves a part empty: 10 training, 0 validation, 0 test"
    ]
    caplog.clear()
    split_boundaries((1, 0, 0), 10)  # intended: no warning
    assert not caplog.messages


def test_a_part_without_a_sample_is_refused() -> None:
    dataset = data_set([3, 3, 3])
    assert len(Samples(dataset, range(3), 8, 1, 0)) == 1
    with raises(Code.TOO_LITTLE_DATA, "3 documents with 9 tokens", "max_seq_len 9 + 1"):
        Samples(dataset, range(3), 9, 1, 0)
    with raises(Code.TOO_LITTLE_DATA, "0 documents with 0 tokens"):
        Samples(dataset, range(2, 2), 8, 1, 0)
