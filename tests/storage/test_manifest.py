"""The manifest lists what was uploaded, and nothing outside its folder."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe_base.errors import Code
from lathe_base.storage.files import require_relative
from lathe_base.storage.objects import Entry, from_json, to_json
from lathe_base.storage.parts import MAX_PARTS, PART_BYTES, part_count, part_size
from tests.support.errors import raises

PART = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1)
NAME = st.lists(PART.filter(lambda p: p not in (".", "..")), min_size=1).map("/".join)
ENTRY = st.builds(
    Entry,
    st.integers(0, 1 << 60),
    st.text(string.digits + "abcdef", min_size=64, max_size=64),
)


@given(st.dictionaries(NAME, ENTRY))
def test_round_trip(files: dict[str, Entry]) -> None:
    assert from_json(to_json(files), "here") == files


@pytest.mark.parametrize("name", ["../x", "a/../x", "/x", "a//x", "", ".", "a/", "a\0"])
def test_names_that_leave_the_folder(name: str) -> None:
    with raises(Code.UNSAFE, "here"):
        require_relative(name, "here")
    with raises(Code.UNSAFE, "here"):
        from_json(to_json({name: Entry(1, "0" * 64)}), "here")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"files": {"a": 1}}',
        '{"files": {"a": {"size": -1, "sha256": "' + "0" * 64 + '"}}}',
        '{"files": {"a": {"size": true, "sha256": "' + "0" * 64 + '"}}}',
        '{"files": {"a": {"size": 1, "sha256": "' + "0" * 63 + '"}}}',
        '{"files": {"a": {"size": 1}}}',
    ],
)
def test_invalid_manifests(text: str) -> None:
    with raises(Code.MALFORMED, "here"):
        from_json(text, "here")


@given(st.integers(0, 5 << 40))
def test_parts_stay_within_what_a_store_takes(size: int) -> None:
    assert part_size(size) >= PART_BYTES
    assert part_count(size) <= MAX_PARTS
    assert (
        (part_count(size) - 1) * part_size(size)
        < max(size, 1)
        <= max(part_count(size) * part_size(size), 1)
    )
