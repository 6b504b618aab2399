"""Lathe's own source code."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lathe_base", "lathe_launch", "lathe_serving", "lathe", "lathe_paddle")
"""The packages that can be installed, each above those that it may import."""

PIPELINES = ("components", "pipelines")


def python_files(*folders: str) -> list[Path]:
    """All Python files in these folders of the repository; by default the packages', components'
    and pipelines'."""
    return sorted(
        path for folder in folders or PACKAGES + PIPELINES for path in (ROOT / folder).rglob("*.py")
    )
