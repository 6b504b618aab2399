"""A step's tokens do not depend on ranks or earlier steps; and prefetching."""

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from lathe.data.blend import blend
from lathe.data.megatron import MegatronWriter
from lathe.data.samples import Samples, blending_indices
from lathe.data.tokenizer import load_tokenizer
from lathe.data.tokens import TokenDataset, TokenSequences
from lathe.train.batches import (
    Batch,
    EvalBatches,
    TrainBatches,
    calibration_batches,
    first_batches,
    open_data,
)
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_export import UNIFORM

T = 8
BOS = 255
DOCUMENTS = {"novels": 100, "code": 40}
TRAINING = {"novels": 80, "code": 32}


def recipe(*overrides: str) -> Recipe:
    small = (
        f"Data.Train.dataset.max_seq_len={T}",
        f"Data.Eval.dataset.max_seq_len={T}",
        "Data.Train.dataset.split=80,20,0",
        "Engine.max_steps=10",
        "Global.micro_batch_size=2",
    )
    return load_recipe("tiny", (*small, *overrides))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer) -> dict[str, Path]:  # type: ignore[no-untyped-def]
    """Data sets `novels` and `code`, whose tokens identify the document, and their 3:1 `blend`."""
    root = tmp_path_factory.mktemp("sets")
    for name, documents in DOCUMENTS.items():
        (root / name).mkdir()
        byte_tokenizer.save(str(root / name / "tokenizer.json"))
        with MegatronWriter(root / name / "tokens", 257) as writer:
            for i in range(documents):
                writer.append([i + (name == "code") * 100] * (3 + i % 11))
    blend([(root / "novels", 3.0), (root / "code", 1.0)], root / "blend")
    return {name: root / name for name in ("novels", "code", "blend")}


def train(folder: Path, batch: Batch, rank: int = 0, *overrides: str) -> TrainBatches:
    return TrainBatches(recipe(*overrides), TokenDataset.open(folder), batch, rank)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """100 documents of 1 to 13 sequences, as of Megatron's `--split-sentences`, the long ones last;
    their tokens are the document's number."""
    folder = tmp_path_factory.mktemp("sentences")
    byte_tokenizer.save(str(folder / "tokenizer.json"))
    with MegatronWriter(folder / "my-gpt_text_sentence", 257) as writer:
        for i in range(100):
            count = 1 + i // 8
            writer.extend(np.full(5 * count, i), [5] * count, [count])
    return folder


def sequences(folder: Path) -> TokenSequences:
    data = TokenDataset.open(folder)
    assert isinstance(data, TokenSequences)
    return data


def test_a_plain_set_goes_sample_by_sample(folders: dict[str, Path]) -> None:
    samples = Samples(sequences(folders["novels"]), range(80), T, 10 * 8, seed=1024)
    batches = train(folders["novels"], Batch(8, 8, 4, 2))
    assert batches.samples_per_epoch == (sum(3 + i % 11 for i in range(80)) - 1) // T
    for step in range(10):
        for i in range(2):
            expected = [samples[step * 8 + i * 4 + k] for k in range(4)]
            assert batches(step, i).tolist() == np.stack(expected).tolist()
    batches.close()


def test_a_blend_draws_from_each_part_by_its_weight(folders: dict[str, Path]) -> None:
    parts = [  # 80 samples * 3/4 and 1/4 * 1.005, rounded up
        Samples(sequences(folders["novels"]), range(80), T, 61, seed=1024),
        Samples(sequences(folders["code"]), range(32), T, 21, seed=1024),
    ]
    part_idx, sample_idx = blending_indices(np.array([3.0, 1.0]), 80)
    batches = train(folders["blend"], Batch(8, 8, 8, 1))
    for step in range(10):
        at = range(step * 8, step * 8 + 8)
        expected = [parts[part_idx[k]][int(sample_idx[k])].tolist() for k in at]
        assert batches(step, 0).tolist() == expected
    batches.close()


