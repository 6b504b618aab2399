"""The order of components in a kustomization has no effect, or fails the build."""

from itertools import combinations, permutations

import pytest
import yaml

from tests.support.rendered import COMPONENTS, Object, named, variant
from tests.support.tables import quick_only


@pytest.mark.parametrize(
    "components",
    quick_only(
        [" ".join(each) for each in permutations(("autoscaling", "kserve", "signed-releases"))],
        [
            "signed-releases autoscaling kserve",
            "autoscaling kserve signed-releases",
            "kserve signed-releases autoscaling",
        ],
    ),
)
def test_pods_ask_for_signatures_in_every_order(
    components: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = "+".join(["kind", *components.split()])
    if components.index("kserve") < components.index("autoscaling"):
        with pytest.raises(AssertionError, match="list autoscaling before kserve"):
            variant(name, tmp_path_factory)
        return
    objects = variant(name, tmp_path_factory)
    predictor: Object = named(objects, "InferenceService", "lathe-serve")["spec"]["predictor"]
    variables = {each["name"]: each for each in predictor["initContainers"][0]["env"]}
    assert variables["LATHE_REQUIRE"]["value"] == "signature,chain,gate,proof"
    assert "verification-keys" in {volume["name"] for volume in predictor["volumes"]}
    scaler = named(objects, "HorizontalPodAutoscaler", "lathe-serve")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "lathe-serve-predictor"


ORDERED = {("autoscaling", "kserve"), ("default-account", "workload-identity")}
"""Pairs that build in this order only: see the test above and `test_identity.py`."""


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*combinations(COMPONENTS, 2)], ids="+".join)
def test_two_components_build_the_same_in_both_orders(
    pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if pair in ORDERED:
        pytest.skip("the other order fails to build")
    built = [
        sorted(
            yaml.safe_dump_all([each])
            for each in variant(f"kind+{first}+{second}", tmp_path_factory)
        )
        for first, second in (pair, pair[::-1])
    ]
    assert built[0] == built[1]
