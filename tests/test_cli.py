"""The command line: help, results on stdout, one message for an error."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lathe.cli import app
from lathe.cli.app import PANELS
from lathe_base import __version__
from lathe_base.config.recipe import load_recipe, shipped_recipes
from lathe_base.config.settings import Recipe
from tests.support import warm
from tests.support.command_line import lathe

VERBS = [
    (command.name or command.callback.__name__)
    for command in app.registered_commands
    if command.callback
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
SMALL = [
    *(
        "-o",
        "Model.num_layers=1",
        "-o",
        "Model.hidden_size=32",
        "-o",
        "Model.num_attention_heads=2",
    ),
    *("-o", "Global.local_batch_size=2", "-o", "Global.micro_batch_size=2"),
    *("-o", "Data.Train.dataset.max_seq_len=16", "-o", "Engine.eval_iters=1"),
]


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `lathe` in a separate process."""
    return subprocess.run(
        [*warm.python(), "-m", "lathe", *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    texts = [f"Line {i} is read, and then line {i} is read again." for i in range(100)]
    (folder / "corpus.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    small = ["-o", "Prepare.vocab_size=300", *SMALL]
    done = lathe("prepare", "--source", "corpus.jsonl", *small, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^data: run/data\ndocuments: [\d,]+\ntokens: [\d,]+\n", done.stdout)
    return folder


def test_the_verbs() -> None:
    wanted = "prepare pretrain prune quantize analyze evaluate export deploy generate client report"
    assert set(wanted.split()) <= set(VERBS)


def test_help_groups_the_verbs_by_task_and_begins_with_the_everyday_ones() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    panels = [shown.index(f" {panel} ") for panel in PANELS]
    assert panels == sorted(panels)
    listed = [verb for verbs in PANELS.values() for verb in verbs]
    assert sorted(listed) == sorted([*VERBS, "release"])


@pytest.mark.parametrize("verb", VERBS)
def test_help_says_what_it_does_and_shows_an_example(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert f"Usage: lathe {verb}" in result.output.replace("root", "lathe")
    if verb != "stop":  # takes no arguments
        assert f"Example: lathe {verb}" in result.output


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        ("lathe.cli", "torch"),
        ("lathe.cli", "pydantic"),
        pytest.param("lathe.export.export", "torch._dynamo", marks=pytest.mark.slow),
    ],
)
def test_an_import_does_not_wait_for(module: str, slow: str) -> None:
    code = f"import sys, {module}; sys.exit({slow!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"lathe {__version__}\n"


def test_no_verb_shows_the_help(tmp_path: Path) -> None:
    done = process(cwd=tmp_path)
    assert "Usage: lathe" in done.stdout + done.stderr
    assert "pretrain" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pretrain", "-r", "tinny"], r"error\[not-found\]: .*'tinny'\n  hint: .* tiny\?"),
        (
            ["pretrain", "-o", "Engine.max_step=3"],
            r"error\[unknown-key\]: -o Engine.max_step=3: .*\n  hint: .* Engine.max_steps",
        ),
        (
            ["recipe", "tiny", "-o", "Engine.max_steps"],
            r"error\[malformed\]: -o Engine.max_steps: ",
        ),
        (["prepare", "--source", "nowhere.txt"], r"error\[not-found\]: .*nowhere.txt"),
        (["pretrain", "--data", "nowhere"], r"error\[not-found\]: .*nowhere"),
        (["evaluate", "nowhere"], r"error\[not-found\]: .*nowhere"),
        (["client", "Once"], r"error\[not-running\]: "),
    ],
)
def test_a_mistake_is_one_message_and_status_2(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    done = lathe(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert re.match(says, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert "  hint: " in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.rglob("*.*")) == []


def test_a_usage_error_is_status_2(tmp_path: Path) -> None:
    done = process("pretrain", "--stepps", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "No such option: --stepps" in done.stderr


def test_recipe_prints_yaml_that_reads_back_the_same(tmp_path: Path) -> None:
    done = lathe("recipe", "tiny-qat", "-o", "Engine.max_steps=7", cwd=tmp_path)
    assert done.returncode == 0
    printed = Recipe.model_validate(yaml.safe_load(done.stdout))
    assert printed == load_recipe("tiny-qat", ["Engine.max_steps=7"])


def test_recipe_without_a_name_lists_them(tmp_path: Path) -> None:
    assert lathe("recipe", cwd=tmp_path).stdout.split() == shipped_recipes()


def test_pretrain_then_generate(prepared: Path) -> None:
    steps = ["-o", "Engine.max_steps=2", "-o", "Generation.max_dec_len=4"]
    trained = lathe("pretrain", *steps, *SMALL, cwd=prepared)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.startswith("model: run/dense\nsteps: 2\n")
    for figure in ("perplexity", "best perplexity", "tokens per second", "samples per second"):
        assert re.search(rf"^{figure}: [\d.e+]+$", trained.stdout, re.MULTILINE), figure
    written = lathe("generate", "run/dense", "The first", *steps, cwd=prepared)
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("The first")


def test_interrupt_is_status_130(prepared: Path) -> None:
    steps = ["-o", "Engine.max_steps=100000"]
    arguments = ["pretrain", "--output", "long", *steps, *SMALL]
    with subprocess.Popen(
        [*warm.python(), "-m", "lathe", *arguments],
        cwd=prepared,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        # If the tests are a shell's background job, they and their children ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if "step" in line:
                break
        run.send_signal(signal.SIGINT)
        rest = run.stderr.read()
    assert run.returncode == 130
    assert "Traceback" not in rest


def test_a_reader_that_leaves_does_not_cost_the_output(small_data: Path, tmp_path: Path) -> None:
    """`lathe prepare ... --output s3://... | head -0`: the upload follows the printed table."""
    store = f"file://{tmp_path}/store/tokens"
    source = ("--source", str(small_data / "heldout.txt"))
    tokenizer = ("--tokenizer", str(small_data / "tokenizer.json"), *SMALL)
    read, write = os.pipe()
    os.close(read)
    command = [*warm.python(), "-m", "lathe", "prepare", *source, *tokenizer, "--output", store]
    ended = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "store/tokens/tokens.bin").is_file()


@pytest.mark.parametrize(
    "file", ["latest_checkpointed_iteration.txt", "global_step8/a_model_states.pt"]
)
def test_init_names_the_importer_of_another_tools_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / "theirs" / file).parent.mkdir(parents=True)
    (tmp_path / "theirs" / file).touch()
    done = lathe("pretrain", "--init", "theirs", "--recipe", "tiny", *SMALL, cwd=tmp_path)
    assert done.returncode == 2
    assert "hint: convert it first: lathe import-megatron theirs --output FOLDER" in done.stderr
