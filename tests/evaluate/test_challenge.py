"""Comparing a candidate with the model in production, fetched from a real store."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe.data.tokenizer import train_tokenizer
from lathe.evaluate.evaluate import evaluate
from lathe.model.gpt import GPT
from lathe.release import publish
from lathe.release.challenge import challenge, succeed
from lathe.release.publish import Acceptance
from lathe.release.release import Golden, Pointer, open_releases
from lathe_base.config.settings import GateSettings, GenerationSettings, ProductionSettings, Recipe
from lathe_base.errors import Code
from lathe_base.storage import read_text, write_text
from lathe_serving.repository import write_repository
from tests.support.errors import raises
from tests.support.small_export import UNIFORM, make_model, save, write_held_out, write_unproven


@pytest.fixture
def recipe(s3: str) -> Recipe:
    # The model of these tests has learned nothing.
    gate = GateSettings(max_perplexity_increase=0.2, on_inconclusive="pass")
    return Recipe(Gate=gate, Production=ProductionSettings(releases=f"{s3}/releases"))


@pytest.fixture
def data(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    folder = write_held_out(tmp_path / "data")
    byte_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def go_live(recipe: Recipe, exported: Path, folder: Path) -> str:
    """Publish an export and make it the live release."""
    repository = write_repository(exported, folder, recipe.Serving, GenerationSettings())
    releases, now = open_releases(recipe), datetime.now(UTC)
    release = releases.publish(repository, Golden(published=now, max_tokens=1, prompts=()))
    releases.point(Pointer().moved_to(release, now), seen=Pointer())
    return releases.address(release)


def test_the_first_the_same_and_a_worse_one(
    recipe: Recipe, data: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    model = make_model(UNIFORM)
    onnx = tmp_path / "onnx"
    write_unproven(model, byte_tokenizer, onnx)
    scores = tmp_path / "scores"
    evaluate(recipe, onnx / "checkpoint", scores, data)
    verdict = tmp_path / "verdict.json"

    first = challenge(recipe, scores, verdict, data)
    assert first.passed and first.reasons == ("passed: nothing is in production yet",)
    assert json.loads(verdict.read_text())["passed"] is True

    address = go_live(recipe, onnx, tmp_path / "repository")
    same = challenge(recipe, scores, verdict, data)
    assert [check.verdict for check in same.checks] == ["pass"] and same.passed
    assert abs(same.checks[0].change) < 1e-4  # a checkpoint in torch against its ONNX file

    worse = GPT(UNIFORM)
    worse.initialize(0.4, seed=5)
    evaluate(recipe, save(worse, byte_tokenizer, tmp_path / "worse"), tmp_path / "w", data)
    failed = challenge(recipe, tmp_path / "w", verdict, data)
    assert not failed.passed and failed.reasons[0].startswith("failed: perplexity")
    assert json.loads(verdict.read_text())["verdict"] == "fail"

    train_tokenizer(["other words are in it"] * 9, vocab_size=300).save(
        str(data / "tokenizer.json")
    )
    with raises(Code.WRONG_TOKENIZER, "production", f"{address}gpt/1/tokenizer.json"):
        challenge(recipe, scores, verdict, data)

    write_text(f"{address}gpt/1/config.json", "{}")
    with raises(Code.CORRUPT, address, "gpt/1/config.json"):
        challenge(recipe, scores, verdict, data)


@pytest.mark.parametrize("others_are_better", [True, False])
def test_a_release_that_was_not_compared_is_not_replaced(
    others_are_better: bool,
    data: Path,
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While the candidate is tested, another process makes its release live."""
    settings = ProductionSettings(releases=f"file://{tmp_path}/store")
    gate = GateSettings(max_perplexity_increase=0.2, on_inconclusive="pass")
    recipe = Recipe(Gate=gate, Production=settings)
    good, bad = make_model(UNIFORM), GPT(UNIFORM)
    bad.initialize(0.4, seed=5)
    candidate, other = (bad, good) if others_are_better else (good, bad)
    for name, model in (("candidate", candidate), ("other", other), ("live", bad)):
        write_unproven(model, byte_tokenizer, tmp_path / name)
    go_live(recipe, tmp_path / "live", tmp_path / "first")
    write_repository(
        tmp_path / "candidate",
        tmp_path / "deployed/repository",
        recipe.Serving,
        GenerationSettings(max_dec_len=7),
    )
    evaluate(recipe, tmp_path / "candidate/checkpoint", tmp_path / "scores", data)
    releases, now = open_releases(recipe), datetime.now(UTC)
    others: list[str] = []

    def accept(*_: object) -> Acceptance:
        if not others:
            repository = write_repository(
                tmp_path / "other",
                tmp_path / "second",
                recipe.Serving,
                GenerationSettings(max_dec_len=9),
            )
            golden = Golden(published=now, max_tokens=1, prompts=())
            others.append(releases.publish(repository, golden))
            pointer = releases.pointer()
            releases.point(pointer.moved_to(others[0], datetime.now(UTC)), seen=pointer)
        return Acceptance(0, 0, 0, 0, 0.0, 0.0, 0.0)

    monkeypatch.setattr(publish, "accept", accept)
    monkeypatch.setattr(
        publish, "make_golden", lambda *_: Golden(published=now, max_tokens=1, prompts=())
    )
    made = succeed(recipe, tmp_path / "deployed", tmp_path / "scores", data, None, tmp_path / "v")
    assert f"but {others[0]} is live now: comparing again" in caplog.text
    if others_are_better:
        assert made is None and releases.pointer().live_release == others[0]
        assert json.loads((tmp_path / "v").read_text())["verdict"] == "fail"
    else:
        assert made and made.before == others[0]
        assert releases.pointer().live_release == made.release


def test_looks_at_the_live_model_are_counted_beside_its_pointer(
    recipe: Recipe, data: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    margins = recipe.Gate.model_copy(update={"sequential": True})
    recipe = recipe.model_copy(update={"Gate": margins})
    onnx = tmp_path / "onnx"
    write_unproven(make_model(UNIFORM), byte_tokenizer, onnx)
    go_live(recipe, onnx, tmp_path / "repository")
    candidates = []
    for seed in (5, 6):
        model = GPT(UNIFORM)
        model.initialize(0.4, seed=seed)
        candidates.append(tmp_path / f"scores-{seed}")
        folder = save(model, byte_tokenizer, tmp_path / f"model-{seed}")
        evaluate(recipe, folder, candidates[-1], data)
    looks = [
        challenge(recipe, candidates[i], tmp_path / "verdict.json", data).look for i in (0, 1, 0)
    ]
    assert looks == [1, 2, 1]
    found = json.loads(read_text(f"{open_releases(recipe).root}/looks.json"))["looks"]
    assert [len(of_live) for of_live in found.values()] == [2]
    assert len(open_releases(recipe).published()) == 1
