"""What a user reads when a transfer fails: one error, with its cure."""

import time
from pathlib import Path

import pytest

from lathe.errors import UserError
from lathe.storage import fetch, upload, write_text
from tests.s3 import free_port


@pytest.mark.parametrize("where", ["nothing", "nothing/"])
def test_nothing_there(s3: str, tmp_path: Path, where: str) -> None:
    with pytest.raises(UserError, match=rf"{s3}/{where}: (not found|no object below)"):
        fetch(f"{s3}/{where}", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("s3")
def test_no_bucket(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    for key in ("f", "f/"):
        with pytest.raises(UserError, match="not found"):
            fetch(f"s3://nobucket/{key}", tmp_path / "new")
    for path in (tmp_path, tmp_path / "f"):
        with pytest.raises(UserError, match="NoSuchBucket") as raised:
            upload(path, "s3://nobucket/f")
        assert "make the bucket" in raised.value.cure


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
@pytest.mark.parametrize("key", ["a.txt", "novels/"])
def test_wrong_credentials(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    write_text(f"{s3}/a.txt", "A")
    monkeypatch.setenv(name, "wrong")
    with pytest.raises(UserError, match="access refused") as raised:
        fetch(f"{s3}/{key}", tmp_path)
    assert name in raised.value.cure and "\n" not in raised.value.what


def test_without_a_server_or_with_a_bad_address(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    started = time.monotonic()
    with pytest.raises(UserError, match=f"no answer from {address}"):
        fetch(f"{s3}/a.txt", tmp_path)
    assert time.monotonic() - started < 10
    with pytest.raises(UserError, match="write s3://bucket/key"):
        fetch("s3://corpora", tmp_path)
    with pytest.raises(UserError, match="invalid bucket name"):
        fetch("s3://No_Bucket!/x", tmp_path)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UserError, match="secret key must be provided"):
        fetch(f"{s3}/a.txt", tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(UserError, match="not an address"):
        fetch(f"{s3}/a.txt", tmp_path)
