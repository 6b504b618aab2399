"""Unusual environments: locale, home, network, full disks, and stale server state files."""

import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lathe_base.errors import Unavailable
from tests.hostile.case import Case, Skip, Step
from tests.hostile.commands import COMMANDS
from tests.hostile.paths import needs_of

Expect = Literal["any", "refused", "works"]
ASCII = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
S3 = "s3://bucket/key"
UNICODE = "# Größe\nPrepare: {source: Größe-模型.txt}\n"
# Arguments that accept an address, by verb.
FETCHED: dict[str, dict[str, str]] = {
    "prepare": {"--source": S3},
    "pretrain": {"--data": S3},
    "prune": {"model": S3},
    "quantize": {"--sensitivity": S3},
    "evaluate": {"--cloze": S3},
    "gate": {"baseline": S3},
    "export": {"--output": S3},
    "import-paddle": {"source": S3},
    "import-megatron": {"source": S3},
    "deploy": {"exported": S3},
    "generate": {"model": S3},
    "report": {"--sensitivity": S3},
}
ENDPOINTS = (
    "nowhere",
    "http://",
    "http://[::1",
    "ftp://host",
    "http://127.0.0.1:99999",
    "http://a b",
)
ADDRESSES = (
    "s3://",
    "s3:///",
    "s3:///key",
    "s3://b",
    "s3://Bad_Bucket!/x",
    "s3://b/../../x",
    "s3://[",
)


def cases() -> Iterator[Case]:
    yield from _locale()
    yield from _folders()
    yield from _stores()
    yield from _disks()
    yield from _processes()


AWAY = (Unavailable.status,)


def _case(
    verb: str,
    row: str,
    name: str,
    changes: dict[str, str] | None = None,
    expect: Expect = "refused",
    make: tuple[Step, ...] = (),
    status: tuple[int, ...] = (1, 2),
    **more: Any,
) -> Case:
    command = COMMANDS[verb]
    argv, needs = command.argv(**(changes or {})), needs_of(command)
    writes = (command.written,) if command.written else ()
    fields = {"needs": needs, "writes": writes} | more
    return Case(verb, row, name, argv, expect=expect, make=make, status=status, **fields)


def _locale() -> Iterator[Case]:
    for verb in ("prepare", "recipe", "blend", "gate"):
        yield _case(verb, "LANG=C", "plain", expect="works", env=ASCII, fresh=True)
    unicode = {"--output": "Größe-模型"}
    written = {"writes": ("Größe-模型",)}
    yield _case("prepare", "LANG=C", "unicode", unicode, "works", env=ASCII, fresh=True, **written)
    recipe = ("recipe", "mine.yaml")
    text = "# Größe\nPrepare: {source: Größe-模型.txt}\n"
    make = (lambda box: (box / "mine.yaml").write_text(text),)
    yield Case(
        "recipe", "LANG=C", "unicode", recipe, make=make, expect="works", env=ASCII, fresh=True
    )


def _folders() -> Iterator[Case]:
    for verb in ("recipe", "prepare", "blend", "pretrain", "gate", "report", "evaluate"):
        yield _case(verb, "deleted working directory", "plain", in_deleted=True, needs=())
    for argv in (("recipe", "tiny"), ("recipe",), ("stop",)):
        row = "deleted working directory"
        yield Case(argv[0], row, " ".join(argv), argv, expect="any", in_deleted=True)
    for name, value in (("unset", None), ("nowhere", "/proc/nowhere"), ("a file", "/etc/hostname")):
        for verb in ("prepare", "pretrain", "evaluate", "analyze"):
            yield _case(verb, "HOME", name, expect="works", env={"HOME": value})
        yield _case(
            *("gate", "HOME", f"{name}, and an address"),
            {"baseline": S3},
            env={"HOME": value},
            status=(2, *AWAY),
        )
    for name, value in (("nowhere", "/nowhere/at/all"), ("a file", "/etc/hostname")):
        for verb in ("prepare", "pretrain", "export"):
            yield _case(verb, "TMPDIR", name, expect="any", env={"TMPDIR": value})
    for name, value in (("a file", "afile"), ("below a file", "afile/x")):
        make = (lambda box: (box / "afile").write_text("mine"),)
        for argv in (("stop",), ("client", "Once"), ("playground",)):
            env = {"LATHE_SERVE_STATE": value}
            yield Case(argv[0], "LATHE_SERVE_STATE", name, argv, make=make, expect="any", env=env)


