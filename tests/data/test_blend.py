"""The blended order against Megatron's loop, and blended folders as inputs of the stages."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from typer.testing import CliRunner

from lathe.cli import app
from lathe.data.blend import blend, parse_part
from lathe.data.megatron import TokenArrays
from lathe.data.samples import BlendedSamples, Samples, Share, blending_indices, draw
from lathe.data.tokens import WRITERS, TokenBlend, TokenDataset, TokenSequences
from lathe_base.artifacts.kinds import DATA
from lathe_base.errors import Code
from tests.support.errors import raises


def greedy(weights: list[float], n: int) -> tuple[list[int], list[int]]:
    """Reference: each sample is from the part with the largest error, the first in case of ties."""
    total = np.array(weights).sum()
    normal = [weight / total for weight in weights]
    taken, parts, samples = [0] * len(weights), [], []
    for i in range(n):
        errors = [w * max(i, 1) - t for w, t in zip(normal, taken, strict=True)]
        part = errors.index(max(errors))
        parts.append(part)
        samples.append(taken[part])
        taken[part] += 1
    return parts, samples


@given(
    weights=st.one_of(
        st.lists(st.integers(1, 9).map(float), min_size=2, max_size=6),  # many ties
        st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=20),
    ),
    n=st.integers(1, 800),
)
def test_equals_the_loop(weights: list[float], n: int) -> None:
    parts, samples = greedy(weights, n)
    part_idx, sample_idx = blending_indices(np.array(weights), n)
    assert (part_idx.tolist(), sample_idx.tolist()) == (parts, samples)
    assert (part_idx.dtype, sample_idx.dtype) == (np.uint8, np.uint32)


@pytest.mark.parametrize(
    ("weights", "digest"),
    [
        ([0.7, 0.3], "3024ea780bc5d8f3"),
        ([1, 1, 1], "4152856eba73997b"),
        ([0.5, 0.3, 0.15, 0.05], "20c46c6c00705ce5"),
        ([10, 1, 0.1], "b2dc7741a5ed8862"),
        ([1e-6, 1], "249f12c573f518a4"),
        ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], "cff43e482a8f018c"),
    ],
)
def test_equals_megatron_compiled(weights: list[float], digest: str) -> None:
    """The digests are SHA-256 of the first million parts chosen by Megatron-LM's C++ loop."""
    part_idx, _ = blending_indices(np.array(weights) / sum(weights), 1_000_000)
    assert hashlib.sha256(part_idx.tobytes()).hexdigest()[:16] == digest


def in_memory(name: str, first: int, sizes: list[int]) -> TokenSequences:
    """Documents of these sizes, with consecutive tokens from `first`."""
    lens = np.array(sizes, np.int32)
    ends = np.cumsum(lens, dtype=np.int64)
    tokens = np.arange(first, first + lens.sum())
    arrays = TokenArrays(tokens, ends - lens, lens, np.arange(len(sizes) + 1))
    return TokenSequences(Path(name), {}, arrays)


def test_samples_are_those_of_the_parts_in_turn() -> None:
    novels, code = in_memory("novels", 0, [50] * 8), in_memory("code", 1000, [30] * 9)
    shares = [Share(3.0, novels, range(2, 8)), Share(1.0, code, range(9))]
    n = 200  # more than the 59 and 53 samples of one epoch
    blended = BlendedSamples(shares, 5, n, seed=11)
    alone = [
        Samples(share.dataset, share.documents, 5, math.ceil(n * weight * 1.005), 11)
        for share, weight in zip(shares, (0.75, 0.25), strict=True)
    ]
    parts, samples = greedy([3.0, 1.0], n)
    assert len(blended) == n and parts.count(0) == 150
    for i, (part, sample) in enumerate(zip(parts, samples, strict=True)):
        assert sample < len(alone[part])
        assert blended[i].tolist() == alone[part][sample].tolist()
        assert blended.origin(i) == f"{('novels', 'code')[part]} {alone[part].origin(sample)}"
    assert blended.per_epoch == 59 + 53


def test_a_single_share_needs_no_second_epoch() -> None:
    """The 0.5 % that a blend adds would require a second epoch here."""
    part = in_memory("only", 0, [101] * 10)
    drawn = draw([Share(0.2, part, range(10))], 1, 1009, seed=0)
    assert isinstance(drawn, Samples) and (drawn.epochs, len(drawn)) == (1, 1009)


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, byte_tokenizer: Tokenizer) -> Make:
    """Function that writes a data set with documents of 20 tokens each."""

    def write(
        name: str, documents: int = 5, format: str = "megatron", metadata: bool = True
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        with WRITERS[format](folder / "tokens", 257) as writer:
            for i in range(documents):
                writer.append([i] * 19 + [256])
        byte_tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "heldout.txt").write_text(f"held out of {name}")
        if metadata:
            counts = {"documents": documents, "tokens": documents * 20}
            (folder / DATA.metadata_file).write_text(
                json.dumps(counts | {"vocab_size": 257, "eos_id": 256})
            )
        return folder

    return write


