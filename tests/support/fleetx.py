"""The configurations that PaddleFleetX has published, if they are beside the checkout."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import SHARED

PUBLISHED = SHARED / "fleetx-configs.json"
CONFIGURATIONS: dict[str, dict[str, Any]] = (
    json.loads(PUBLISHED.read_text(encoding="utf-8")) if PUBLISHED.is_file() else {}
)
"""Path -> nested keys."""


def write_configurations(root: Path) -> None:
    """Write the configurations below a folder, as YAML."""
    for name, values in CONFIGURATIONS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(yaml.safe_dump(values), encoding="utf-8")


published = pytest.mark.skipif(not CONFIGURATIONS, reason=f"{PUBLISHED} is not there")
