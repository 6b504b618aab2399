"""Fixtures of the rendered manifests: every overlay, alone and with each component."""

import pytest

from tests.support.rendered import ALL, OVERLAYS, VARIANTS, Object, variant
from tests.support.tables import quick_only

CHANGING = (
    *("default-account", "gang-scheduling", "gpu-serving", "kserve", "openshift"),
    *("signed-releases", "workload-identity"),
)
"""Components that change objects of an overlay; the others only add some."""
QUICK = [*OVERLAYS, *ALL, *(f"production+{name}" for name in CHANGING)]
"""Each of them in one overlay, and all components together in the others."""


@pytest.fixture(scope="session", params=quick_only(VARIANTS, QUICK))
def objects(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Object]:
    return variant(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def production(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    return variant("production", tmp_path_factory)
