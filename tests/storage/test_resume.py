"""Dropped connections, killed processes and concurrent uploads."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lathe_base.errors import Code, UserError
from lathe_base.storage import exists, fetch, upload
from lathe_base.storage.local import READ_BYTES
from lathe_base.storage.parts import PART_BYTES
from lathe_base.storage.s3 import s3_client
from tests.storage.conftest import Proxy
from tests.support.errors import raises

PARTS = 6
SIZE = PARTS * PART_BYTES - 11
OVERHEAD = 100_000  # bytes for headers and small requests


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "big"
    path.parent.mkdir()
    path.write_bytes(os.urandom(SIZE))
    return path


def waited_for(condition: object, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, "condition not met in time"
        time.sleep(0.005)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few concurrent parts, so that the first ones are complete when the connection drops."""
    monkeypatch.setattr("lathe_base.storage.parts.CONNECTIONS", 2)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("as_folder", [True, False])
@pytest.mark.slow
def test_an_interrupted_upload_resumes(
    s3: str, big: Path, proxy: Proxy, tmp_path: Path, as_folder: bool
) -> None:
    path, uri = (big.parent, f"{s3}/p/") if as_folder else (big, f"{s3}/p")
    proxy.cut_up = 5 * PART_BYTES
    with raises(Code.UNREACHABLE, uri):
        upload(path, uri)
    proxy.mend()
    assert not exists(uri)
    upload(path, uri)
    assert proxy.up < SIZE - 2 * PART_BYTES + OVERHEAD
    found = fetch(uri, tmp_path / "out")
    assert (found / "big" if as_folder else found).read_bytes() == big.read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("narrow")
