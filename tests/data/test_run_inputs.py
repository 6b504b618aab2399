"""A run's external inputs are located and identified by their bytes."""

from pathlib import Path

import pytest

from lathe.data.run_inputs import content, look_up, require_unchanged
from lathe.data.tokenizer import PAIRS
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code, StageError
from lathe_base.storage.objects import UNKNOWN
from tests.support.errors import raises


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    folder = tmp_path / "corpora"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    return folder


def test_the_newest_corpus_is_looked_up_and_the_same_bytes_are_the_same(corpora: Path) -> None:
    recipe, place = load_recipe("tiny", []), f"newest:{corpora}"
    first = look_up([recipe], place)
    assert first.corpus == str(corpora / "a.txt") and list(first.text) == [first.corpus]
    assert look_up([recipe], place) == first
    (corpora / "b.txt").write_text("two")
    assert look_up([recipe], place).corpus == str(corpora / "b.txt")


def test_each_step_gets_what_it_reads(tmp_path: Path) -> None:
    places = {}
    for name in ("corpus", "model", "cloze", "teacher", "measured", "sums"):
        places[name] = str(tmp_path / name)
        (tmp_path / name).write_text(name)
    overrides = [f"Compress.Distill.teacher={places['teacher']}"]
    overrides += [f"Offline_Eval.eval_path={places['measured']}"]
    overrides += [f"Offline_Eval.tasks=[exact_match={places['sums']}]"]
    recipes = [load_recipe("tiny", []), load_recipe("tiny-prune", overrides)]
    given = {key: places[key] for key in ("corpus", "model", "cloze")}
    found = look_up(recipes, **given)
    assert {Path(place).name for place in found.text} == {"corpus", "model"}
    assert {Path(place).name for place in found.weights} == {"model", "teacher"}
    scored = {"model", "teacher", "cloze", "measured", "sums"}
    assert {Path(place).name for place in found.scored} == scored
    trained = look_up(recipes, corpus=places["corpus"], init=places["model"])
    assert {Path(place).name for place in trained.text} == {"corpus"}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_tokenizer_in_two_files_is_both(pair: tuple[str, str], tmp_path: Path) -> None:
    for name in pair:
        (tmp_path / name).write_text(name)
    recipe, vocabulary = load_recipe("tiny", []), str(tmp_path / pair[0])
    before = look_up([recipe], tokenizer=vocabulary)
    (tmp_path / pair[1]).write_text("others")
    assert look_up([recipe], tokenizer=vocabulary).text != before.text


def test_contents_of_a_hub_never_compare_equal() -> None:
    first, second = content("hf://wikitext:wikitext-2"), content("hf://wikitext:wikitext-2")
    assert first.startswith(UNKNOWN) and first != second
    require_unchanged({"hf://wikitext:wikitext-2": first})


def test_a_corpus_that_changes_during_a_run_is_reported(corpora: Path) -> None:
    found = look_up([load_recipe("tiny", [])], str(corpora))
    require_unchanged(found.text)
    (corpora / "a.txt").write_text("ona")
    with raises(Code.CHANGED, corpora, kind=StageError):
        require_unchanged(found.text)
