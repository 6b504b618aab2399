"""`make` passes its variables and `-o` overrides on unchanged."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pipelines.make import ALL, ENVIRONMENT, TARGETS, Make, require_known

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


def dry_run(*arguments: str, target: str = "run") -> list[str]:
    """Words of the command that `make TARGET` would run."""
    command = ["make", "--dry-run", "--no-print-directory", target, *arguments]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    line = made.stdout.replace("\\\n", " ")
    return shlex.split(next(row for row in line.splitlines() if "-m pipelines." in row))


def overrides(words: list[str]) -> set[str]:
    return {words[i + 1] for i, word in enumerate(words) if word == "-o"}


def test_variables_become_options():
    words = dry_run("PIPELINE=qat", "MODEL=my models/gpt", "CORPUS=it's.txt", "RUN=night")
    assert words[1:] == [
        *("-m", "pipelines.local.run", "qat"),
        *("--corpus", "it's.txt", "--model", "my models/gpt", "--name", "night"),
    ]


def test_the_default_is_the_full_pipeline():
    assert dry_run()[1:] == ["-m", "pipelines.local.run", "full"]


def test_a_pretrained_model_has_a_pipeline_and_a_recipe_unless_they_are_given():
    words = ["-m", "pipelines.local.run", "qat", "--model", "build/smollm2", "--recipe", "smollm2"]
    assert dry_run("MODEL=smollm2")[1:] == words
    given = dry_run("MODEL=smollm2", "PIPELINE=prune", "RECIPE=mine.yaml")
    assert given[3:] == ["prune", "--model", "build/smollm2", "--recipe", "mine.yaml"]


def test_a_task_and_its_file():
    words = dry_run("TASK=exact_match=my sums.jsonl")
    assert words[3:] == ["full", "--task", "exact_match=my sums.jsonl"]


@pytest.mark.parametrize("target", ["run", "submit", "schedule", "doctor"])
def test_what_every_pipeline_takes(target):
    more = ["CRON=0 0 3 * * 1"] if target == "schedule" else []
    words = dry_run("SHARDS=8", "QUANT=int4", "ENGINE=paddle", *more, target=target)
    given = ["--engine", "paddle", "--quant", "int4", "--shards", "8"]
    assert words[words.index("full") :][:7] == ["full", *given]


def test_submit_and_schedule():
    words = dry_run(
        *("PIPELINE=qat", "MODEL=s3://m/gpt/", "NODES=2", "GPUS=8", "NODE_POOL=a100", "FOLLOW=1"),
        *("ROOT=s3://m/runs", "--", "-o", "Engine.max_steps=7"),
        target="submit",
    )
    assert words[1:] == [
        *(
            "-m",
            "pipelines.cluster.submit",
            "qat",
            "--model",
            "s3://m/gpt/",
            "-o",
            "Engine.max_steps=7",
        ),
        *("--nodes", "2", "--gpus", "8", "--node-pool", "a100", "--root", "s3://m/runs"),
        "--follow",
    ]
    words = dry_run("CRON=0 0 3 * * 1", "GPUS=0", target="schedule")
    assert words[2:] == [
        *("pipelines.cluster.schedule", "set", "full", "--gpus", "0", "--cron", "0 0 3 * * 1")
    ]
    words = dry_run("PIPELINE=qat", target="unschedule")
    assert words[2:] == ["pipelines.cluster.schedule", "remove", "qat"]


def test_the_doctor_takes_what_submit_takes():
    words = dry_run("PIPELINE=qat", "GPUS=0", "NODES=2", "ROOT=s3://m/runs", target="doctor")
    assert words[2:] == [
        *("pipelines.cluster.doctor", "qat", "--nodes", "2", "--gpus", "0", "--root", "s3://m/runs")
    ]
    words = dry_run("GPUS=8", "ALL_REDUCE=1", target="doctor")
    assert words[2:] == ["pipelines.cluster.doctor", "full", "--gpus", "8", "--all-reduce"]


def test_runs_their_reports_and_comparisons():
    assert dry_run("LIMIT=3", target="runs")[2:] == [
        "pipelines.cluster.runs",
        "list",
        "--limit",
        "3",
    ]
    assert dry_run("RUN=abc", target="runs")[3:] == ["list", "--name", "abc"]
    words = dry_run("RUN=abc", "MEMORY=6Gi", "FOLLOW=1", target="resume")
    assert words[2:] == ["pipelines.cluster.resume", "abc", "--memory", "6Gi", "--follow"]
    words = dry_run("RUN=abc", "OUTPUT=my page.html", "OPEN=0", target="report")
    assert words[3:] == ["report", "abc", "--output", "my page.html", "--no-open"]
    assert dry_run("RUN=a,b", target="compare")[3:] == ["compare", "a,b"]


def test_overrides_after_two_dashes():
    wanted = [
        "Engine.max_steps=200",
        "Data.Train.dataset.split=[900,50,50]",
        "Compress.Quantization.skip_tensor_map={block_3: [linear2, out]}",
        "Serving.model_name=it's $HOME (mine)",
    ]
    given = [word for override in wanted for word in ("-o", override)]
    assert overrides(dry_run("MODEL=m", "--", *given)) == set(wanted)


@pytest.mark.parametrize(
    "target, environments",
    [
        (["run"], "train serve"),
        (["run", "ENGINE=paddle"], "train serve paddle"),
        (["submit"], "train"),
        (["serve"], "train serve"),
        (["lint"], "dev"),
    ],
)
def test_a_target_makes_the_environments_that_it_needs(target, environments):
    command = ["make", "--dry-run", *target, "FLAVOUR=cuda"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"images/installer --flavour=cuda --installer=(.*)", made)
    assert " ".join(found).split() == environments.split()


def test_help_lists_every_target_of_the_front_door():
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = "env run submit schedule unschedule test lint compile golden serve stop client"
    for target in targets.split():
        assert f"  {target} " in shown


@pytest.mark.parametrize(
    ("target", "variable", "hint"),
    [
        ("run", "PIPELIN=qat", "did you mean PIPELINE=?"),
        ("submit", "GPU=8", "did you mean GPUS=?"),
        ("run", "GPUS=8", "it is one of make submit, schedule, doctor"),
        ("resume", "FORCED=1", "did you mean FORCE=?"),
        ("runs", "X=1", "it has LIMIT"),
        ("compile", "GPU=0", "did you mean GPUS=?"),
        ("manifests", "NODE=2", "did you mean NODES=?"),
        ("images", "IMAGE=serve", "did you mean IMAGES=?"),
        ("push", "REGISTRI=r", "did you mean REGISTRY=?"),
        ("test-cluster", "GPU=1", "did you mean GPUS=?"),
        ("soak", "SECOND=9", "did you mean SECONDS=?"),
        ("client", "PROMT=x", "did you mean PROMPT=?"),
        ("sbom", "IMAGES=serve", "it is one of make images, push"),
        ("lint", "X=1", "it has none"),
    ],
)
def test_an_unknown_variable_is_refused_by_the_nearest_name(target, variable, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        require_known(Make(variable, {}), [target])
    assert ended.value.code == 2
    said, name = capsys.readouterr().err, variable.partition("=")[0]
    assert f"error[unknown-key]: make {target} has no variable {name}\n" in said
    assert f"  hint: {hint}" in said


@pytest.mark.parametrize("target", ["run", "lint"])
def test_make_stops_before_a_target_with_an_unknown_variable(target):
    command = ["make", "--dry-run", "--no-print-directory", target, "PIPELIN=qat"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 2 and not made.stdout
    assert f"error[unknown-key]: make {target} has no variable PIPELIN\n" in made.stderr


def test_the_table_has_every_target_and_the_variables_that_the_makefile_reads():
    makefile = (ROOT / "Makefile").read_text()
    assert ALL.keys() == {*re.findall(r"^([a-z-]+):.*## ", makefile, re.M)}
    definitions = dict(re.findall(r"^(\w+) +:?= *(.*(?:\\\n.*)*)", makefile, re.M))
    definitions |= dict(re.findall(r"^define (\w+)\n(.*?)^endef", makefile, re.M | re.S))

    def read(text: str) -> set[str]:
        names = {*re.findall(r"\$\((?:value |call )?(\w+)\b", text)}
        names |= {*re.findall(r"\$\(call option,[^,]*,(\w+)", text)}
        inner = [read(definitions[name]) for name in names if name in definitions]
        return names.union(*inner) - definitions.keys()

    rules = re.findall(r"^([a-z-]+):(.*)## .*\n((?:\t.*\n)*)", makefile, re.M)
    for name, needs, recipe in rules:
        if name not in TARGETS:
            needed = {variable for need in needs.split() for variable in ALL[need].variables}
            found, listed = (
                {v for v in variables if v.isupper() and not v.startswith(ENVIRONMENT)}
                for variables in (read(recipe) | needed, ALL[name].variables)
            )
            assert found == listed, name


def test_a_variable_of_one_of_several_targets():
    command = ["make", "--dry-run", "env", "client", "PROMPT=Once"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def test_overrides_are_for_targets_that_take_them():
    command = ["make", "--dry-run", "client", "--", "-o", "Global.seed=1"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 2
    assert "make client has no overrides such as Global.seed=1" in made.stderr
    made = subprocess.run(
        ["make", "--dry-run", "manifests", "--", "-o", "Launch.run_as_user=null"],
        **{"cwd": ROOT, "capture_output": True, "text": True, "check": True},
    )
    assert "placement base -o Launch.run_as_user=null" in made.stdout


@pytest.mark.parametrize(
    ("target", "command"),
    [("compile", ["yaml", "build"]), ("manifests", ["objects", "build/manifests/pipelines.yaml"])],
)
def test_compiled_pipelines_take_the_defaults_of_their_runs(target, command):
    words = dry_run("GPUS=0", "NODE_POOL=a100", "NOTIFY=1", target=target)
    assert words[2:] == [
        *("pipelines.commands.compile", *command, "--gpus", "0", "--node-pool", "a100", "--notify")
    ]


def test_variables_of_the_environment_are_not_of_a_target():
    words = dry_run("LATHE_KFP_ENDPOINT=http://kfp", "HTTPS_PROXY=p", "GPUS=0", target="submit")
    assert words[3:] == ["full", "--gpus", "0"]
