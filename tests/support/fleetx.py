"""The configurations that PaddleFleetX has published, if they are beside the checkout."""

import json
from typing import Any

import pytest

from tests.conftest import SHARED

PUBLISHED = SHARED / "fleetx-configs.json"
CONFIGURATIONS: dict[str, dict[str, Any]] = (
    json.loads(PUBLISHED.read_text(encoding="utf-8")) if PUBLISHED.is_file() else {}
)
"""Path -> nested keys."""

published = pytest.mark.skipif(not CONFIGURATIONS, reason=f"{PUBLISHED} is not there")
