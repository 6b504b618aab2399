"""What a run has made: the table, and where things are."""

from pathlib import Path


def summary(folder: Path) -> str:
    return str(folder)
