"""Every table of measurements has a caption that says on which machine and when they were made."""

import re

import pytest

from tests.documents.pages import TEXTS, prose

TABLE = re.compile(r"(?:^(?P<above>[^\n|][^\n]*)\n+)?(?P<rows>(?:^\|[^\n]*\n)+)", re.M)
CAPTION = re.compile(r"\*(?:Measured on .+|Simulated), 20\d\d-\d\d-\d\d\b.*\.\*")
DECIMAL = re.compile(r"\d\.\d")


def tables(page: str) -> list[tuple[str, list[str]]]:
    """The line above each table of a page, and its rows without the head."""
    found = TABLE.finditer(prose(TEXTS[page]) + "\n")
    return [(table["above"] or "", table["rows"].splitlines()[2:]) for table in found]


def measured(rows: list[str]) -> bool:
    """Whether most rows have a decimal number, which in these documents is a measured one."""
    return 2 * sum(bool(DECIMAL.search(row)) for row in rows) > len(rows)


@pytest.mark.parametrize("page", [page for page in TEXTS if not page.startswith("docs/reference/")])
def test_tables_of_measurements_have_captions(page: str) -> None:
    for above, rows in tables(page):
        if page == "benchmarks/README.md" or measured(rows):
            assert CAPTION.fullmatch(above), f"{above!r} is no caption of the table of {rows[0]!r}"


def test_the_tables_are_found() -> None:
    assert len(tables("benchmarks/README.md")) >= 25
    assert any(measured(rows) for _, rows in tables("README.md"))
