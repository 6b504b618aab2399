"""Pipelines on conversations."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from components.plan import plan
from lathe.data.tokens import TokenDataset, TokenSequences
from lathe.model.checkpoint import load_checkpoint
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from pipelines.cluster.submit import choose_variant
from pipelines.compiler.compile import FUNCTIONS, built, placed_steps, takes_chats
from pipelines.local.run import check
from pipelines.steps.resources import Variant
from tests.pipelines.test_golden import body, dag_tasks
from tests.pipelines.test_makefile import dry_run
from tests.pipelines.test_run import ran
from tests.support.chats import write_conversations, write_model
from tests.support.compiled import compiled
from tests.support.errors import raises
from tests.support.micro_run import write_recipe


@pytest.fixture
def model(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    return write_model(tmp_path / "model", byte_tokenizer, family="llama", kv_heads=(2, 2))


@pytest.mark.parametrize(("name", "after"), [("qat", "quantization"), ("full", "prune")])
def test_the_model_is_finetuned_before_it_is_compressed(name: str, after: str) -> None:
    spec, _ = compiled(name, Variant(has_chats=True))
    tasks = body(spec)

    def producer(task: str, name: str) -> str:
        return str(tasks[task]["inputs"]["artifacts"][name]["taskOutputArtifact"]["producerTask"])

    assert "pretrain" not in tasks
    assert producer("finetune", "model") == producer("prepare", "model") == "importer"
    assert producer(after, "model") == producer("judge", "dense") == "finetune"
    asked = tasks["inputs"]["inputs"]["parameters"]
    assert asked["has_chats"] == {"runtimeValue": {"constant": True}}
    assert asked["corpus"] == {"componentInputParameter": "pipelinechannel--chat"}
    given = tasks["finetune"]["inputs"]["parameters"]["recipe"]["taskOutputParameter"]
    assert given == {"producerTask": "inputs", "outputParameterKey": "finetune"}
    assert len(tasks) <= 7
    judge = dag_tasks(spec, tasks["judge"])
    assert "evaluate-dense" in {task["taskInfo"]["name"] for task in judge.values()}


def test_other_pipelines_are_what_they_were() -> None:
    assert [name for name in FUNCTIONS if takes_chats(name)] == ["qat", "full"]
    for name in FUNCTIONS:
        inputs = built(name).component_spec.inputs
        assert not {"chat", "finetune_recipe"} & inputs.keys()
        assert "finetune" not in {step.stage for step in placed_steps(name)}
    with_chats = built("full", has_chats=True).component_spec.inputs
    assert [key for key, part in with_chats.items() if not part.optional] == ["chat", "model"]
    assert "corpus" not in with_chats


def test_a_submitted_run_is_compiled_for_conversations() -> None:
    arguments: dict[str, Any] = {"overrides": [], "model": "s3://m/gpt", "chat": "s3://m/c.jsonl"}
    assert choose_variant("qat", arguments).has_chats
    assert not choose_variant("qat", arguments | {"chat": ""}).has_chats


def test_every_step_reads_conversations() -> None:
    settings = plan("smollm2", ["Global.seed=7"], finetune_recipe="smollm2-chat", has_chats=True)
    assert load_recipe(settings["prepare"]).Prepare.chat
    for name in ("finetune", "quantize", "analyze"):
        assert load_recipe(settings[name]).Data.reset_attention, name
    assert load_recipe(settings["finetune"]).Engine.max_steps == 60
    assert load_recipe(settings["quantize"]).Engine.max_steps == 0
    with raises(Code.CONFLICTING_OPTIONS, "Data.Train.dataset.split"):
        plan("gpt-345m", [], finetune_recipe="smollm2-chat", has_chats=True)


def problems(name: str, overrides: Sequence[str] = (), **arguments: str) -> str:
    try:
        check(name, Path("run/one"), {"overrides": [*overrides], **arguments})
    except ExceptionGroup as group:
        return "\n".join(map(str, group.exceptions))
    return ""


BROKEN = {
    "neither": ('{"text": "x"}', "chat .*c.jsonl:1: no conversation"),
    "silent": ('{"messages": [{"role": "user", "content": "x"}]}', "no message of the assistant"),
    "absent": (None, "chat: no such file or folder"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_conversations_are_found_before_a_run(
    case: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, message = BROKEN[case]
    if text is not None:
        (tmp_path / "c.jsonl").write_text(text + "\n")
    found = problems("qat", model=str(model), chat=str(tmp_path / "c.jsonl"))
    assert re.search(message, found), found


def test_wrong_arguments_are_named(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chat, of_model = str(write_conversations(tmp_path / "c.jsonl", 9)), str(model)
    assert "give either CORPUS= (--corpus) or CHAT=" in problems(
        "qat", model=of_model, chat=chat, corpus=chat
    )
    assert "pipeline full needs a model" in problems("full", chat=chat)
    assert "pipeline pretrain has no chat" in problems("pretrain", chat=chat)
    assert "give CHAT=" in problems("qat", model=of_model, finetune_recipe="smollm2-chat")
    paddle = ["Compress.engine=paddle"]
    assert "the Paddle engine cannot" in problems("qat", paddle, model=of_model, chat=chat)
    (model / "config.json").write_text(
        (model / "config.json").read_text().replace("chat_template", "another")
    )
    assert "no chat template" in problems("qat", model=of_model, chat=chat)


def test_make_passes_conversations_on() -> None:
    words = dry_run("MODEL=smollm2", "CHAT=my chats.jsonl")
    assert words[3:] == [
        *("qat", "--chat", "my chats.jsonl", "--model", "build/smollm2", "--recipe", "smollm2"),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("triton")
def test_a_chat_model_is_finetuned_quantized_and_judged(tmp_path: Path, model: Path) -> None:
    recipe, chat = write_recipe(tmp_path), write_conversations(tmp_path / "c.jsonl")
    lora = (
        "-o",
        "Finetune.lora.rank=4",
        "-o",
        "Finetune.samples=2",
        "-o",
        "Finetune.sample_tokens=4",
    )
    files = ("--model", model, "--chat", chat, "--recipe", recipe, "--finetune-recipe", recipe)
    out = ran(tmp_path, "qat", *files, "--name", "chat", *lora)
    assert "training adapters of" in out and re.search(r"^gate +passed$", out, re.M), out
    (run,) = (tmp_path / "run/chat").glob("qat-*")
    data = TokenDataset.open(run / "prepare/data")
    assert isinstance(data, TokenSequences) and data.has_mask
    assert (run / "finetune/finetuned/adapter/adapter_model.safetensors").is_file()
    assert load_checkpoint(run / "quantize/quantized").model.config.quantization
    answers = json.loads((run / "finetune/finetuned/samples.json").read_text())
    report = (tmp_path / "run/chat/report.html").read_text()
    for page in (report, (run / "finetune/page").read_text()):
        assert "before and after" in page and answers[0]["expected"].strip() in page
    assert "dense: finetuning" in report
