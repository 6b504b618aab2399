"""Fixtures of the rendered manifests: every overlay, alone and with each component."""

import pytest

from tests.support.rendered import VARIANTS, Object, variant


@pytest.fixture(scope="session", params=VARIANTS)
def objects(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Object]:
    return variant(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def production(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    return variant("production", tmp_path_factory)
