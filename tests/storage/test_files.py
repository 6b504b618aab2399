"""Whole or absent."""

from pathlib import Path

import pytest

from lathe.errors import UserError
from lathe.storage import atomic_file, atomic_folder


@pytest.mark.parametrize("context", [atomic_file, lambda path: atomic_folder(path, "f")])
def test_failure_leaves_what_was_there(tmp_path: Path, context: object) -> None:
    target = tmp_path / "out"
    for fails in (True, False):
        try:
            with context(target) as work:  # type: ignore[operator]
                (work / "f" if work.is_dir() else work).write_text("new")
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert list(tmp_path.iterdir()) == []
    assert (target / "f" if target.is_dir() else target).read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_only_its_own_kind_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(UserError, match=r"has no card\.json"), atomic_folder(tmp_path, "card.json"):
        pass
    assert (tmp_path / "diary.txt").read_text() == "mine"
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "out", "card.json") as work:
            (work / "card.json").write_text(text)
    assert (tmp_path / "out" / "card.json").read_text() == "new"
