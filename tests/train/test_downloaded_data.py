"""Token files of Megatron-LM and PaddleFleetX are trained on as they are, without their tokenizer
beside them."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe.compress.prune import prune
from lathe.data.paddle import PaddleWriter
from lathe.data.tokens import TokenDataset
from lathe.model.checkpoint import load_checkpoint
from lathe.model.folder import read_marker
from lathe.train.pretrain import pretrain
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_run import SMALL


@pytest.fixture
def downloaded(tmp_path: Path, small_data: Path) -> Path:
    """PaddleFleetX's sample data: two files and nothing else."""
    folder = tmp_path / "data"
    folder.mkdir()
    with PaddleWriter(folder / "gpt_en_dataset_300m", 257) as writer:
        for _, part in TokenDataset.open(small_data).parts:
            for i in range(len(part)):
                writer.append(part[i].tolist())
    return folder


@pytest.fixture
def words(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    """A folder with GPT-2's BPE files under the names of their download."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    model = json.loads(byte_tokenizer.to_str())["model"]
    (folder / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n")
    return folder


def recipe(*overrides: str) -> Recipe:
    return load_recipe("tiny", [*SMALL, "Engine.max_steps=2", *overrides])


def test_the_error_names_the_ways_to_give_a_tokenizer(downloaded: Path, tmp_path: Path) -> None:
    with raises(Code.INCOMPLETE, downloaded, "--tokenizer", "gpt2-vocab.json"):
        pretrain(recipe(), downloaded, tmp_path / "dense")
    assert not (tmp_path / "dense").exists()


def test_a_given_tokenizer_and_one_beside_the_tokens_train_the_same_model(
    downloaded: Path, words: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pretrain(recipe(), downloaded, tmp_path / "given", given_tokenizer=words)
    with caplog.at_level("INFO", "lathe"):
        pretrain(recipe(), downloaded, tmp_path / "given", given_tokenizer=words)
        assert "is finished" in caplog.text
        prune(
            load_recipe("tiny-prune", [*SMALL, "Engine.max_steps=2"]),
            *(tmp_path / "given", downloaded, tmp_path / "pruned"),
        )
    assert "no tokenizer beside the tokens; reading them with the model's" in caplog.text
    recorded = read_marker(tmp_path / "given")["data"]["sha256"]
    assert recorded == TokenDataset.open(downloaded).digest
    for file in words.iterdir():
        file.rename(downloaded / file.name)
    pretrain(recipe(), downloaded, tmp_path / "beside")
    given, beside = (load_checkpoint(tmp_path / name) for name in ("given", "beside"))
    assert given.tokenizer.to_str() == beside.tokenizer.to_str()
    assert all(
        (a == b).all()
        for a, b in zip(
            given.model.state_dict().values(), beside.model.state_dict().values(), strict=True
        )
    )


def test_ids_are_checked_against_the_given_tokenizer(
    downloaded: Path, tmp_path: Path, words: Path
) -> None:
    with PaddleWriter(downloaded / "gpt_en_dataset_300m", 300) as writer:
        writer.append([1, 280] * 1000)
    with raises(Code.WRONG_TOKENIZER, "document 0 contains token 280"):
        pretrain(recipe(), downloaded, tmp_path / "dense", given_tokenizer=words)


def test_a_tokenizer_is_not_given_twice(
    downloaded: Path, words: Path, small_dense: Path, tmp_path: Path
) -> None:
    with raises(Code.CONFLICTING_OPTIONS, f"--tokenizer {words}", "--init"):
        pretrain(recipe(), downloaded, tmp_path / "dense", small_dense, words)
