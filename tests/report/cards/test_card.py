"""Cards match the folders, in the format that Hugging Face's library reads."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import ModelCardData
from typer.testing import CliRunner

from lathe.cli import app
from lathe.evaluate.comparison import outcome
from lathe.model.card import CARD
from lathe.model.config import read_config
from lathe.report.cards.evidence import read_evidence
from lathe.report.cards.release import model_card
from lathe.train.pretrain import pretrain
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code, UserError
from tests.report.cards.conftest import QUICK, STATED, Stages
from tests.support.errors import raises
from tests.support.small_run import SMALL

FILES = {"model.safetensors", "config.json", "tokenizer.json", "README.md"}


def parsed(text: str) -> ModelCardData:
    """Parse the metadata with Hugging Face's library; errors in `model-index` are not ignored."""
    return ModelCard(text, ignore_metadata_errors=False).data


def of_folder(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "library", "tags"),
    [
        ("dense", "transformers", ["lathe", "gpt2"]),
        ("pruned", "lathe", ["lathe", "gpt2", "pruned"]),
        ("int8", "lathe", ["lathe", "gpt2", "pruned", "int8"]),
        ("int4", "lathe", ["lathe", "gpt2", "int4"]),
    ],
)
def test_every_checkpoint_has_a_card_that_hugging_face_reads(
    stages: Stages, name: str, library: str, tags: list[str]
) -> None:
    folder = stages.models[name]
    meta = json.loads((folder / "lathe.json").read_text())
    assert set(meta["files"]) == FILES
    card = parsed(of_folder(folder))
    assert (card.license, card.language, card.library_name) == ("apache-2.0", ["en"], library)
    assert (card.tags, card.pipeline_tag) == (tags, "text-generation")
    assert card.eval_results is None
    assert f"{meta['n_params']:,} parameters" in of_folder(folder)


def test_a_card_says_how_the_model_was_made(stages: Stages) -> None:
    int8, int4 = (of_folder(stages.models[name]) for name in ("int8", "int4"))
    ancestors = json.loads((stages.models["int8"] / "lathe.json").read_text())["ancestors"]
    assert [x["stage"] for x in ancestors] == ["prune", "pretrain"]
    for ancestor in ancestors:
        assert f"| {ancestor['stage']}, 2 steps | `{ancestor['sha256']}` |" in int8
    assert "| INT8 per channel, INT8 inputs, static scale | attn.c_attn (all blocks)" in int8
    assert "| INT4 per group of 32, INT8 inputs, dynamic scales |" in int4
    assert "- Pruned" in int8 and "- Pruned" not in int4
    data = json.loads((stages.data / "data.json").read_text())
    assert data["license"] == "CC0-1.0"
    row = f"| corpus.txt | CC0-1.0 | {data['documents']:,} | {data['tokens']:,} |"
    assert row in int8 and row in int4
    assert "Intended use: To count bottles | and walls." in int8
    assert "Out of scope: To count anything else." in int8
    assert r"| contact | The bottle \| wall team |" in int8  # one cell


def test_a_model_that_was_not_measured_has_no_figures(stages: Stages) -> None:
    for text in (
        of_folder(stages.models["int8"]),
        model_card(read_evidence(stages.models["int8"])),
    ):
        figures = text.partition("## Evaluation results")[2].partition(
            "## Training and compression"
        )[0]
        assert "Not evaluated." in figures
        assert not re.search(r"\d", figures)
        assert "model-index" not in text


def test_the_figures_are_those_of_the_evaluation(stages: Stages) -> None:
    text = model_card(full(stages))
    metrics = json.loads((stages.evaluations["int8"] / "metrics.json").read_text())
    results = parsed(text).eval_results
    found = {result.metric_name: result for result in results or []}
    cloze, held_out = metrics["cloze"], metrics["text"]
    assert {name: result.metric_value for name, result in found.items()} == {
        "Perplexity": held_out["perplexity"],
        "Cloze accuracy": cloze["accuracy"],
        "Last-token accuracy": cloze["last_token_accuracy"],
        "Cloze word perplexity": cloze["target_perplexity"],
    }
    assert found["Perplexity"].metric_args["stderr"] == held_out["perplexity_stderr"]
    assert found["Perplexity"].dataset_args == {"sha256": metrics["digests"]["text"]}
    low, high = found["Perplexity"].metric_args["confidence_interval"]
    assert low < held_out["perplexity"] < high
    assert f"| Perplexity | {held_out['perplexity']:.2f} | {low:.2f} to {high:.2f} |" in text
    assert parsed(text).metrics == ["perplexity", "accuracy"]


