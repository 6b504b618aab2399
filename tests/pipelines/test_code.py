"""Cache keys of images named by a tag change with the code and lock files of the image."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe_base.config import recipe as recipes
from pipelines.compiler import code
from pipelines.compiler.code import code_digests
from pipelines.local import cache


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An editable copy of the shipped recipes."""
    shutil.copytree(recipes.SHIPPED, tmp_path / "recipes")
    monkeypatch.setattr(recipes, "SHIPPED", tmp_path / "recipes")
    cache.settings_digests.cache_clear()
    yield tmp_path / "recipes"
    cache.settings_digests.cache_clear()


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lock file of an image."""
    path = tmp_path / "images" / "train" / "requirements.lock"
    path.parent.mkdir(parents=True)
    path.write_text("torch==1\n")
    monkeypatch.setattr(code, "LOCKS", tmp_path / "images")
    return path


def changed(before: dict[str, str]) -> set[str]:
    cache.settings_digests.cache_clear()
    return {name for name, now in code_digests().items() if now != before[name]}


def test_a_setting_of_a_shipped_recipe_changes_the_steps_that_read_it(shipped: Path) -> None:
    before = code_digests()
    path = shipped / "tiny.yaml"
    text = path.read_text()
    path.write_text(f"{text}\n# A remark.\n")
    assert changed(before) == set()
    path.write_text(text.replace("max_steps: 900", "max_steps: 901"))
    assert path.read_text() != text
    found = changed(before)
    assert {"pretrain", "prune", "quantize"} <= found and "prepare" not in found
    path.write_text(text.replace("vocab_size: 4096", "vocab_size: 4097"))
    assert "prepare" in changed(before)


def test_another_library_in_an_image_changes_all(locks: Path) -> None:
    before = code_digests()
    locks.write_text("torch==2\n")
    assert changed(before) == set(before)
