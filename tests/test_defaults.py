"""Every verb of the command line without any arguments, as a newcomer may try it."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from lathe.cli import app
from tests.support import warm
from tests.support.command_line import lathe
from tests.support.once import once

READS_A_CORPUS = {"prepare", "tokenizer"}
WORKS_ANYWHERE = {*READS_A_CORPUS, "recipe", "stop"}

CORPUS = "".join(f"{n} turns of the chuck take {n * n % 97} strokes.\n\n" for n in range(3000))
SMALL = (
    "Model.hidden_size=32",
    "Model.num_layers=1",
    "Model.num_attention_heads=2",
    "Model.max_position_embeddings=32",
    "Data.Train.dataset.max_seq_len=32",
    "Data.Eval.dataset.max_seq_len=32",
    "Global.local_batch_size=2",
    "Global.micro_batch_size=2",
    "Engine.max_steps=2",
    "Engine.eval_iters=1",
    "Prepare.vocab_size=300",
)


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield all verbs, including those of groups, with their commands."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))
    if not hasattr(command, "commands"):
        yield " ".join(words), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def all_verbs(of_a_corpus: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Parametrize by verb, with a mark for verbs that read the default corpus (seconds)."""
    marks = dict.fromkeys(READS_A_CORPUS, (of_a_corpus,))
    verbs = [pytest.param(verb, marks=marks.get(verb, ())) for verb in COMMANDS]
    return pytest.mark.parametrize("verb", verbs)


@pytest.fixture(autouse=True)
def at_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty standard input, and no environment variables of Lathe."""
    for name in [name for name in os.environ if name.startswith(("LATHE_", "AWS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "stdin", io.StringIO())


@pytest.fixture(scope="session")
def after_make_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory after `make run PIPELINE=pretrain` with a small model."""
    return once(tmp_path_factory, "after-make-run", make_run)


def make_run(folder: Path) -> None:
    folder.mkdir()
    (folder / "corpus.txt").write_text(CORPUS)
    overrides = [part for setting in SMALL for part in ("-o", setting)]
    run = [*warm.python(), "-m", "pipelines.local.run", "pretrain", "--corpus", "corpus.txt"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    environment |= warm.for_children()
    done = subprocess.run(
        [*run, "--name", "first", *overrides],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_verbs_are_found() -> None:
    assert len(COMMANDS) >= 34 and {"prune", "release list"} <= COMMANDS.keys()


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_default_is_one_that_its_option_takes(verb: str) -> None:
    command = COMMANDS[verb]
    required = [p for p in command.params if p.required]
    given = [word for p in required if p.opts[0].startswith("-") for word in (p.opts[0], "1")]
    given += ["1" for p in required if not p.opts[0].startswith("-")]
    command.make_context(verb, given)


@all_verbs(of_a_corpus=pytest.mark.slow)
def test_in_an_empty_folder(verb: str, tmp_path: Path) -> None:
    done = lathe(*verb.split(), cwd=tmp_path)
    assert (done.returncode == 0) == (verb in WORKS_ANYWHERE), done.stderr
    if done.returncode:
        require_guidance(done)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@all_verbs(of_a_corpus=pytest.mark.long)
def test_after_make_run(verb: str, after_make_run: Path, tmp_path: Path) -> None:
    shutil.copytree(after_make_run, tmp_path / "at")
    done = lathe(*verb.split(), cwd=tmp_path / "at")
    assert (done.returncode == 0) == (verb in WORKS_ANYWHERE), done.stderr
    if done.returncode:
        require_guidance(done)


def require_guidance(done: subprocess.CompletedProcess[str]) -> None:
    """Check for one message that names what is missing and a command or option to provide it."""
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"error\[.+\]: .+\n  hint: .+\n", done.stderr), done.stderr
    hint = done.stderr.partition("hint: ")[2]
    assert re.search(r"\b(lathe|make) [a-z]|\B-o [A-Z]", hint), hint


@pytest.mark.slow
def test_outputs_of_make_run_are_named(after_make_run: Path) -> None:
    """The pipeline's model is suggested, in place of the missing one of `lathe pretrain`."""
    (model,) = after_make_run.glob("run/first/*/pretrain/model")
    done = lathe("prune", cwd=after_make_run)
    wanted = f"such as {model.relative_to(after_make_run)}\n"
    assert done.stderr.endswith(wanted) and "make it with `lathe pretrain`" in done.stderr


@pytest.mark.slow
def test_the_verbs_of_a_server_work_one_after_another(deployed: Path, tmp_path: Path) -> None:
    """`make run` of a serving pipeline leaves a link to the deployment."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "deployed").symlink_to(deployed)
    try:
        for verb in ("serve", "client", "bench-serve"):
            done = lathe(verb, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            if verb == "serve":
                require_guidance(lathe("serve", cwd=tmp_path))  # already running
        assert "failed: 0 of 100" in done.stdout
        require_a_page(tmp_path)
    finally:
        assert lathe("stop", cwd=tmp_path).stdout.startswith("stopped ")


def require_a_page(folder: Path) -> None:
    """Check that `lathe playground` prints its address, or that the port is in use; then Ctrl-C."""
    command = [sys.executable, "-m", "lathe", "playground"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path.cwd())},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as page:  # fmt: skip
        assert page.stdout is not None and page.stderr is not None
        if not page.stdout.readline().startswith("playground: http"):
            assert "8080" in page.stderr.read()
            return
        page.send_signal(signal.SIGINT)
        rest = page.stderr.read()
    assert page.returncode == 0 and "Traceback" not in rest
