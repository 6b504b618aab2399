"""Lathe's own source code."""

from pathlib import Path

from lathe_base import PACKAGES as PACKAGES

ROOT = Path(__file__).resolve().parents[2]
PIPELINES = ("components", "pipelines")


def python_files(*folders: str) -> list[Path]:
    """All Python files in these folders of the repository; by default the packages', components'
    and pipelines'."""
    return sorted(
        path for folder in folders or PACKAGES + PIPELINES for path in (ROOT / folder).rglob("*.py")
    )
