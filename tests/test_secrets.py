"""No verb prints a secret: keys with a line break, which an HTTP client repeats in its error, and
addresses with a password or a signature."""

import logging
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lathe.cli import app
from lathe_base.errors import EXPECTED_ERRORS, explain
from lathe_base.ports import free_port
from pipelines.cluster import follow, resume, runs, schedule

SECRET = "wJalrXUtnFEMIK7MDENG"
BROKEN = f"{SECRET[:10]}\n{SECRET[10:]}"
PARTS = (SECRET[:10], SECRET[10:], "AWS4-HMAC", "Bearer")

ENVIRONMENTS = {
    "AWS_SESSION_TOKEN": {"AWS_SESSION_TOKEN": BROKEN},
    "password": {"AWS_ENDPOINT_URL": f"http://user:{SECRET}@127.0.0.1:9"},
    "signature": {},
}


def commands(command: Any, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not hasattr(command, "commands"):
        return {words: command}
    inner = command.commands.items()
    return {key: one for name, c in inner for key, one in commands(c, (*words, name)).items()}


VERBS = commands(typer.main.get_command(app))
SERVES = {"serve", "playground", "stop", "client"}
"""Verbs that read no store: they start, ask or stop a server on this machine."""


def arguments(command: Any, address: str) -> list[str]:
    """Every required argument, and the output, as an address."""
    line: list[str] = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            line += [address] * max(1, parameter.nargs)
        elif parameter.required or "--output" in parameter.opts:
            line += [parameter.opts[0], address]
    return line


def said(command: Any, line: list[str], caplog: pytest.LogCaptureFixture) -> str:
    result = CliRunner().invoke(command, line)
    text = result.output + caplog.text
    if isinstance(result.exception, EXPECTED_ERRORS):
        text += str(explain(result.exception))  # as `lathe.cli.main` does
    elif result.exc_info and not isinstance(result.exception, SystemExit):
        text += "".join(traceback.format_exception(*result.exc_info))
    return text


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("LATHE_NETWORK_PATIENCE", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "LATHE_S3_SECRET_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("planted", ENVIRONMENTS)
def test_no_verb_prints_a_secret(
    planted: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name, value in ENVIRONMENTS[planted].items():
        monkeypatch.setenv(name, value)
    address = "s3://bucket/it"
    if planted == "signature":
        address = f"http://127.0.0.1:{free_port()}/it?X-Amz-Signature={SECRET}"
    named = 0
    for words, command in VERBS.items():
        if words[0] in SERVES:
            continue
        text = said(app, [*words, *arguments(command, address)], caplog)
        for part in PARTS:
            assert part not in text, (words, text)
        named += planted in text
    if planted.startswith("AWS_"):
        assert named > 10  # of the verbs that got as far as the store


COMMANDS = {
    "schedule": (schedule.app, ["remove", "full"]),
    "runs": (runs.app, ["list"]),
    "report": (runs.app, ["report", "some-run"]),
    "compare": (runs.app, ["compare", "some-run,another"]),
    "resume": (resume.app, ["some-run"]),
    "follow": (follow.app, ["some-run"]),
}
CREDENTIALS = {
    "LATHE_KFP_TOKEN_FILE": BROKEN,
    "LATHE_KFP_COOKIES": f"authservice_session={BROKEN}",
}


@pytest.mark.parametrize("variable", CREDENTIALS)
def test_no_command_of_the_cluster_prints_a_secret(
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "token").write_text(BROKEN)
    monkeypatch.setenv("LATHE_KFP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv(
        variable, str(tmp_path / "token") if "FILE" in variable else CREDENTIALS[variable]
    )
    for name, (command, line) in COMMANDS.items():
        text = said(command, line, caplog)
        assert variable in text, (name, text)
        for part in PARTS[:2]:
            assert part not in text, (name, text)
