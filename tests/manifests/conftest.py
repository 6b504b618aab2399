"""Fixtures of the rendered manifests: every overlay, alone and with each component."""

import pytest

from tests.support.rendered import ALL, OVERLAYS, VARIANTS, Object, variant
from tests.support.tables import quick_only

QUICK = [x for x in VARIANTS if x in (*OVERLAYS, *ALL) or x.startswith("production")]
"""Every component in one overlay, and all of them together in the others."""


@pytest.fixture(scope="session", params=quick_only(VARIANTS, QUICK))
def objects(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Object]:
    return variant(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def production(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    return variant("production", tmp_path_factory)
