"""Everything a step reads is among its materials: blended data, imported weights, a teacher."""

import hashlib
import json
import shutil
from itertools import islice
from pathlib import Path

import pytest

from lathe.backends.paddle_checkpoint import export_checkpoint, import_checkpoint
from lathe.compress.prune import prune
from lathe.data.blend import blend
from lathe.data.prepare import prepare
from lathe.data.sources import documents
from lathe.release.certify.rebuild import Corpora
from lathe.train.pretrain import pretrain
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from lathe_base.provenance.chain import Step, verify_chain
from lathe_base.provenance.keys import SIGNING_KEY
from tests.support.attested import OVERRIDES, AttestedRun
from tests.support.errors import raises


@pytest.fixture
def signing(made: AttestedRun, monkeypatch: pytest.MonkeyPatch) -> AttestedRun:
    monkeypatch.setenv(SIGNING_KEY, str(made.folder / "key.pem"))
    return made


def steps(chain: Step) -> list[str]:
    return [step.statement.step for step in chain.walk()]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_blend_leads_to_the_corpus_of_each_part(signing: AttestedRun, tmp_path: Path) -> None:
    corpora = tmp_path / "corpora"
    corpora.mkdir()
    (corpora / "more.txt").write_text("\n\n".join(islice(documents("python"), 40, 70)))
    tokenizer = str(signing.data / "tokenizer.json")
    prepare(signing.recipe, tmp_path / "more", str(corpora), tokenizer)
    blend([(signing.data, 0.7), (tmp_path / "more", 0.3)], tmp_path / "blend")
    pretrain(signing.recipe, tmp_path / "blend", tmp_path / "model")
    chain = verify_chain(tmp_path / "model", [signing.public])
    assert steps(chain) == ["pretrain", "blend", "prepare", "prepare"]
    _, blended, *parts = chain.walk()
    weights = [(found.annotations or {})["weight"] for found, _ in blended.made_by]
    assert weights == [0.7, 0.3]
    places = [(found := part.input("corpus")) and found[0].path for part in parts]
    assert [place and place.name for place in places] == ["corpus.txt", "corpora"]
    (vocabulary, before) = parts[1].input("tokenizer") or pytest.fail("no tokenizer")
    assert before is None and vocabulary.sha256 == sha256(Path(tokenizer))


@pytest.mark.slow
def test_a_split_of_a_folder_is_attested_and_found_again(
    signing: AttestedRun, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for split, texts in (("train", "a"), ("test", islice(documents("python"), 40, 70))):
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    tokenizer = str(signing.data / "tokenizer.json")
    prepare(signing.recipe, tmp_path / "data", f"{folder}::test", tokenizer)
    first = verify_chain(tmp_path / "data", [signing.public])
    corpus, _ = first.input("corpus") or pytest.fail("no corpus")
    assert corpus.uri == f"{folder.as_uri()}::test"
    assert Corpora([corpus], []).location(corpus) == f"{folder}::test"
    shutil.rmtree(folder)
    with raises(Code.NOT_FOUND, "set::test"):
        Corpora([corpus], []).location(corpus)


def test_an_imported_checkpoint_leads_to_its_file(signing: AttestedRun, tmp_path: Path) -> None:
    path = export_checkpoint(signing.dense, tmp_path / "paddle")
    tokenizer = signing.data / "tokenizer.json"
    import_checkpoint(signing.recipe, path, tokenizer, tmp_path / "imported")
    chain = verify_chain(tmp_path / "imported", [signing.public])
    assert steps(chain) == ["import-paddle"]
    found = {resource.name: resource.sha256 for resource, _ in chain.made_by}
    assert found == {"source": sha256(path), "tokenizer": sha256(tokenizer)}
    import_checkpoint(signing.recipe, tmp_path / "paddle", tokenizer, tmp_path / "of_folder")
    source = verify_chain(tmp_path / "of_folder", [signing.public]).input("source")
    assert source and source[0].kind == "folder" and len(source[0].sha256 or "") == 64


def test_a_teacher_that_the_recipe_names_is_an_input(signing: AttestedRun, tmp_path: Path) -> None:
    teacher = f"Compress.Distill.teacher={signing.other}"
    recipe = load_recipe("tiny", [*OVERRIDES, teacher])
    prune(recipe, signing.dense, signing.data, tmp_path / "pruned")
    chain = verify_chain(tmp_path / "pruned", [signing.public])
    taught = chain.input("teacher")
    assert taught and taught[1] and taught[1].statement.step == "pretrain"
    assert taught[0].sha256 == sha256(signing.other / "lathe.json")
    own = load_recipe("tiny", [*OVERRIDES, "Compress.Distill.teacher=parent"])
    prune(own, signing.dense, signing.data, tmp_path / "again")
    assert verify_chain(tmp_path / "again", [signing.public]).input("teacher") is None