def test_the_verdict_and_the_export_are_on_the_card(stages: Stages) -> None:
    text, verdict = model_card(full(stages)), json.loads(stages.verdict.read_text())
    assert f"the gate's verdict is **{outcome(verdict['verdict'], verdict['passed'])}**" in text
    for reason in verdict["reasons"]:
        assert f"- {reason}\n" in text
    undecided = [c["measure"] for c in verdict["checks"] if c["verdict"] == "inconclusive"]
    assert text.count("could not decide") == len(undecided)
    exported = json.loads((stages.exported / "export.json").read_text())
    assert f"SHA-256 `{exported['sha256']}`, of the checkpoint `{exported['source']}`" in text
    assert "onnx" in (parsed(text).tags or [])


def test_an_undecided_check_is_a_limit(stages: Stages, tmp_path: Path) -> None:
    verdict = json.loads(stages.verdict.read_text())
    verdict |= {"verdict": "inconclusive", "passed": False}
    verdict["checks"][0] |= {"verdict": "inconclusive", "measure": "the count of bottles"}
    (tmp_path / "gate.json").write_text(json.dumps(verdict))
    text = model_card(full(stages, verdict=tmp_path / "gate.json"))
    assert "is inconclusive for the count of bottles" in text.partition("## Limitations")[2]
    assert "the gate's verdict is **NOT PROVEN**" in text


def test_an_export_alone_has_a_card(stages: Stages) -> None:
    text = model_card(read_evidence(stages.exported))
    card = parsed(text)
    assert card.library_name == "onnx" and {"onnx", "int8"} <= set(card.tags or [])
    assert "lathe deploy FOLDER --model CHECKPOINT" in text and "lathe generate" not in text
    assert "The training data is not recorded." in text


def test_the_same_evidence_gives_the_same_bytes(stages: Stages) -> None:
    assert model_card(full(stages)) == model_card(full(stages))


def test_a_card_states_no_time_no_place_and_no_speed(stages: Stages) -> None:
    for text in (of_folder(stages.models["int8"]), model_card(full(stages))):
        assert str(stages.data.parent) not in text
        assert "per second" not in text
        assert not re.search(r"\b20\d\d-\d\d-\d\d\b", text)


def test_the_same_training_writes_the_same_card(stages: Stages, tmp_path: Path) -> None:
    pretrain(load_recipe("tiny", [*SMALL, *STATED, *QUICK]), stages.data, tmp_path / "again")
    first = json.loads((stages.models["dense"] / "lathe.json").read_text())["metrics"]
    again = json.loads((tmp_path / "again" / "lathe.json").read_text())["metrics"]
    assert first["tokens_per_second"] != again["tokens_per_second"]
    assert of_folder(tmp_path / "again") == of_folder(stages.models["dense"])


def test_commands_on_the_card_exist(stages: Stages) -> None:
    folder = stages.models["dense"]
    text = of_folder(folder) + model_card(read_evidence(stages.exported))
    known = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    verbs = set(re.findall(r"^lathe ([a-z-]+)", text, re.M)) - {"verify"}
    assert {"generate", "export", "deploy", "client"} <= verbs <= known
    load, ask, *_ = re.findall(r"```python\n(.*?)```", text, re.S)
    found: dict[str, Any] = {}
    exec(load.replace("FOLDER", str(folder)), found)
    assert found["checkpoint"].model.config == read_config(folder)
    exec(ask.partition("with")[0], found)
    assert found["Client"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "dense"}, lambda stages: stages.evaluations["int8"]),
        ({"model": "dense", "evaluation": None}, lambda stages: stages.verdict),
        (
            {"model": "dense", "evaluation": None, "verdict": None},
            lambda stages: stages.exported,
        ),
    ],
)
def test_evidence_of_another_model_is_refused(
    stages: Stages, changes: dict[str, Any], named: Callable[[Stages], Path]
) -> None:
    if changes.get("verdict", "") is not None:
        changes |= {"exported": None}
    with raises(Code.MISMATCH, named(stages), stages.models["dense"]):
        full(stages, **changes)


def test_the_command_takes_what_was_stated_later_and_keeps_a_card_that_was_edited(
    stages: Stages, tmp_path: Path
) -> None:
    output = tmp_path / "README.md"
    arguments = ["card", str(stages.models["dense"]), "--output", str(output)]
    arguments += ["--evaluation", str(stages.evaluations["dense"])]
    stated = ["-o", "Card.license=The licence of bottles"]
    for _ in range(2):  # the second time replaces the file
        done = CliRunner().invoke(app, [*arguments, *stated])
        assert done.exit_code == 0, done.output
    card = parsed(output.read_text())
    assert (card.license, card.license_name) == ("other", "The licence of bottles")
    assert card.language == ["en"]  # from the training recipe
    output.write_text(output.read_text().replace("continues", "completes"))
    assert not CARD.is_one(output)
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, UserError) and done.exception.code is Code.EXISTS


def full(stages: Stages, model: str = "int8", **changes: Any) -> Any:
    given: dict[str, Any] = {
        "evaluation": stages.evaluations["int8"],
        "verdict": stages.verdict,
        "exported": stages.exported,
    }
    return read_evidence(stages.models[model], **(given | changes))
