"""No verb prints a secret: keys with a line break, which an HTTP client repeats in its error, and
addresses with a password or a signature."""

import logging
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lathe.cli import app
from lathe_base.checks import Check, run_checks
from lathe_base.errors import EXPECTED_ERRORS, explain
from lathe_base.ports import free_port
from lathe_base.storage import __main__ as storage
from lathe_launch.cluster.doctor import check_store
from pipelines.cluster import doctor, follow, resume, runs, schedule, submit
from tests.support import fake_kfp
from tests.support.compiled import build_once
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.loopback import LoopbackServer, QuietHandler
from tests.support.tables import quick_only

SECRET = "wJalrXUtnFEMIK7MDENG"
BROKEN = f"{SECRET[:10]}\n{SECRET[10:]}"
PARTS = (SECRET[:10], SECRET[10:], "AWS4-HMAC", "Bearer")

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
PROFILE = "[default]\naws_access_key_id = key\naws_secret_access_key = {}\n"
CONTAINER = "AWS_CONTAINER_CREDENTIALS_FULL_URI"
IDENTITY = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/lathe", "identity": SECRET}
REFUSING = "http://127.0.0.1:PORT"
"""Stands for a server that answers 403."""
PLANTED = {
    **{name: {name: BROKEN} for name in KEYS},
    "password": {"AWS_ENDPOINT_URL": f"http://user:{SECRET}@127.0.0.1:9"},
    "signature": {},
    "LATHE_S3_SECRET_DIR": {"accesskey": "key", "secretkey": BROKEN},
    "LATHE_S3_SECRET_DIR, token": {
        **{"accesskey": "key", "secretkey": "other"},
        "sessiontoken": BROKEN,
    },
    "a profile": {"credentials": PROFILE.format(BROKEN.replace("\n", "\n  "))},
    "a profile without indentation": {"credentials": PROFILE.format(BROKEN)},
    "a profile with a %": {"credentials": PROFILE.format(f"{SECRET[:10]}%{SECRET[10:]}")},
    "a profile without a section": {"credentials": SECRET},
    "a container's token": {
        CONTAINER: "http://127.0.0.1:9/",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": BROKEN,
    },
    "a container's address": {CONTAINER: f"http://user:{SECRET}@127.0.0.1:9/?token={SECRET}"},
    "a web identity": IDENTITY | {"AWS_ENDPOINT_URL_STS": "http://127.0.0.1:9"},
    "a web identity that is refused": IDENTITY | {"AWS_ENDPOINT_URL_STS": REFUSING},
    "a container's address that refuses": {CONTAINER: f"{REFUSING}/?token={SECRET}"},
}
"""Environment variables (in capitals), and files with their variables in `FILES`."""
FILES = {
    **dict.fromkeys(("accesskey", "secretkey", "sessiontoken"), "LATHE_S3_SECRET_DIR"),
    "credentials": "AWS_SHARED_CREDENTIALS_FILE",
    "identity": "AWS_WEB_IDENTITY_TOKEN_FILE",
}
QUICK = ("AWS_SESSION_TOKEN", "password", "signature")


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
    elif result.exception and not isinstance(result.exception, SystemExit):
        assert result.exc_info
        text += "".join(traceback.format_exception(*result.exc_info))
    return text


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for name in os.environ:
        if name.startswith(("AWS_", "LATHE_", "KFP_", "KUBE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LATHE_NETWORK_PATIENCE", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")


class Refuse(QuietHandler):
    def do_GET(self) -> None:
        self.reply(status=403)

    do_POST = do_GET


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    with LoopbackServer(Refuse) as server:
        yield server.url


@pytest.fixture
def address(planted: str, refusing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Plant the secret; returns an address in the store."""
    values = PLANTED[planted]
    if not values.keys() & FILES.keys() and CONTAINER not in values:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    for name, value in values.items():
        if name in FILES:
            (tmp_path / name).write_text(value)
            is_folder = FILES[name].endswith("DIR")
            monkeypatch.setenv(FILES[name], str(tmp_path if is_folder else tmp_path / name))
        else:
            monkeypatch.setenv(name, value.replace(REFUSING, refusing))
    if planted == "signature":
        return f"http://127.0.0.1:{free_port()}/it?X-Amz-Signature={SECRET}"
    return "s3://bucket/it"


@pytest.mark.parametrize("planted", quick_only(PLANTED, QUICK))
def test_no_verb_prints_a_secret(
    planted: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, "urllib3")  # it logs addresses, at a level that no command sets
    named = 0
    for words, command in VERBS.items():
        if words[0] in SERVES:
            continue
        text = said(app, [*words, *arguments(command, address)], caplog)
        for part in PARTS:
            assert part not in text, (words, text)
        named += planted in text
    if planted in KEYS:
        assert named > 10  # of the verbs that got as far as the store


@pytest.fixture(scope="module")
def pipelines() -> Iterator[str]:
    with fake_kfp.serve() as server:
        yield server.url


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with FakeKubernetes() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        monkeypatch.setenv("LATHE_KFP_NAMESPACE", "lathe")
        yield


STORING = {
    "submit": (submit.app, ["pretrain", "--gpus", "0", "--root"]),
    "schedule set": (schedule.app, ["set", "pretrain", "--cron=0 0 3 * * 1", "--gpus=0", "--root"]),
    "doctor": (doctor.app, ["pretrain", "--gpus", "0", "--root"]),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_no_command_prints_a_secret_of_the_store(
    planted: str,
    address: str,
    pipelines: str,
    kube: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, "urllib3")  # it logs addresses, at a level that no command sets
    monkeypatch.setenv("LATHE_KFP_ENDPOINT", pipelines)
    monkeypatch.setattr(submit, "build", build_once)
    monkeypatch.setattr(doctor, "build", build_once)
    monkeypatch.setattr(submit, "image_checks", lambda *_: iter(()))
    monkeypatch.setattr(doctor.Doctor, "_pod", lambda self: iter(()))
    texts = {name: said(one, [*line, address], caplog) for name, (one, line) in STORING.items()}
    for line in (["fetch", address, "there"], ["put", str(tmp_path), f"{address}/"]):
        storage.main(line)
        output = capsys.readouterr()
        texts[line[0]] = output.out + output.err
    # The checks of the doctor's pod, whose log is its output.
    findings = run_checks([Check("object store", lambda: check_store(address))])
    texts["the doctor's pod"] = "".join(finding.line() for finding in findings)
    for name, text in texts.items():
        assert text
        for part in PARTS:
            assert part not in text, (name, part, text[-3000:])
        if planted in KEYS:
            assert planted in text, (name, text)


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
