"""ARCHITECTURE.md matches the floor plan of the tests, and names only what exists."""

import re

from tests.documents.pages import TEXTS
from tests.test_floor_plan import LAYERS

SHEET = TEXTS["ARCHITECTURE.md"]


def rows() -> dict[str, int]:
    """Row of every package in the table of the floor plan."""
    found = {}
    for row, names in re.findall(r"^\| (\d+) \| ([^|]+) \|", SHEET, re.M):
        for name in re.findall(r"`([\w/.]+)`", names):
            name = name.replace("/", ".")
            assert name not in found, f"{name} is listed twice"
            found[name] = int(row)
    return found


def test_the_sheet_is_the_floor_plan() -> None:
    assert rows() == {name: i for i, layer in enumerate(LAYERS, 1) for name in layer}


def test_there_are_four_walks_that_name_files_and_functions() -> None:
    walks = re.split(r"^## ", SHEET, flags=re.M)[2:]
    assert [walk.split("\n")[0] for walk in walks] == [
        "A token",
        "A checkpoint",
        "A prompt",
        "A setting",
    ]
    assert all(len(re.findall(r"`\w[\w/]+\.py::[\w.]+`", walk)) >= 6 for walk in walks)
