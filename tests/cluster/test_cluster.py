"""Runs every scenario on a real cluster: `make test-cluster KUBECONFIG=path`."""

from collections.abc import Callable

import pytest

from tests.cluster.scenarios import SCENARIOS
from tests.cluster.site import Site

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_on_the_cluster(
    scenario: Callable[[Site], str], site: Site, record_property: Callable[[str, object], None]
) -> None:
    record_property("seen", scenario(site))
    site.until("nothing is left", lambda: not site.left_behind(), 60)
