"""Prefixes in buckets with versioning and object lock, and concurrent writers of one output."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe_base.errors import Code, UserError
from lathe_base.storage import (
    exists,
    fetch,
    list_objects,
    read_text,
    remove,
    replace_text,
    upload,
    write_text,
)
from lathe_base.storage.parts import PART_BYTES
from lathe_base.storage.probe import StoreProbe
from tests.support.errors import raises
from tests.support.fake_s3 import FakeS3

KINDS = {"plain": {}, "versions": {"versioning": True}, "lock": {"lock": True}}
PLACE = "s3://bucket/runs/model"


@pytest.fixture(params=KINDS)
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with FakeS3(**KINDS[request.param]) as server:
        for name in ("AWS_SESSION_TOKEN", "LATHE_S3_SECRET_DIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield server


def folder(parent: Path, name: str, **files: str) -> Path:
    made = parent / name
    made.mkdir()
    for file, text in files.items():
        (made / file).write_text(text)
    return made


def contents(place: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in place.iterdir() if path.is_file()}


def test_a_prefix_is_written_replaced_and_deleted(bucket: FakeS3, tmp_path: Path) -> None:
    upload(folder(tmp_path, "one", a="1", b="1", c="1"), PLACE)
    upload(folder(tmp_path, "two", a="2", b="1"), PLACE)
    found = contents(fetch(f"{PLACE}/", tmp_path / "again"))
    assert {name: found[name] for name in ("a", "b")} == {"a": "2", "b": "1"} and "c" not in found
    remove(f"{PLACE}/")
    assert not exists(f"{PLACE}/") and list_objects(f"{PLACE}/") == [] and bucket.visible() == []
    # No request deletes a version, which object lock would reject.
    assert not [one for one in bucket.requests if "versionId=" in one]
    if bucket.versioning:
        kept = [one.data for one in bucket.versions["runs/model/a"]]
        assert kept[:2] == [b"1", b"2"] and kept[-1] is None
    upload(folder(tmp_path, "three", a="3"), PLACE)  # after everything was deleted
    assert contents(fetch(f"{PLACE}/", tmp_path / "third"))["a"] == "3"


def test_a_large_file_in_parts(bucket: FakeS3, tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(2 * PART_BYTES + 7))
    upload(path, "s3://bucket/large")
    assert fetch("s3://bucket/large", tmp_path / "to").read_bytes() == path.read_bytes()
    remove("s3://bucket/large")
    assert bucket.visible() == []


def test_the_doctors_requests(bucket: FakeS3) -> None:
    """All requests succeed, including the conditional put, and leave no visible objects."""
    said = {name: ask() for name, ask in StoreProbe("s3://bucket/root").operations().items()}
    assert list(said)[-1] == "delete" and bucket.visible() == []


def test_a_pointer_is_moved_by_one_of_two(bucket: FakeS3) -> None:
    write_text("s3://bucket/live", "old")
    assert read_text("s3://bucket/live") == "old"

    def step_in(method: str, key: str) -> None:
        if method == "PUT":  # after the first one has read the pointer
            bucket.before = lambda method, key: None
            replace_text("s3://bucket/live", "new", "old")

    bucket.before = step_in
    with raises(Code.CHANGED, "s3://bucket/live"):
        replace_text("s3://bucket/live", "newer", "old")
    assert read_text("s3://bucket/live") == "new"


def test_a_second_writer_in_the_midst_of_the_first(bucket: FakeS3, tmp_path: Path) -> None:
    """The first writer fails, and readers get an error until one of them writes again."""
    mine, theirs = folder(tmp_path, "mine", a="1", b="1"), folder(tmp_path, "theirs", a="2", b="2")

    def step_in(method: str, key: str) -> None:
        if method == "PUT" and key.endswith("/b"):
            bucket.before = lambda method, key: None
            upload(theirs, PLACE)

    bucket.before = step_in
    with raises(Code.IN_USE, "another upload"):
        upload(mine, PLACE)
    with raises(Code.CORRUPT):
        fetch(f"{PLACE}/", tmp_path / "mixed")
    upload(mine, PLACE)
    found = contents(fetch(f"{PLACE}/", tmp_path / "whole"))
    assert (found["a"], found["b"]) == ("1", "1")


def test_two_writers_at_once(bucket: FakeS3, tmp_path: Path) -> None:
    names = "abcdef"
    sources = [folder(tmp_path, n, **dict.fromkeys(names, n)) for n in ("one", "two")]
    failed: list[str] = []

    def write(source: Path) -> None:
        try:
            upload(source, PLACE)
        except UserError as error:
            failed.append(str(error))

    for turn in range(2):
        threads = [threading.Thread(target=write, args=(source,)) for source in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        try:
            found = contents(fetch(f"{PLACE}/", tmp_path / f"found-{turn}"))
        except UserError:
            continue  # an error is acceptable
        assert len({found[name] for name in names}) == 1
    assert all(
        "another upload" in said or "changed by another process" in said for said in failed
    ), failed
    upload(sources[0], PLACE)
    assert contents(fetch(f"{PLACE}/", tmp_path / "last"))["f"] == "one"


def test_a_session_token_goes_with_every_request(
    bucket: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "for-an-hour")
    upload(folder(tmp_path, "one", a="1"), PLACE)
    fetch(f"{PLACE}/", tmp_path / "found")
    remove(f"{PLACE}/")
    assert bucket.tokens == {"for-an-hour"}