def test_an_interrupted_upload_of_other_bytes_starts_over(
    s3: str, big: Path, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.cut_up = 5 * PART_BYTES
    with raises(Code.UNREACHABLE):
        upload(big, f"{s3}/f")
    proxy.mend()
    big.write_bytes(os.urandom(SIZE))
    upload(big, f"{s3}/f")
    assert fetch(f"{s3}/f", tmp_path).read_bytes() == big.read_bytes()


@pytest.mark.usefixtures("narrow")
def test_an_interrupted_fetch_resumes(s3: str, big: Path, proxy: Proxy, tmp_path: Path) -> None:
    upload(big.parent, f"{s3}/p")
    proxy.mend()
    proxy.cut_down = 5 * PART_BYTES
    with raises(Code.UNREACHABLE, f"{s3}/p/"):
        fetch(f"{s3}/p/", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == [".lathe.partial"]
    proxy.mend()
    found = fetch(f"{s3}/p/", tmp_path / "out")
    assert proxy.down < SIZE - 3 * PART_BYTES + OVERHEAD
    assert os.listdir(found) == ["big"] and (found / "big").read_bytes() == big.read_bytes()


@pytest.mark.slow
def test_an_object_that_changed_is_not_gone_on_with(
    s3: str, big: Path, proxy: Proxy, tmp_path: Path
) -> None:
    upload(big, f"{s3}/f")
    proxy.mend()
    proxy.cut_down = 5 * PART_BYTES
    with raises(Code.UNREACHABLE):
        fetch(f"{s3}/f", tmp_path / "out")
    proxy.mend()
    big.write_bytes(os.urandom(SIZE))
    upload(big, f"{s3}/f")
    proxy.mend()
    assert fetch(f"{s3}/f", tmp_path / "out").read_bytes() == big.read_bytes()
    assert proxy.down > SIZE


def test_a_file_that_changed_is_fetched_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a store without digests, where nothing else would notice bytes of both versions."""
    source, write = tmp_path / "source", os.pwrite
    source.write_bytes(b"a" * 3 * READ_BYTES)

    def interrupted(file: int, data: bytes, at: int) -> int:
        if at:
            raise KeyboardInterrupt
        return write(file, data, at)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "pwrite", interrupted)
        fetch(f"file://{source}", tmp_path / "out")
    assert bytes_recorded(tmp_path / "out") == READ_BYTES
    source.write_bytes(b"b" * 3 * READ_BYTES)
    assert fetch(f"file://{source}", tmp_path / "out").read_bytes() == source.read_bytes()


def test_a_short_cut_is_not_noticed(s3: str, big: Path, proxy: Proxy, tmp_path: Path) -> None:
    """The connection drops once, and parts in flight are requested again."""
    upload(big, f"{s3}/f")
    proxy.mend()
    proxy.cut_down = 2 * PART_BYTES

    def mend() -> None:
        waited_for(lambda: proxy.is_cut)
        proxy.mend()

    mender = threading.Thread(target=mend)
    mender.start()
    assert fetch(f"{s3}/f", tmp_path).read_bytes() == big.read_bytes()
    mender.join()


def parts_in_store(s3: str, key: str) -> int:
    client, bucket = s3_client(), s3.removeprefix("s3://")
    uploads = client._list_multipart_uploads(bucket, prefix=key).uploads
    return sum(len(client._list_parts(bucket, key, u.upload_id or "").parts) for u in uploads)


def bytes_recorded(folder: Path) -> int:
    records = (folder / ".lathe.partial").glob("*.json")
    return sum(sum(json.loads(record.read_text())["arrived"]) for record in records)


PUT = (sys.executable, "-m", "lathe_base.storage", "put")


@pytest.mark.slow
def test_a_killed_upload(s3: str, big: Path, proxy: Proxy, tmp_path: Path) -> None:
    """Readers see nothing until a second process has completed the upload."""
    (big.parent / "small").write_text("s")
    upload(big.parent, f"{s3}/p/")
    (big.parent / "small").write_text("t")
    big.write_bytes(os.urandom(SIZE))
    proxy.mend()
    killed = subprocess.Popen([*PUT, str(big.parent), f"{s3}/p"])
    waited_for(lambda: parts_in_store(s3, "p/big") >= 2)
    killed.kill()
    killed.wait()
    assert not exists(f"{s3}/p/")
    with raises(Code.INCOMPLETE, f"{s3}/p/"):
        fetch(f"{s3}/p/", tmp_path / "between")
    assert not any((tmp_path / "between").iterdir())
    proxy.mend()
    subprocess.run([*PUT, str(big.parent), f"{s3}/p"], check=True)
    assert proxy.up < SIZE - 2 * PART_BYTES + OVERHEAD
    found = fetch(f"{s3}/p/", tmp_path / "after")
    assert (found / "big").read_bytes() == big.read_bytes()
    assert (found / "small").read_text() == "t"


@pytest.mark.slow
def test_a_killed_fetch(s3: str, big: Path, proxy: Proxy, tmp_path: Path) -> None:
    upload(big.parent, f"{s3}/p/")
    proxy.mend()
    command = [*PUT[:3], "fetch", f"{s3}/p/", str(tmp_path / "out")]
    killed = subprocess.Popen(command)
    waited_for(lambda: bytes_recorded(tmp_path / "out") >= 2 * PART_BYTES)
    killed.kill()
    killed.wait()
    assert os.listdir(tmp_path / "out") == [".lathe.partial"]
    proxy.mend()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert proxy.down < SIZE - 2 * PART_BYTES + OVERHEAD
    assert os.listdir(tmp_path / "out") == ["big"]
    assert (tmp_path / "out/big").read_bytes() == big.read_bytes()


def together(*calls: object) -> list[Exception | None]:
    """Call functions concurrently; returns the exception of each, or None."""
    raised: list[Exception | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()  # type: ignore[operator]
        except Exception as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.slow
def test_two_uploads_at_once(store: str, big: Path, tmp_path: Path, same: bool) -> None:
    """To the same object, one of them wins; to the same prefix, one of them fails."""
    other = tmp_path / "other" / "big"
    other.parent.mkdir()
    other.write_bytes(big.read_bytes() if same else os.urandom(SIZE))
    raised = together(lambda: upload(big, f"{store}/f"), lambda: upload(other, f"{store}/f"))
    assert all(error is None or isinstance(error, UserError) for error in raised), raised
    assert None in raised
    found = fetch(f"{store}/f", tmp_path / "out").read_bytes()
    assert found in (big.read_bytes(), other.read_bytes())
    raised = together(
        lambda: upload(big.parent, f"{store}/p"), lambda: upload(other.parent, f"{store}/p")
    )
    assert [type(error) for error in raised].count(UserError) == 1, raised
    assert None in raised
    if same:
        assert (fetch(f"{store}/p", tmp_path / "out") / "big").read_bytes() == big.read_bytes()


def test_two_fetches_at_once(store: str, big: Path, tmp_path: Path) -> None:
    upload(big.parent, f"{store}/p")
    calls = [lambda: fetch(f"{store}/p", tmp_path / "out")] * 3
    assert together(*calls) == [None] * 3
    assert os.listdir(tmp_path / "out") == ["big"]
    assert (tmp_path / "out/big").read_bytes() == big.read_bytes()


def test_no_upload_is_left_open(s3: str, big: Path) -> None:
    upload(big, f"{s3}/f")
    bucket = s3.removeprefix("s3://")
    assert not s3_client()._list_multipart_uploads(bucket, prefix="f").uploads
