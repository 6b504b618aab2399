"""Sharded data preparation: one step per shard, with the same result."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import yaml
from kfp import compiler
from typer.testing import CliRunner

from components.machines import Pool
from components.plan import plan
from lathe.data.prepare import prepare
from lathe_base.config.recipe import load_recipe
from lathe_base.storage import sha256, write_text
from lathe_base.storage.ownership import ATTESTATIONS
from pipelines.cluster import resume
from pipelines.cluster.submit import choose_variant, version_name
from pipelines.compiler.compile import FUNCTIONS, build, mermaid
from pipelines.steps.resources import Variant
from tests.pipelines.test_resume import FIRST, PARAMETERS, RUN, SECOND
from tests.pipelines.test_run import ended_within, processes, ran, start
from tests.support.compiled import filled
from tests.support.fake_kfp import frame

STEPS = ("tokenizer", "tokenize", "prepare")


def compiled(folder: Path, name: str, variant: Variant) -> tuple[dict, dict]:
    path = folder / f"{name}.yaml"
    compiler.Compiler().compile(build(name, variant), str(path))
    spec, platform = yaml.load_all(path.read_text(), yaml.CSafeLoader)
    return spec, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


REQUESTS = plan("tiny", [], pool=Pool())


def all_tasks(spec: dict) -> dict[str, dict]:
    """All tasks of the graph and its subgraphs by name."""
    dags = [spec["root"], *spec["components"].values()]
    return {k: v for dag in dags for k, v in dag.get("dag", {}).get("tasks", {}).items()}


def find_loop(tasks: dict[str, dict]) -> tuple[str, dict]:
    """Name and task of the loop over shards."""
    ((name, loop),) = ((k, v) for k, v in tasks.items() if v["taskInfo"]["name"] == "shards")
    return name, loop


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_step_a_shard_between_the_tokenizer_and_the_data(tmp_path, name):
    spec, _ = compiled(tmp_path, name, Variant(shards=3))
    tasks = all_tasks(spec)
    loop_name, loop = find_loop(tasks)
    assert loop["parameterIterator"]["items"]["raw"] == "[1, 2, 3]"
    assert loop["dependentTasks"][-1] == "tokenizer"
    assert "iteratorPolicy" not in loop  # unlimited parallelism
    assert loop_name in tasks["prepare"]["dependentTasks"]
    assert tasks["prepare"]["inputs"]["artifacts"]["shards"]["taskOutputArtifact"] == {
        "outputArtifactKey": "pipelinechannel--tokenize-tokens",
        "producerTask": loop_name,
    }
    shard = tasks["tokenize"]["inputs"]["parameters"]
    assert shard["of"]["runtimeValue"]["constant"] == 3
    item = loop["parameterIterator"]["itemInput"]
    assert shard["shard"]["componentInputParameter"] == item
    for step in STEPS:
        component = spec["components"][f"comp-{step}"]
        given = tasks[step]["inputs"]
        for kind, inputs in component["inputDefinitions"].items():
            needed = {key for key, value in inputs.items() if not value.get("isOptional")}
            assert needed <= given.get(kind, {}).keys(), (step, kind)
        assert tasks[step]["cachingOptions"]["enableCache"]
        assert tasks[step]["retryPolicy"]["maxRetryCount"] == 2


@pytest.mark.parametrize("name", ["pretrain", "qat"])
def test_every_step_asks_for_what_preparing_in_one_piece_asks_for(tmp_path, name):
    variant = choose_variant(name, {"overrides": ["Launch.shards=3"], "recipe": "tiny"})
    assert variant.shards == 3
    (alone, of_alone), (spec, platform) = (
        compiled(tmp_path, name, Variant()),
        compiled(tmp_path, name, variant),
    )
    wanted = alone["deploymentSpec"]["executors"]["exec-prepare"]["container"]["resources"]
    for step in STEPS:
        container = spec["deploymentSpec"]["executors"][f"exec-{step}"]["container"]
        assert filled(container["resources"], REQUESTS) == filled(wanted, REQUESTS)
        settings, same = platform[f"exec-{step}"], of_alone["exec-prepare"]
        assert settings["podMetadata"]["labels"]["lathe/stage"] == step
        assert {**settings, "podMetadata": 0} == {**same, "podMetadata": 0}


def test_the_default_has_no_shards():
    assert version_name(Variant(shards=1)) == version_name(Variant())
    assert version_name(Variant(shards=3)) != version_name(Variant(shards=2))
    assert "tokenize" not in mermaid("full")


def test_every_shard_depends_on_the_contents_of_the_corpus(tmp_path):
    spec, _ = compiled(tmp_path, "pretrain", Variant(shards=2))
    tasks = all_tasks(spec)
    for name, output in {"contents": "text", "recipe": "prepare"}.items():
        assert tasks["tokenizer"]["inputs"]["parameters"][name]["taskOutputParameter"] == {
            "outputParameterKey": output,
            "producerTask": "inputs",
        }
    given = tasks["tokenize"]["inputs"]["parameters"]["contents"]
    assert given == {"componentInputParameter": "pipelinechannel--inputs-text"}


SHARDED = PARAMETERS | {"overrides": [*PARAMETERS["overrides"], "Launch.shards=4"]}
CARD = """{"shard": %d, "of": 4, "source": "s3://b/c", "corpus_sha256": "%s", "text_key": "text",
"tokenizer_sha256": "%s", "trained_on": null, "text_sha256": "%s", "documents": 0, "tokens": 0,
"blocks": [], "files": {%s}}"""
DIGEST = "0" * 64
FILES = ("tokenizer.json", "text.jsonl.zst", "tokens.bin", "tokens.idx")
LISTED = ", ".join(f'"{name}": {{"bytes": 0, "sha256": "{DIGEST}"}}' for name in FILES)


@pytest.fixture
def place(kfp, s3, monkeypatch) -> str:
    """Artifacts of a failed run that tokenized shards 3 and 1 of 4, and lost shard 2."""
    monkeypatch.setenv("LATHE_PIPELINE_ROOT", f"{s3}/root")
    kfp.runs[RUN] = {
        "run_id": RUN,
        "display_name": "full 2026-01-05 03:00:00",
        "state": "FAILED",
        "created_at": "2026-01-05T03:00:00Z",
        "runtime_config": {"parameters": SHARDED},
    }
    place = f"{s3}/root/full/{RUN}"
    third = FIRST.replace("1916", "3916")
    write_text(f"{place}/tokenizer/{FIRST}/vocabulary/tokenizer.json", "{}")
    write_text(f"{place}/tokenizer/{FIRST}/metrics", "{}")
    for execution, number in ((FIRST, 3), (SECOND, 1), (third, 2)):
        card = CARD % (number, DIGEST, DIGEST, DIGEST, LISTED)
        write_text(f"{place}/tokenize/{execution}/tokens/shard.json", card)
        if execution != third:
            write_text(f"{place}/tokenize/{execution}/metrics", "{}")
    return place


def resumed(kfp) -> dict:
    kfp.script = [frame("FAILED")]
    result = CliRunner().invoke(resume.app, [RUN])
    assert result.exit_code == 0, result.output
    (text,) = kfp.uploads.values()
    return {"output": result.output, **next(yaml.load_all(text, yaml.CSafeLoader))}


def test_a_resumed_run_tokenizes_the_shards_that_are_left(kfp, place):
    spec = resumed(kfp)
    assert f"reused from {RUN}: tokenize 1, tokenize 3, tokenizer\n" in spec["output"]
    tasks = all_tasks(spec)
    assert find_loop(tasks)[1]["parameterIterator"]["items"]["raw"] == "[2, 4]"
    finished = tasks["prepare"]["inputs"]["parameters"]["finished"]["runtimeValue"]["constant"]
    assert finished == [f"{place}/tokenize/{e}/tokens" for e in (SECOND, FIRST)]
    executors = spec["deploymentSpec"]["executors"]
    (vocabulary,) = (e["importer"] for e in executors.values() if "importer" in e)
    address = vocabulary["artifactUri"]["constant"]
    assert address == f"{place}/tokenizer/{FIRST}/vocabulary"
    assert "exec-tokenizer" not in executors


def test_only_the_join_runs_after_all_shards_are_tokenized(kfp, place):
    for execution, number in (("5", 2), ("6", 4)):
        folder = f"{place}/tokenize/{FIRST.replace('1916', execution * 4)}"
        card = CARD % (number, DIGEST, DIGEST, DIGEST, LISTED)
        write_text(f"{folder}/tokens/shard.json", card)
        write_text(f"{folder}/metrics", "{}")
    spec = resumed(kfp)
    tasks = all_tasks(spec)
    assert "tokenize" not in tasks and "tokenizer" not in tasks
    assert (
        len(tasks["prepare"]["inputs"]["parameters"]["finished"]["runtimeValue"]["constant"]) == 4
    )


def test_prepared_data_needs_no_shards(kfp, place):
    write_text(f"{place}/prepare/{FIRST}/data/data.json", "{}")
    write_text(f"{place}/prepare/{FIRST}/metrics", "{}")
    tasks = all_tasks(resumed(kfp))
    assert not {"tokenize", "tokenizer", "prepare"} & tasks.keys()


@pytest.mark.slow
def test_a_local_run_is_identical_and_a_killed_shard_resumes_alone(tmp_path, recipe, corpus):
    arguments = ("pretrain", "--recipe", recipe, "--corpus", corpus, "--name", "one")
    run = start(tmp_path, *arguments, "--shards", 3)
    while run.poll() is None and not kill_shard(
        tmp_path, 3
    ):  # starts when another shard is finished
        time.sleep(0.01)
    out, err = run.communicate(timeout=300)
    assert run.returncode == 1 and err.startswith("error[failed]: tokenize: failed"), out + err
    assert ended_within(5, tmp_path)

    out = ran(tmp_path, *arguments, "--shards", 3)
    stages = re.findall(r"^\S+$", out, re.M)
    assert stages[:5] == ["tokenizer", "tokenize", "tokenize", "tokenize", "prepare"]
    reused = [a for a, b in re.findall(r"^(\S+)\n    (\S+)", out, re.M) if b == "finished"]
    assert reused[:2] == ["tokenizer", "tokenize"]

    whole = prepare(load_recipe(str(recipe), []), tmp_path / "whole", str(corpus)).folder
    (joined,) = (tmp_path / "run" / "one").glob("**/prepare/data")
    assert {p.name: sha256(p) for p in joined.iterdir() if p.name != ATTESTATIONS} == {
        p.name: sha256(p) for p in whole.iterdir() if p.name != ATTESTATIONS
    }


def kill_shard(folder: Path, number: int) -> bool:
    """Kill the process of a shard if it exists."""
    for pid in processes(folder):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if re.search(rf'"shard": {number}\b', command):
            os.kill(pid, signal.SIGKILL)
            return True
    return False