def test_the_folder_is_a_data_set(make: Make, tmp_path: Path) -> None:
    novels, code = make("a/data"), make("b/data", 7, "paddle", metadata=False)
    (novels / "cloze.jsonl").write_text("{}\n")
    made = blend([(novels, 7), (code, 3)], tmp_path / "blend")
    opened = TokenDataset.open(tmp_path / "blend")
    assert isinstance(opened, TokenBlend) and opened.metadata == made.metadata
    assert (opened.vocab_size, opened.eos_id) == (257, 256)
    assert (opened.metadata["documents"], opened.metadata["tokens"]) == (12, 240)
    entries = [(e["folder"], e["weight"], e["documents"]) for e in opened.metadata["blend"]]
    assert entries == [("1-data", 7, 5), ("2-data", 3, 7)]
    assert [(weight, len(part)) for weight, part in opened.parts] == [(7, 5), (3, 7)]
    assert [part.folder for _, part in opened.parts] == [made.folder / n for n, _, _ in entries]
    assert (made.folder / "heldout.txt").read_text() == "held out of a/data"
    assert (made.folder / "cloze.jsonl").is_file()
    assert Tokenizer.from_file(str(made.folder / "tokenizer.json")).get_vocab_size() == 257
    assert os.path.samefile(novels / "tokens.bin", made.folder / "1-data" / "tokens.bin")


def test_the_folder_is_whole_without_its_parts(make: Make, tmp_path: Path) -> None:
    novels, code = make("novels"), make("code", 7)
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in code.iterdir():
        (linked / file.name).symlink_to(os.path.relpath(file, linked))
    made = blend([(novels, 1), (linked, 1)], tmp_path / "blend")
    for folder in (novels, linked, code):
        for file in folder.iterdir():
            file.unlink()
    assert [part[4].tolist() for _, part in TokenDataset.open(made.folder).parts] == [
        [4] * 19 + [256]
    ] * 2


def test_it_replaces_a_blend_and_nothing_else(make: Make, tmp_path: Path) -> None:
    parts = [(make("novels"), 1.0), (make("code"), 1.0)]
    blend(parts, tmp_path / "blend")
    made = blend([parts[0], (make("more", 9), 2.0)], tmp_path / "blend")
    assert sorted(p.name for p in made.folder.iterdir() if p.is_dir()) == ["1-novels", "2-more"]
    with raises(Code.CONFLICTING_OPTIONS, tmp_path, parts[0][0]):
        blend(parts, tmp_path)


def test_parse_part() -> None:
    assert parse_part("run/a=b/novels=0.7") == (Path("run/a=b/novels"), 0.7)
    for text in ("run/novels", "=0.5"):
        with raises(Code.INVALID_VALUE, text, "FOLDER=WEIGHT"):
            parse_part(text)
    with raises(Code.INVALID_VALUE, "run/novels: weight much"):
        parse_part("run/novels=much")


class TestRefusals:
    @pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
    def test_weights(self, make: Make, tmp_path: Path, weight: float) -> None:
        with raises(Code.INVALID_VALUE, f"code: weight {weight}"):
            blend([(make("novels"), 1.0), (make("code"), weight)], tmp_path / "blend")

    def test_parts(self, make: Make, tmp_path: Path) -> None:
        novels, code, output = make("novels"), make("code"), tmp_path / "blend"
        with raises(Code.INVALID_VALUE, "1 data sets"):
            blend([(novels, 1.0)], output)
        with raises(Code.NOT_FOUND, "nowhere"):
            blend([(novels, 1.0), (tmp_path / "nowhere", 1.0)], output)
        with raises(Code.DUPLICATE, "novels"):
            blend([(novels, 1.0), (code / ".." / "novels", 2.0)], output)
        with raises(Code.CONFLICTING_OPTIONS, novels):
            blend([(novels, 1.0), (code, 1.0)], novels)
        assert not output.exists()
        blend([(novels, 1.0), (code, 1.0)], output)
        with raises(Code.WRONG_KIND, output):
            blend([(output, 1.0), (novels, 1.0)], tmp_path / "second")

    def test_another_tokenizer(self, make: Make, tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
        novels, code = make("novels"), make("code")
        other = Tokenizer.from_str(byte_tokenizer.to_str())
        other.add_tokens(["anew"])
        other.save(str(code / "tokenizer.json"))
        with raises(Code.WRONG_TOKENIZER, code, "258 ids", novels):
            blend([(novels, 1.0), (code, 1.0)], tmp_path / "blend")

    @pytest.mark.parametrize(
        ("change", "code", "texts"),
        [
            ({"weight": 0}, Code.MALFORMED, ["data.json: blend.0.weight", "found 0"]),
            ({"weight": "heavy"}, Code.MALFORMED, ["data.json: blend.0.weight", "'heavy'"]),
            ({"folder": "../novels"}, Code.MALFORMED, ["'../novels'"]),
            ({"folder": "3-gone"}, Code.NOT_FOUND, ["3-gone"]),
        ],
    )
    def test_a_metadata_that_was_edited(
        self, make: Make, tmp_path: Path, change: dict[str, object], code: Code, texts: list[str]
    ) -> None:
        made = blend([(make("novels"), 1.0), (make("code"), 1.0)], tmp_path / "blend")
        metadata = json.loads((made.folder / DATA.metadata_file).read_bytes())
        metadata["blend"][0] |= change
        (made.folder / DATA.metadata_file).write_text(json.dumps(metadata))
        with raises(code, *texts):
            TokenDataset.open(made.folder)


def test_the_command(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("run/novels")
    make("run/python", 7)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["blend", "run/novels=0.7", "run/python=0.3"])
    assert done.exit_code == 0, done.output
    assert done.stdout == "data: run/blend\ndocuments: 12\ntokens: 240\n"
    with raises(Code.INVALID_VALUE, "1 data sets"):
        CliRunner().invoke(app, ["blend", "run/novels=1"], catch_exceptions=False)
