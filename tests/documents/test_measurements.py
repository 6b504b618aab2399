"""Every table of measurements has a caption with machine and date."""

import re

import pytest

from lathe.evaluate.intervals import accuracy_difference
from tests.documents.pages import TEXTS, prose

TABLE = re.compile(r"(?:^(?P<above>[^\n|][^\n]*)\n+)?(?P<rows>(?:^\|[^\n]*\n)+)", re.M)
CAPTION = re.compile(r"\*(?:(?:Measured on .+|Simulated), 20\d\d-\d\d-\d\d\b|Computed by ).*\.\*")
DECIMAL = re.compile(r"\d\.\d+\b(?! GB)")  # package sizes do not depend on the machine


def tables(page: str) -> list[tuple[str, list[str]]]:
    """Line above each table of a page, and its rows without the header."""
    found = TABLE.finditer(prose(TEXTS[page]) + "\n")
    return [(table["above"] or "", table["rows"].splitlines()[2:]) for table in found]


def measured(rows: list[str]) -> bool:
    """Whether most rows have a decimal number, which indicates measurements in these documents."""
    return 2 * sum(bool(DECIMAL.search(row)) for row in rows) > len(rows)


MEASURED = [page for page in TEXTS if not page.startswith("docs/reference/")]
MEASURED.append("docs/reference/tested-clusters.md")


@pytest.mark.parametrize("page", MEASURED)
def test_tables_of_measurements_have_captions(page: str) -> None:
    for above, rows in tables(page):
        if page == "benchmarks/README.md" or measured(rows):
            assert CAPTION.fullmatch(above), (
                f"{above!r} is not a caption of the table with the row {rows[0]!r}"
            )


def test_the_tables_are_found() -> None:
    assert len(tables("benchmarks/README.md")) >= 25
    assert any(measured(rows) for _, rows in tables("README.md"))


def test_the_losses_that_examples_can_show_are_those_that_the_gate_computes() -> None:
    text = TEXTS["docs/concepts/proof-and-gate.md"]
    head, _, *rows = text[text.index("| examples |") :].split("\n\n")[0].splitlines()
    flips = [float(share) / 100 for share in re.findall(r"([\d.]+) % flip", head)]
    assert len(flips) == 4 and len(rows) == 3
    for row in rows:
        n, *shown = [float(cell.replace(",", "")) for cell in row.strip("|").split("|")]
        for share, loss in zip(flips, shown, strict=True):
            interval = accuracy_difference(share * n / 2, share * n / 2, n, 0.95)
            assert 100 * interval.detectable(0.95) == pytest.approx(loss, abs=0.006)