def _stores() -> Iterator[Case]:
    silent = {"AWS_ENDPOINT_URL": "http://127.0.0.1:{silent}"}
    wrong = {"AWS_ENDPOINT_URL": "{s3}"}
    for verb, changes in FETCHED.items():
        yield _case(verb, "a store that is silent", "endpoint", changes, env=silent, status=AWAY)
        yield _case(verb, "a store that refuses", "secret", changes, env=wrong)
        yield _case(verb, "a store that is off", "endpoint", changes, status=AWAY)
    production = ("-o", "Production.releases=s3://bucket/releases")
    for name, env in (("silent", silent), ("refuses", wrong), ("off", {})):
        argv = ("release", "list", *production)
        yield Case("release list", "a store that is", name, argv, env=env, status=(2, *AWAY))
    for endpoint in ENDPOINTS:
        env = {"AWS_ENDPOINT_URL": endpoint}
        yield _case(
            "pretrain",
            "an endpoint that is none",
            endpoint,
            {"--data": S3},
            env=env,
            status=(2, *AWAY),
        )
    for address in ADDRESSES:
        yield _case(
            "pretrain", "an address that is none", address, {"--data": address}, status=(2, *AWAY)
        )
        yield _case(
            "gate", "an address that is none", address, {"--output": address}, status=(2, *AWAY)
        )
    secrets = {"LATHE_S3_SECRET_DIR": "nowhere"}
    yield _case("gate", "a store's secrets", "nowhere", {"baseline": S3}, env=secrets)
    slow = {"--url": "127.0.0.1:{silent}"}
    yield _case("bench-serve", "a server that is silent", "url", slow)
    asked = ("client", "--url", "127.0.0.1:{silent}", "Once")
    yield Case("client", "a server that is silent", "url", asked, status=(1, 2))
    endpoint = {"--endpoint": "127.0.0.1:{silent}"}
    yield _case("evaluate", "a server that is silent", "endpoint", endpoint)
    yield _case(
        *("prepare", "a server that is silent", "http"),
        {"--source": "http://127.0.0.1:{silent}/x"},
        status=AWAY,
    )


def _disks() -> Iterator[Case]:
    for kilobytes in (8, 64):
        for verb in (
            "prepare",
            "blend",
            "pretrain",
            "export",
            "evaluate",
            "analyze",
            "export-paddle",
        ):
            yield _case(
                verb,
                "a full disk",
                f"{kilobytes} kB",
                {"--output": "full/out"},
                expect="any" if kilobytes > 8 else "refused",
                make=(partial(_mount, kilobytes),),
                after=_unmount,
                writes=("full",),
            )
        for verb in ("gate", "report"):
            yield _case(
                verb,
                "a full disk",
                f"{kilobytes} kB",
                {"--output": "full/out.x"},
                expect="any",
                make=(partial(_mount, kilobytes),),
                after=_unmount,
                writes=("full",),
            )
    for verb in ("prepare", "export", "evaluate"):
        yield _case(
            verb,
            "a mount point",
            "as output",
            {"--output": "full"},
            expect="works",
            make=(partial(_mount, 4096),),
            after=_unmount,
            writes=("full",),
        )


def _mount(kilobytes: int, box: Path) -> None:
    (box / "full").mkdir()
    options = f"size={kilobytes}k,nr_inodes=64"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(box / "full")]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        raise Skip("mounting a small disk is not permitted")


def _unmount(box: Path) -> None:
    subprocess.run(["umount", "--lazy", str(box / "full")], check=False)


def _processes() -> Iterator[Case]:
    """State files that do not belong to a running server."""
    for name, marker in (("any command", ""), ("its command", "sleep"), ("another", "lathe_12")):
        for argv in (("stop",), ("client", "Once"), ("playground", "--port=0")):
            yield Case(
                argv[0],
                "server.json names a stranger's process",
                name,
                argv,
                make=(partial(_innocent, marker),),
                expect="any",
                writes=("run",),
                after=_is_alive,
                status=(1, 2),
            )
    contents = ("{}", "[]", "null", "3", "text", "", "[" * 100_000, '{"pid": "x"}', '{"pid": -1}')
    for content in contents:
        for argv in (("stop",), ("client", "Once")):
            yield Case(
                argv[0],
                "server.json has other content",
                content[:12],
                argv,
                make=(partial(_state, content),),
                expect="any",
                writes=("run",),
                status=(1, 2),
            )


def _innocent(marker: str, box: Path) -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    (box.parent / "innocent").write_text(str(process.pid))
    state = {
        "pid": process.pid,
        "group": process.pid,
        "model_name": "gpt",
        "repository": "repository",
        "http_port": 1,
        "grpc_port": 1,
        "metrics_port": 1,
        "shared_memory": marker,
    }
    _state(json.dumps(state), box)


def _state(content: str, box: Path) -> None:
    (box / "run" / "serve").mkdir(parents=True)
    (box / "run" / "serve" / "server.json").write_text(content)


def _is_alive(box: Path) -> str | None:
    pid = int((box.parent / "innocent").read_text())
    ended, _ = os.waitpid(pid, os.WNOHANG)
    if ended:
        return "a stranger's process was killed"
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None
