"""Filtering a corpus by length, language and repetition."""

import json
import random
from pathlib import Path

from lathe.data.cleaning import Reading, counted
from lathe.data.prepare import prepare
from lathe.data.sources import Shard
from lathe.data.tokenize import tokenize
from lathe.data.tokens import TokenDataset
from lathe.model.folder import training_data
from lathe_base.config.settings import PrepareSettings, Recipe
from lathe_base.errors import Code
from tests.support.errors import raises

WORDS = [f"word{i}" for i in range(3000)]
RNG = random.Random(0)


def essay(words: int = 200) -> list[str]:
    return RNG.choices(WORDS, k=words)


def jaccard(a: list[str], b: list[str]) -> float:
    """Jaccard similarity of the sets of word 5-grams."""
    one, two = ({tuple(t[i : i + 5]) for i in range(len(t) - 4)} for t in (a, b))
    return len(one & two) / len(one | two)


def test_near_duplicates_are_found_by_their_similarity() -> None:
    reading = Reading(PrepareSettings(duplicates="near"))
    firsts = [essay() for _ in range(300)]
    assert all(reading.keeps(" ".join(text)) for text in firsts)
    kept = {"copy": 0, "close": 0, "far": 0}
    for text in firsts:
        edits = {"copy": [*text], "close": [*text], "far": [*text]}
        edits["close"][90:93] = ["other", "words"]
        edits["far"][::12] = ["changed"] * len(text[::12])
        assert jaccard(text, edits["close"]) > 0.92 and jaccard(text, edits["far"]) < 0.5
        for name, edited in edits.items():
            kept[name] += reading.keeps(" ".join(edited))
    assert kept["copy"] == 0 and kept["close"] <= 3 and kept["far"] >= 297
    assert reading.left_out["exact_duplicates"] == 300
    assert reading.left_out["near_duplicates"] == 600 - kept["close"] - kept["far"]


GERMAN = "Das Haus stand am Rande des Dorfes, und niemand wusste, wem es gehörte."
ENGLISH = "The house stood at the edge of the village, and nobody knew whose it was."


def test_lengths_languages_and_exact_duplicates() -> None:
    settings = PrepareSettings(
        min_characters=20, max_characters=200, languages=["en"], duplicates="exact"
    )
    reading = Reading(settings)
    texts = [ENGLISH, "Too short.", GERMAN, ENGLISH * 4, ENGLISH, f"{ENGLISH} "]
    assert [reading.keeps(text) for text in texts] == [True, False, False, False, False, True]
    assert reading.left_out == {
        "too_short": 1,
        "other_languages": 1,
        "too_long": 1,
        "exact_duplicates": 1,
    }
    assert all(map(Reading(PrepareSettings()).keeps, texts))


def test_dropped_documents_are_counted_in_metadata_and_card(tmp_path: Path) -> None:
    texts = [" ".join(essay(60)) for _ in range(60)]
    lines = [*texts[:30], "short", texts[3], *texts[30:]]
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    recipe = Recipe.model_validate(
        {
            "Prepare": {"vocab_size": 300, "duplicates": "near", "min_characters": 10},
            "Data": {"Train": {"dataset": {"split": "8,1,1", "max_seq_len": 32}}},
        }
    )
    done = prepare(recipe, tmp_path / "out", str(corpus))
    left_out = {"too_short": 1, "exact_duplicates": 1, "near_copies_of_heldout": 0}
    assert json.loads((done.folder / "data.json").read_text())["left_out"] == left_out
    assert done.documents == 60
    assert training_data(TokenDataset.open(done.folder)).corpora[0].left_out == left_out
    assert counted(left_out) == "1 too short, 1 exact duplicates"
    with raises(Code.CONFLICTING_OPTIONS, "Prepare.duplicates=near"):
        tokenize(recipe, tmp_path / "shard", Shard(1, 2), str(corpus), str(done.folder))
