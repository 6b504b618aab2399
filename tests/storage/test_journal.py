import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe_base.artifacts.journal import Journal
from lathe_base.errors import Code
from tests.support.errors import raises


def never() -> float:
    raise AssertionError("must be read from the journal")


def test_findings_outlive_the_process_to_the_bit(tmp_path: Path) -> None:
    path, identity = tmp_path / "j.jsonl", {"model": "a", "data": "b"}
    first = Journal(path, identity)
    values = [0.1 + 0.2, 1e-300, -5e-324, 1 / 3]
    assert [first.recall(str(i), lambda v=v: v) for i, v in enumerate(values)] == values  # type: ignore[misc]
    again = Journal(path, identity)
    assert [again.recall(str(i), never) for i in range(len(values))] == values
    again.close()
    assert not path.exists()


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_line_that_was_cut_is_found_again(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path, {})
    journal.recall("first", lambda: 1.5)
    journal.recall("second", lambda: {"x": 2.5})
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path, {})
    assert again.recall("first", never) == 1.5
    assert again.recall("second", lambda: 3.5) == 3.5
    assert Journal(path, {}).recall("second", never) == 3.5


def test_another_identity_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal(path, {"model": "a", "data": "b"}).recall("x", lambda: 1.0)
    with raises(Code.STATE_MISMATCH, path, "data"):
        Journal(path, {"model": "a", "data": "c"})
    assert Journal(path, {"model": "a", "data": "b"}).recall("x", never) == 1.0


def test_non_finite_values_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Journal(tmp_path / "j.jsonl", {}).recall("x", lambda: float("nan"))


FIRST = b'{"identity": {"model": "a"}}\n'


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    """Finalizers of earlier tests' objects would run, and fail, at the depth of the parser."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"my notes, without an end of line",
        b"my notes\n",
        b"[]\n",
        b"null\n",
        b"3\n",
        b'{"name": "x", "finding": 1}\n',
        b'{"identity": []}\n',
        b'{"identity": null}\n',
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        FIRST + b"[]\n",
        FIRST + b"null\n",
        FIRST + b"3\n",
        FIRST + b'"text"\n',
        FIRST + b"\n",
        FIRST + b'{"name": "x"}\n',
        FIRST + b'{"finding": 1}\n',
        FIRST + b'{"name": 3, "finding": 1}\n',
        FIRST + b'{"name": "x", "finding": NaN}\n',
        FIRST + b'{"name": "x", "finding": [1, -Infinity]}\n',
        FIRST + b'{"name": "x", "finding": 1e999}\n',
        FIRST + b'{"name": "x", "finding": "1"}\n',
        FIRST + b'{"name": "x", "finding": {"y": null}}\n',
        FIRST + b'{"name": "x", "finding": true}\n',
        FIRST + b'{"name": "x", "finding": 1}\n{"name": "x", "finding": 2}\n',
        FIRST + b'{"name": "x", "finding": ' + b"[" * 100_000 + b"\n",
        FIRST + b'{"name": "x", "finding": 1}\n\xff\n' + b"a line that was cut",
    ],
    ids=lambda content: str(content)[:60],
)
@pytest.mark.usefixtures("without_garbage_collection")
def test_an_invalid_journal_is_rejected_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.unfinished.jsonl"
    path.write_bytes(content)
    with raises(Code.MALFORMED, "out.unfinished.jsonl") as raised:
        Journal(path, {"model": "a"})
    assert "move the file away" in raised.value.hint
    assert path.read_bytes() == content


def test_a_folder_or_a_pipe_in_the_journals_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with raises(Code.WRONG_KIND, f"{name}: a {name}"):
            Journal(tmp_path / name, {})


def test_a_finding_of_another_kind_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "j.jsonl", {}).recall("scales", lambda: 3.0)
    with raises(Code.MALFORMED, "j.jsonl", "'scales'"):
        Journal(tmp_path / "j.jsonl", {}).recall("scales", dict, dict)
