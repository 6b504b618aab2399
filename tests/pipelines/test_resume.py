"""Resuming a run reuses the steps that it has finished."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from kfp import dsl
from typer.testing import CliRunner

from lathe.search.design import Design, Proposal
from lathe_base.storage import write_text
from pipelines.cluster import resume
from pipelines.compiler.compile import FUNCTIONS, build, require_own_executors
from pipelines.steps.resources import Variant
from tests.pipelines.test_golden import body
from tests.support.fake_kfp import frame
from tests.support.fake_kubernetes import FakeKubernetes

RUN = "9fed934b-5541-4cd9-87fd-64364ad2c765"
FIRST, SECOND = "1916f9ff-2cbb-49ff-b62c-c124d328123d", "2916f9ff-2cbb-49ff-b62c-c124d328123d"
PARAMETERS = {"recipe": "tiny", "overrides": ["Launch.gpus_per_node=0", "Engine.max_steps=7"]}


@pytest.fixture
def place(kfp, s3, monkeypatch) -> str:
    """Address of the artifacts of a run that failed while pruning, after preparing and training."""
    monkeypatch.setenv("LATHE_PIPELINE_ROOT", f"{s3}/root")
    kfp.script = [frame("FAILED")]
    kfp.runs[RUN] = {
        "run_id": RUN,
        "display_name": "full 2026-01-05 03:00:00",
        "state": "FAILED",
        "created_at": "2026-01-05T03:00:00Z",
        "runtime_config": {"parameters": PARAMETERS},
        "pipeline_version_reference": {"pipeline_id": "full", "pipeline_version_id": "v1"},
    }
    kfp.versions["v1"] = {"pipeline_id": "full", "display_name": "v1"}
    kfp.uploads["v1"] = b"pipelineInfo: {name: full}\n---\nplatforms: {}\n"
    place = f"{s3}/root/full/{RUN}"
    for object_name in (
        f"prepare/{FIRST}/data/data.json",
        f"prepare/{FIRST}/metrics",
        f"pretrain/{FIRST}/model/state/step_5/rank.safetensors",  # from a failed attempt
        f"pretrain/{SECOND}/model/lathe.json",
        f"pretrain/{SECOND}/page",
        f"pretrain/{SECOND}/metrics",
        f"prune/{FIRST}/pruned/state/step_5/rank.safetensors",
    ):
        write_text(f"{place}/{object_name}", "{}")
    return place


def compiled_spec(pipeline: Any) -> dict[str, Any]:
    """Spec of a compiled pipeline as a dict."""
    return json_format.MessageToDict(pipeline.pipeline_spec)


@pytest.fixture
def killed(kfp, place, monkeypatch, tmp_path) -> Iterator[FakeKubernetes]:
    """The cluster of a run whose step prune was killed for memory, with a node of 16 GiB."""
    ended = {"exitCode": 137, "reason": "OOMKilled"}
    main = {"name": "main", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    limits = {"resources": {"limits": {"memory": "4Gi", "nvidia.com/gpu": "1"}}}
    with FakeKubernetes() as kubernetes:
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig(tmp_path, "kubeflow")))
        for step, state in (("prepare", {"exitCode": 0}), ("prune", ended)):
            labels = {"pipeline/runid": RUN, "lathe/stage": step}
            status = {"containerStatuses": [main | {"state": {"terminated": state}}]}
            pod = {"metadata": {"name": step, "labels": labels}, "status": status}
            pod["spec"] = {"containers": [{"name": "main"} | limits]}
            pod["spec"]["nodeSelector"] = {"lathe/node-pool": "gpu"}
            kubernetes.create("pods", pod, "kubeflow")
        for name, pool, gpus in (("n0", "gpu", "1"), ("n1", "other", "1"), ("n2", "gpu", "0")):
            amounts = {"memory": "16Gi" if name == "n0" else "64Gi", "nvidia.com/gpu": gpus}
            node = {"metadata": {"name": name, "labels": {"lathe/node-pool": pool}}}
            kubernetes.create("nodes", node | {"status": {"allocatable": amounts}}, "")
        yield kubernetes


WAS_KILLED = "prune was killed because it needed more memory than its limit of 4Gi"


def test_a_step_that_ran_out_of_memory_is_resumed_with_more(kfp, killed):
    refused = CliRunner().invoke(resume.app, [RUN])
    assert refused.exit_code == 2 and list(kfp.runs) == [RUN]
    assert WAS_KILLED in refused.output
    assert f"make resume RUN={RUN} MEMORY=prune=6Gi, or FORCE=1" in refused.output
    for options, memory in ((["--memory", "6Gi"], "6Gi"), (["--force"], "")):
        result = CliRunner().invoke(resume.app, [RUN, *options])
        assert result.exit_code == 0, result.output
        *_, run = kfp.runs.values()
        assert run["runtime_config"]["parameters"]["memory"] == memory

    kfp.runs[RUN]["runtime_config"] = {
        "parameters": PARAMETERS
        | {"overrides": [*PARAMETERS["overrides"], "Launch.steps.prune.memory=4Gi"]}
    }
    result = CliRunner().invoke(resume.app, [RUN, "--memory", "prune=6Gi"])
    assert result.exit_code == 0, result.output
    *_, run = kfp.runs.values()
    parameters = run["runtime_config"]["parameters"]
    assert parameters["memory"] == ""
    overrides = [one for one in parameters["overrides"] if "memory" in one]
    assert overrides == ["Launch.steps.prune.memory=6Gi"]
    version = run["pipeline_version_reference"]["pipeline_version_id"]
    executors = next(yaml.load_all(kfp.uploads[version], yaml.CSafeLoader))["deploymentSpec"]
    memory = {
        step: executors["executors"][f"exec-{step}"]["container"]["resources"][
            "resourceMemoryLimit"
        ]
        for step in ("prune", "quantize")
    }
    assert memory["prune"] == "6Gi" and "pipelinechannel" in memory["quantize"]


def test_no_more_memory_is_proposed_than_quota_and_nodes_have(kfp, killed):
    killed.patch("nodes", "n0", {"status": {"allocatable": {"memory": "5Gi"}}}, "")
    refused = CliRunner().invoke(resume.app, [RUN]).output
    assert WAS_KILLED in refused and "there is no room for 6Gi: " in refused
    assert "too few have it: n0 5.0 GiB\n" in refused and "MEMORY=" not in refused
    killed.patch("nodes", "n0", {"status": {"allocatable": {"memory": "16Gi"}}}, "")
    status = {"hard": {"limits.memory": "8Gi"}, "used": {"limits.memory": "3Gi"}}
    quota = {"metadata": {"name": "lathe"}, "status": status}
    killed.create("resourcequotas", quota, "kubeflow")
    refused = CliRunner().invoke(resume.app, [RUN]).output
    assert "the quota lathe has 8Gi limits.memory, of which 3Gi are used" in refused
    killed.denied.add(("list", "resourcequotas"))  # what may not be read does not count
    assert "MEMORY=prune=6Gi" in CliRunner().invoke(resume.app, [RUN]).output


def test_finished_steps_are_imported_and_the_others_run(kfp, place):
    result = CliRunner().invoke(resume.app, [RUN])
    assert result.exit_code == 0, result.output
    assert f"reused from {RUN}: prepare, pretrain\n" in result.output
    (run,) = (run for name, run in kfp.runs.items() if name != RUN)
    assert run["display_name"] == f"full from {RUN[:8]}"
    parameters = run["runtime_config"]["parameters"]
    assert parameters["recipe"] == "tiny"
    assert (parameters["overrides"], parameters["gpus"]) == (["Engine.max_steps=7"], 0)
    _, text = kfp.uploads.values()
    spec = next(yaml.load_all(text, yaml.CSafeLoader))
    executors = spec["deploymentSpec"]["executors"]
    addresses = {
        executor["importer"]["artifactUri"]["constant"]: executor["importer"]["typeSchema"]
        for executor in executors.values()
        if "importer" in executor
    }
    assert addresses[f"{place}/prepare/{FIRST}/data"]["schemaTitle"] == "system.Dataset"
    assert addresses[f"{place}/pretrain/{SECOND}/model"]["schemaTitle"] == "system.Model"
    steps = {name.removeprefix("exec-") for name, e in executors.items() if "container" in e}
    assert {"prune", "gate", "report"} < steps and not {"prepare", "pretrain"} & steps
    tasks = body(spec)
    assert tasks["prune"]["inputs"]["artifacts"]["model"]["taskOutputArtifact"] == {
        "producerTask": "import-pretrain-model",
        "outputArtifactKey": "artifact",
    }


def test_a_resumed_run_that_failed_is_resumed_with_the_steps_of_both(kfp, s3, place):
    assert CliRunner().invoke(resume.app, [RUN]).exit_code == 0
    (second,) = (name for name in kfp.runs if name != RUN)
    kfp.runs[second] |= {"created_at": "2026-01-05T05:00:00Z"}
    for name in (f"prune/{FIRST}/pruned/lathe.json", f"prune/{FIRST}/metrics"):
        write_text(f"{s3}/root/full/{second}/{name}", "{}")
    result = CliRunner().invoke(resume.app, [second])
    assert result.exit_code == 0, result.output
    assert f"reused from {second}: prepare, pretrain, prune\n" in result.output


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_finished_step_brings_its_own_outputs(name: str) -> None:
    finished = {
        component.removeprefix("comp-"): {
            output: f"s3://root/{component.removeprefix('comp-')}/{output}"
            for output in spec["outputDefinitions"]["artifacts"]
        }
        for component, spec in compiled_spec(build(name))["components"].items()
        if "executorLabel" in spec and "artifacts" in spec.get("outputDefinitions", {})
    }
    again = [step for step in finished if step in resume.NOT_REUSED or step == "importer"]
    finished = {step: outputs for step, outputs in finished.items() if step not in again}
    spec = compiled_spec(build(name, Variant(finished=finished)))
    addresses = {
        task: known["inputs"]["parameters"]["uri"]["runtimeValue"]["constant"]
        for dag in [spec["root"], *spec["components"].values()]
        for task, known in dag.get("dag", {}).get("tasks", {}).items()
        if task.startswith("import-")
    }
    assert len(addresses) >= 3
    for task, address in addresses.items():
        _, step, output = address.removeprefix("s3:").rsplit("/", 2)
        assert task == f"import-{step}-{output}".replace("_", "-")


def test_an_importer_of_the_sdks_is_confused_and_that_is_found() -> None:
    """The example of docs/concepts/pipeline.md with more imports.

    The compiler visits imports in an order that differs between processes, and in some orders two
    imports are not mixed up.
    """

    @dsl.component(base_image="python")
    def show(model: dsl.Input[dsl.Model]) -> None: ...

    def taken(address: str) -> Any:
        return dsl.importer(artifact_uri=address, artifact_class=dsl.Model).output

    @dsl.pipeline(name="part")
    def part() -> None:
        for n in range(2, 12):
            show(model=taken(f"s3://b/{n}"))

    @dsl.pipeline(name="whole")
    def whole() -> None:
        show(model=taken("s3://b/1"))
        part()

    with pytest.raises(RuntimeError, match="compiled incorrectly"):
        require_own_executors(compiled_spec(whole))


def test_a_run_whose_steps_were_all_cached_begins_again(kfp, place):
    kfp.runs["other"] = kfp.runs[RUN] | {"run_id": "other"}
    result = CliRunner().invoke(resume.app, ["other"])
    assert result.exit_code == 0, result.output
    assert "reused from other: nothing; cached steps are taken from" in result.output
    assert len(kfp.uploads) == 2


def test_a_run_that_has_succeeded_is_resumed_by_force_only(kfp, place):
    kfp.script = [frame("SUCCEEDED")]
    result = CliRunner().invoke(resume.app, [RUN])
    assert result.exit_code == 2 and f"error[exists]: run {RUN} " in result.output
    assert "  hint: FORCE=1" in result.output
    assert len(kfp.uploads) == 1
    assert CliRunner().invoke(resume.app, [RUN, "--force"]).exit_code == 0
    assert len(kfp.uploads) == 2


def test_a_run_that_is_not_ours_is_refused(kfp, place):
    kfp.uploads["v1"] = b"pipelineInfo: {name: mine}\n---\nplatforms: {}\n"
    result = CliRunner().invoke(resume.app, [RUN])
    assert result.exit_code == 2 and f"error[wrong-kind]: run {RUN} " in result.output
    assert len(kfp.uploads) == 1


def test_a_run_made_in_the_ui_is_resumed(kfp, place):
    """The UI names runs after the version, or after the run that it clones."""
    kfp.runs[RUN]["display_name"] = "Clone of full 2026-01-05 03:00:00"
    result = CliRunner().invoke(resume.app, [RUN])
    assert result.exit_code == 0 and "reused from" in result.output, result.output


def test_steps_of_a_loop_are_done_again_and_lost_executions_do_not_count(place):
    root = place.replace("/full/", "/compress/")
    for name in (
        f"prune/{FIRST}/metrics",
        f"evaluate-dense/{FIRST}/metrics",
        f"choose/{FIRST}/chosen/lathe.json",
    ):
        write_text(f"{root}/{name}", "{}")
    found = resume.steps_to_take("compress", f"{root}/")
    assert found == {"evaluate-dense": {"metrics": f"{root}/evaluate-dense/{FIRST}/metrics"}}


def executors_and_designs(found: dict) -> tuple[set[str], dict[str, Any]]:
    """Steps of `compress` that reuses these outputs, and the designs of its trials."""
    spec = compiled_spec(build("compress", Variant(finished=found)))
    search = body(spec)["search"]
    proposed = search["inputs"]["parameters"]["proposed"]
    return set(spec["deploymentSpec"]["executors"]), proposed


def test_trials_run_over_the_designs_that_are_finished(place):
    root = place.replace("/full/", "/compress/")
    designs = [Design((4, n), (64, 48), {"h.0.attn.c_attn": "int8"}) for n in (4, 2)]
    text = json.dumps([asdict(Proposal(design, 0.5, 0.1)) for design in designs])
    write_text(f"{root}/design/{FIRST}/designs", text)
    write_text(f"{root}/design/{FIRST}/metrics", "{}")
    found = resume.steps_to_take("compress", f"{root}/")
    executors, proposed = executors_and_designs(found)
    given = proposed["runtimeValue"]["constant"]
    assert given == [design.to_json() for design in designs]
    assert "exec-import-design-designs" in executors and "exec-design" not in executors


def test_designs_that_cannot_be_read_are_made_again(place):
    root = place.replace("/full/", "/compress/")
    write_text(f"{root}/design/{FIRST}/designs", "[{}]")
    for step in ("design", "price"):
        write_text(f"{root}/{step}/{FIRST}/metrics", "{}")
    write_text(f"{root}/price/{FIRST}/prices", "{}")
    found = resume.steps_to_take("compress", f"{root}/")
    assert found.keys() == {"price"}
    executors, proposed = executors_and_designs(found)
    assert "exec-design" in executors
    assert proposed["taskOutputParameter"]["producerTask"] == "design"


def test_no_design_is_retrained_after_the_best_is_chosen(place):
    root = place.replace("/full/", "/compress/")
    for output in ("chosen/lathe.json", "evaluation/metrics.json", "exported/export.json"):
        write_text(f"{root}/choose/{FIRST}/{output}", "{}")
    write_text(f"{root}/choose/{FIRST}/metrics", "{}")
    found = resume.steps_to_take("compress", f"{root}/")
    assert found.keys() == {"choose"}
    executors, _ = executors_and_designs(found)
    assert {"exec-import-choose-chosen", "exec-rehearse", "exec-report"} < executors
    assert not executors & {"exec-prune", "exec-quantize", "exec-choose", "exec-evaluate-int8"}
