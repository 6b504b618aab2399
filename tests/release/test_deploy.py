"""The stage deploy end to end: repository, live server, comparison with the checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe.model.checkpoint import Checkpoint, save_checkpoint
from lathe.model.folder import checkpoint_digest
from lathe.model.gpt import GPT
from lathe.release.deploy import DeployResult, deploy, find_divergence, serve
from lathe_base.config.settings import ExportSettings, Recipe, ServingSettings
from lathe_base.errors import Code, StageError
from lathe_serving import client as client_functions
from lathe_serving import state as serve_state
from lathe_serving.server import ANY_PORTS
from tests.support.errors import raises
from tests.support.small_models import SERVED

RECIPE = Recipe(
    Serving=ServingSettings(**ANY_PORTS, threads=1), Export=ExportSettings(new_tokens=12)
)


@pytest.mark.slow
def test_deploy_leaves_the_server_up(
    triton: None,
    checkpoint: Checkpoint,
    exported: Path,
    held_out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(serve_state.STATE_VARIABLE, str(tmp_path / "state"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be used for loopback
    output = tmp_path / "deployed"
    result = deploy(RECIPE, exported, checkpoint.folder, output, data=held_out, keep_running=True)
    try:
        assert result.identical + result.near_ties == result.prompts > 0
        assert result.tokens_per_second > 0
        report = json.loads((output / "deploy.json").read_text())
        assert report["identical"] == result.identical
        assert report["samples"][0]["prompt"].startswith("All that glitters")
        first = report["samples"][0]
        text = client_functions.generate(
            first["prompt"], decode_strategy="greedy_search", min_tokens=0, max_tokens=12
        )
        assert text == first["text"]
        with raises(Code.IN_USE):
            serve(output)
    finally:
        assert serve_state.stop() is not None
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["triton.log"]


@pytest.mark.slow
def test_a_server_that_is_not_the_checkpoint_fails_the_stage(
    triton: None, checkpoint: Checkpoint, exported: Path, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = GPT(SERVED)
    other.initialize(0.2, seed=2)
    save_checkpoint(tmp_path / "other", other, byte_tokenizer, "pretrain", Recipe())
    with raises(Code.MISMATCH, exported, tmp_path / "other"):
        deploy(RECIPE, exported, tmp_path / "other", tmp_path / "out")
    assert not (tmp_path / "out").exists()

    lying = tmp_path / "lying"
    shutil.copytree(exported, lying)
    metadata = json.loads((lying / "export.json").read_text())
    digest = checkpoint_digest(tmp_path / "other")
    (lying / "export.json").write_text(json.dumps(metadata | {"source": digest}))
    with raises(Code.NOT_PROVED, "the checkpoint", kind=StageError):
        deploy(RECIPE, lying, tmp_path / "other", tmp_path / "out")
    assert not (tmp_path / "out" / "deploy.json").exists()
    assert serve_state.find(tmp_path / "out" / "server") is None


def test_a_parting_tells_position_and_gap(checkpoint: Checkpoint) -> None:
    assert find_divergence(checkpoint, "x", [1, 2], [1, 2]) is None
    parting = find_divergence(checkpoint, "x", [1, 2, 3], [1, 5])
    assert parting is not None
    assert (parting.position, parting.expected, parting.served) == (1, 2, 5)
    ended = find_divergence(checkpoint, "x", [1, 2], [1])
    assert ended is not None
    assert (ended.position, ended.served) == (1, checkpoint.eos_id)


@pytest.mark.parametrize(
    ("near_ties", "text"),
    [
        (0, "8 of 8 prompts"),
        (
            5,
            "3 of 8 prompts; the other 5 diverge at a near tie, where the two tokens' logits "
            "differ by at most 0.074",
        ),
    ],
)
def test_the_result_says_why_texts_differ(near_ties: int, text: str) -> None:
    figures = {"max_tie_gap": 0.0740318, "start_seconds": 1.0, "first_token_ms": 1.0}
    speeds = {"tokens_per_second": 1.0, "tokens_per_second_together": 1.0}
    counts = {"prompts": 8, "identical": 8 - near_ties, "near_ties": near_ties}
    assert DeployResult(Path(), Path(), **counts, **figures, **speeds).same_text == text


def test_an_unproven_export_is_refused(
    checkpoint: Checkpoint, exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported, tmp_path / "e")
    metadata = json.loads((exported / "export.json").read_text())
    del metadata["proof"]
    (tmp_path / "e" / "export.json").write_text(json.dumps(metadata))
    with raises(Code.NOT_PROVED, tmp_path / "e" / "export.json"):
        deploy(RECIPE, tmp_path / "e", checkpoint.folder, tmp_path / "out")
