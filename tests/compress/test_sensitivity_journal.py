from pathlib import Path

import pytest

from lathe.compress.sensitivity.journal import Journal
from lathe.errors import UserError


def never() -> float:
    raise AssertionError("it is there already")


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
    with pytest.raises(UserError, match="with other data"):
        Journal(path, {"model": "a", "data": "c"})
    assert Journal(path, {"model": "a", "data": "b"}).recall("x", never) == 1.0


def test_what_is_not_finite_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Journal(tmp_path / "j.jsonl", {}).recall("x", lambda: float("nan"))