@pytest.mark.parametrize("name", ["novels", "blend"])
def test_a_step_is_the_same_on_any_number_of_ranks(folders: dict[str, Path], name: str) -> None:
    alone = train(folders[name], Batch(12, 12, 12, 1))
    ranks = [train(folders[name], Batch(12, 6, 2, 3), rank) for rank in range(2)]
    for step in range(10):
        together = [ranks[rank](step, i) for i in range(3) for rank in range(2)]
        assert np.array_equal(np.concatenate(together), alone(step, 0))


@pytest.mark.parametrize("order", [[5, 6, 7], [3, 3, 9, 0, 1, 4, 3], [9, 10, 11]])
def test_any_order_of_steps_gives_the_same(folders: dict[str, Path], order: list[int]) -> None:
    """Resumed runs start at any step; after the last step, samples repeat from the start."""
    batch = Batch(4, 4, 2, 2)
    asked = train(folders["blend"], batch)
    for step in order:
        fresh = train(folders["blend"], batch)
        for i in (1, 0, 1):
            assert np.array_equal(asked(step, i), fresh(step, i))


@pytest.mark.parametrize("name", ["novels", "blend"])
def test_calibration_reads_other_rows_in_every_batch(folders: dict[str, Path], name: str) -> None:
    """Also for more batches than there are training steps."""
    untrained = recipe("Engine.max_steps=0")
    data = TokenDataset.open(folders[name])
    rows = np.concatenate([*first_batches(untrained, data, 6)])
    assert len({row.tobytes() for row in rows}) > 0.9 * len(rows)
    if name == "blend":
        assert np.mean(rows[:, 0] >= 100) == pytest.approx(1 / 4, abs=0.05)  # code


