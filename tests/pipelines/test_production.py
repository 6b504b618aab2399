"""A scheduled retraining: newest corpus, comparison with the live model, and release."""

import re
from pathlib import Path

import pytest

from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.gpt import GPT
from lathe_base.checks import require
from lathe_base.config.settings import Recipe
from lathe_base.provenance.chain import REQUIREMENTS
from lathe_base.provenance.keys import SIGNING_KEY, generate
from lathe_base.storage import read_text, upload
from pipelines.cluster.preflight import Preflight
from tests.pipelines.test_run import start
from tests.support.attested import AttestedRun

# INT8 loses far less than this, and an untrained model more.
STRICT = (
    "Gate.max_perplexity_increase=0.5",
    "Production.burst_seconds=1",
    "Data.Train.dataset.max_seq_len=32",
    "Data.Eval.dataset.max_seq_len=32",
)


def test_on_a_cluster_the_place_of_the_newest_is_an_address() -> None:
    arguments = {"corpus": "newest:s3://b/corpora/", "production": "s3://b/releases"}
    require(Preflight("full", arguments).given())
    wrong = {"corpus": "newest:corpora/", "production": "releases"}
    with pytest.raises(ExceptionGroup) as caught:
        require(Preflight("full", wrong).given())
    assert ["newest:corpora/" in str(e) for e in caught.value.exceptions] == [True, False]


@pytest.mark.long
def test_the_first_goes_live_and_a_worse_one_does_not(
    tmp_path: Path, recipe: Path, small_data: Path, small_dense: Path, s3: str, no_cluster: None
) -> None:
    trained = load_checkpoint(small_dense)
    untrained = GPT(trained.model.config)
    untrained.initialize(0.02, seed=1)
    save_checkpoint(tmp_path / "untrained", untrained, trained.tokenizer, "pretrain", Recipe())
    upload(small_data.parent / "corpus.txt", f"{s3}/corpora/2026-11.txt")

    def qat(model: Path, name: str) -> str:
        inputs = {"model": model, "corpus": f"newest:{s3}/corpora/", "recipe": recipe}
        inputs |= {"production": f"{s3}/releases", "name": name}
        options = [word for key, value in inputs.items() for word in (f"--{key}", value)]
        run = start(tmp_path, "qat", *options, *(w for o in STRICT for w in ("-o", o)))
        out, err = run.communicate(timeout=900)
        assert run.returncode == 0, out + err
        return out

    out = qat(small_dense, "first")
    stages = re.findall(r"^[a-z][a-z0-9-]+$", out, re.M)
    assert stages.index("prepare") < stages.index("gate") < stages.index("release")
    assert stages.index("rehearse") < stages.index("release")
    assert f"newest:{s3}/corpora/ is {s3}/corpora/2026-11.txt" in out
    assert "compared with production: passed: nothing is in production yet" in out
    assert "no Deployment to roll" in out and f"live: {s3}/releases/gpt/sha256-" in out
    pointer = read_text(f"{s3}/releases/gpt/production.json")

    out = qat(tmp_path / "untrained", "second")
    assert "compared with production: failed: perplexity" in out
    assert "not released: the live model stays" in out
    assert read_text(f"{s3}/releases/gpt/production.json") == pointer


@pytest.mark.long
def test_the_release_step_asks_for_what_production_requires(
    tmp_path: Path,
    recipe: Path,
    made: AttestedRun,
    monkeypatch: pytest.MonkeyPatch,
    no_cluster: None,
) -> None:
    monkeypatch.setenv(SIGNING_KEY, str(made.folder / "key.pem"))
    releases = tmp_path / "releases"
    inputs = {"model": made.dense, "corpus": made.folder / "corpus.txt", "recipe": recipe}
    inputs |= {"production": releases.as_uri(), "name": "run"}
    options = [word for key, value in inputs.items() for word in (f"--{key}", value)]
    settings = [*STRICT, f"Production.require=[{','.join(REQUIREMENTS)}]"]

    def qat(key: Path) -> tuple[int, str]:
        own = [word for o in [*settings, f"Production.keys=[{key}]"] for word in ("-o", o)]
        run = start(tmp_path, "qat", *options, *own)
        out, err = run.communicate(timeout=900)
        return run.returncode, out + err

    status, out = qat(generate(tmp_path / "mallory.pem"))
    assert status == 1 and "rejected by Production.require (signature)" in out, out
    assert "not by a trusted signer" in out
    assert not list(releases.rglob("model.onnx"))
    status, out = qat(made.public)
    assert status == 0 and f"live: {releases.as_uri()}/gpt/sha256-" in out, out