def test_the_tokens_seen_of_each_part_are_counted(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    batches = train(folders["blend"], Batch(8, 8, 8, 1))
    for steps in (3, 4, 10, 2):
        rows = np.concatenate([batches(step, 0) for step in range(steps)])
        code = int((rows[:, 0] >= 100).sum())
        expected = {"1-novels": T * (8 * steps - code), "2-code": T * code}
        assert batches.seen_tokens(steps) == expected
    assert train(folders["code"], Batch(8, 8, 8, 1)).seen_tokens(10) == {}

    with caplog.at_level("INFO", "lathe"):
        batches.announce(10)
        train(folders["blend"], Batch(8, 8, 8, 1), 0, "Engine.max_steps=100").announce(100)
        train(folders["code"], Batch(8, 8, 8, 1)).announce(10)
    novels, code = (sum(3 + i % 11 for i in range(n)) for n in (80, 32))
    said = [record.getMessage() for record in caplog.records]
    epochs, of_novels = 20 / ((code - 1) // T), 60 / ((novels - 1) // T)
    assert said[:2] == [
        f"training data 1-novels: 75.0% of the samples, 480 tokens, {of_novels:.2f} epochs",
        f"training data 2-code: 25.0% of the samples, 160 tokens, {epochs:.2f} epochs",
    ]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned[0].startswith("1-novels is small") and warned[1].startswith("2-code is small")
    assert f"it will be read {10 * epochs:.1f} times" in warned[1] and len(warned) == 2
    assert said[-1] == f"training data code: 640 tokens, {4 * epochs:.2f} epochs"


def test_positions_begin_with_every_document(folders: dict[str, Path]) -> None:
    batches = train(folders["blend"], Batch(8, 8, 4, 2))
    found = batches.positions(3, 1)
    for row, places in zip(batches(3, 1), found, strict=True):
        begins = np.flatnonzero(np.diff(row[:-1], prepend=-1))
        expected = np.arange(T) - np.repeat(begins, np.diff([*begins, T]))
        assert places.tolist() == expected.tolist()
    assert (found[:, 1:] == 0).any()


def test_documents_of_a_micro_batch(folders: dict[str, Path]) -> None:
    for name in ("novels", "blend"):
        batches = train(folders[name], Batch(8, 8, 4, 2))
        for row, says in zip(batches(3, 1).tolist(), batches.documents(3, 1), strict=True):
            spanned = list(dict.fromkeys(row))  # tokens are document numbers, plus 100 in code
            if name == "blend":
                part, says = says.split(" ", 1)
                assert part == ("2-code" if spanned[0] >= 100 else "1-novels")
            assert says == ", ".join(str(token % 100) for token in spanned)


def test_the_next_step_is_read_ahead_by_a_thread_that_ends(folders: dict[str, Path]) -> None:
    before = set(threading.enumerate())
    batches = train(folders["novels"], Batch(4, 4, 4, 1))
    assert not set(threading.enumerate()) - before
    batches(0, 0)
    (reader,) = set(threading.enumerate()) - before
    batches(1, 0)
    assert set(threading.enumerate()) - before == {reader}
    batches.close()
    assert not reader.is_alive()
    list(calibration_batches(recipe(), TokenDataset.open(folders["novels"])))
    assert not set(threading.enumerate()) - before


def test_a_failure_of_the_thread_is_the_callers(folders: dict[str, Path]) -> None:
    """A document is lost after opening the data set; the second step fails."""
    data = sequences(folders["novels"])
    order = Samples(data, range(80), T, 40, seed=1024)
    first = {document for i in range(4) for document, _, _ in order.spans(i)}
    lost = next(d for i in range(4, 8) for d, _, _ in order.spans(i) if d not in first)
    starts: list[object] = data.arrays.starts.tolist()
    starts[lost] = None
    broken = replace(data, arrays=data.arrays._replace(starts=starts))  # type: ignore[arg-type]
    batches = TrainBatches(recipe(), broken, Batch(4, 4, 4, 1), 0)
    assert batches(0, 0).shape == (4, T + 1)
    for _ in range(2):
        with pytest.raises(TypeError, match="NoneType"):
            batches(1, 0)
    assert batches(0, 0).shape == (4, T + 1)
    batches.close()


class TestValidation:
    def validation(self, folder: Path, batch_size: int, batches: int) -> EvalBatches:
        return EvalBatches(recipe(), TokenDataset.open(folder), batch_size, batches)

    def test_batches_are_full(self, folders: dict[str, Path]) -> None:
        available = (sum(3 + i % 11 for i in range(80, 100)) - 1) // T
        assert available == 20
        for batch_size, batches, lengths in (
            (4, 3, [4, 4, 4]),
            (6, 99, [6, 6, 6]),  # two samples remain
            (20, 99, [20]),
            (21, 99, [20]),  # not one full batch
        ):
            held_out = self.validation(folders["novels"], batch_size, batches)
            assert [len(held_out[i]) for i in range(len(held_out))] == lengths

    def test_samples_depend_on_the_batch_and_not_on_the_micro_batch(
        self, folders: dict[str, Path]
    ) -> None:
        data = TokenDataset.open(folders["novels"])
        for size, batches, count in ((8, 2, 16), (8, 99, 16), (24, 1, 20)):
            read = []
            for micro in (1, 2, 4, 8):
                held_out = EvalBatches(recipe(), data, size, batches, micro)
                rows = [held_out[i] for i in range(len(held_out))]
                assert {len(row) for row in rows[:-1]} <= {micro}
                read.append(np.concatenate(rows))
            assert len(read[0]) == count
            assert all(np.array_equal(rows, read[0]) for rows in read)

    def test_documents_are_those_of_no_training_sample(self, folders: dict[str, Path]) -> None:
        held_out = self.validation(folders["blend"], 4, 5)
        rows = np.concatenate([held_out[i] for i in range(len(held_out))])
        of_code = (rows >= 100).any(1)
        assert (len(rows), int(of_code.sum())) == (20, 5)
        assert (rows[~of_code] >= TRAINING["novels"]).all()
        assert (rows[of_code] - 100 >= TRAINING["code"]).all()
        assert np.array_equal(held_out[2], self.validation(folders["blend"], 4, 5)[2])

    def test_a_part_that_is_too_small_is_left_out(
        self, folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        small = tmp_path / "small"
        small.mkdir()
        tokenizer = folders["novels"] / "tokenizer.json"
        (small / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        with MegatronWriter(small / "tokens", 257) as writer:
            for _ in range(5):
                writer.append([200] * 8)
        made = blend([(folders["novels"], 1.0), (small, 1.0)], tmp_path / "blend")
        with caplog.at_level("WARNING", "lathe"):
            held_out = self.validation(made.folder, 4, 5)
        assert "2-small: too few validation documents, skipping validation on it" in caplog.text
        assert len(held_out) == 5 and not any((held_out[i] == 200).any() for i in range(5))


@pytest.mark.parametrize("name", ["novels", "blend"])
def test_samples_begin_with_what_the_tokenizer_prepends(
    folders: dict[str, Path], byte_tokenizer: Tokenizer, name: str
) -> None:
    """The first token is input only: what is predicted is the same."""
    begins = Tokenizer.from_str(byte_tokenizer.to_str())
    begins.post_processor = TemplateProcessing("! $A", special_tokens=[("!", BOS)])
    config = replace(UNIFORM, vocab_size=257, n_positions=T)
    read = []
    for tokenizer in (byte_tokenizer, begins):
        data = open_data(folders[name], recipe(), config, tokenizer)
        batches = TrainBatches(recipe(), data, Batch(4, 4, 2, 2), 0)
        trained = [batches(step, i) for step in (0, 1) for i in (0, 1)]
        held_out, statistics = EvalBatches(recipe(), data, 2, 3), first_batches(recipe(), data, 3)
        read.append(np.concatenate([*trained, *held_out, *statistics]))
    plain, begun = read
    assert (begun[:, 0] == BOS).all() and (plain[:, 0] != BOS).all()
    assert np.array_equal(begun[:, 1:], plain[:, 1:])


def test_open_data_of_a_blend_checks_the_limits(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["blend"])

    def opened(vocab_size: int, n_positions: int) -> TokenDataset:
        config = replace(UNIFORM, vocab_size=vocab_size, n_positions=n_positions)
        return open_data(folders["blend"], recipe(), config, tokenizer)

    assert len(opened(257, T).parts) == 2
    with raises(Code.WRONG_TOKENIZER, folders["blend"], "257 ids", "256"):
        opened(256, T)
    with raises(Code.TOO_LONG, "8 exceeds the model's 7"):
        opened(257, T - 1)


def test_tokens_of_another_tokenizer_are_refused(folders: dict[str, Path]) -> None:
    other = Tokenizer.from_str(load_tokenizer(folders["blend"]).to_str())
    other.add_tokens(["another"])
    config = replace(UNIFORM, vocab_size=300, n_positions=T)
    with raises(Code.WRONG_TOKENIZER, folders["blend"], "(257 tokens)", "(258 tokens)"):
        open_data(folders["blend"], recipe(), config, other)


def test_documents_of_several_sequences_are_held_out_whole(
    sentences: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    mixed = blend([(sentences, 1.0), (folders["novels"], 1.0)], tmp_path / "blend")
    assert mixed.metadata["documents"] == 200
    batch = Batch(2, 2, 2, 1)
    for folder in (sentences, mixed.folder):
        seen, batches = set[int](), train(folder, batch)
        for i in range(len(batches.samples)):
            seen |= set(batches.samples[i].tolist())
        batches.close()
        held_out = EvalBatches(recipe(), TokenDataset.open(folder), 2, 1000)
        validated = {int(token) for i in range(len(held_out)) for token in np.unique(held_out[i])}
        assert seen <= set(range(80)) and validated <= set(range(80, 100))
        assert len(validated) > 15


def test_a_run_on_sentences_resumes_with_the_same_samples(sentences: Path) -> None:
    batch = Batch(4, 2, 2, 1)
    with closing(train(sentences, batch)) as whole, closing(train(sentences, batch)) as resumed:
        steps = [whole(step, 0).tolist() for step in range(6)]
        assert [resumed(step, 0).tolist() for step in range(3, 6)] == steps[3:]
