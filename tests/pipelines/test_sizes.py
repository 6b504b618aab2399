"""Resource requests of steps follow from the model, unless overridden by options."""

from collections.abc import Iterator
from typing import Any

import pytest

from components.machines import Pool, estimate_sizes, trainjob_overrides
from components.plan import plan
from lathe.model.config import GPTConfig
from lathe.train.shape import model_config
from lathe_base.config.recipe import load_recipe
from pipelines.cluster.doctor import launch_settings
from pipelines.cluster.submit import with_machines
from tests.support.compiled import pods

NO_GPUS = "Launch.gpus_per_node=0"


def resources(arguments: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Resources of the steps of `full`, by step."""
    _, requests = launch_settings("full", with_machines("full", arguments))
    return {name: container["resources"] for name, (container, _) in pods("full", requests).items()}


def mib(amount: str) -> float:
    value = float(amount.rstrip("MGi"))
    return 1024 * value if amount.endswith("Gi") else value


def test_every_step_of_the_default_run_fits_a_node_of_2_cores_and_8_gb() -> None:
    asked = resources({"overrides": [NO_GPUS]})
    assert len(asked) == 17
    for step, amounts in asked.items():
        cores = amounts["resourceCpuRequest"]
        assert cores in ("100m", "500m"), step
        # The processes need up to 0.7 GiB (measured).
        waits = cores == "100m"
        assert waits or 1000 < mib(amounts["resourceMemoryRequest"]) < 2048, step
        # Twice the request, and the size of /dev/shm.
        assert waits or mib(amounts["resourceMemoryLimit"]) < 4096 + 2048, step


def configs() -> Iterator[tuple[str, GPTConfig]]:
    for name in ("tiny", "gpt-345m", "gpt-1.3b-dp8"):
        yield name, model_config(load_recipe(name), 4096)


@pytest.mark.parametrize("gpus", [0, 8])
def test_larger_models_ask_for_more(gpus: int) -> None:
    found = [
        estimate_sizes(config, load_recipe(name, [f"Launch.gpus_per_node={gpus}"]))
        for name, config in configs()
    ]
    assert [size.weights for size in found] == sorted(size.weights for size in found)
    assert [size.training for size in found] == sorted(size.training for size in found)
    assert all(size.training > 4 * size.weights for size in found)


def test_training_on_cpus_asks_for_what_a_run_was_measured_to_take() -> None:
    """With 88M parameters, training and saving took 4.33 GiB, and quantization 5.22 GiB."""
    shape = {"hidden_size": 768, "num_layers": 12, "num_attention_heads": 12}
    batch = ["Global.local_batch_size=2", "Global.micro_batch_size=2"]
    recipe = load_recipe("tiny", [*(f"Model.{k}={v}" for k, v in shape.items()), *batch, NO_GPUS])
    found = estimate_sizes(model_config(recipe, 4096), recipe)
    assert 4.33 < found.training < 2 * 4.33
    assert 2 * found.training > 5.22  # the limit


@pytest.mark.parametrize(
    "given",
    [
        {"cpus": 3, "memory": "5Gi", "gpus": 0},
        {"overrides": ["Launch.cpus_per_node=3", "Launch.memory_per_node=5Gi", NO_GPUS]},
    ],
)
def test_options_and_overrides_replace_the_estimate(given: dict[str, Any]) -> None:
    asked = resources({"overrides": []} | given)
    for step in ("prepare", "pretrain", "evaluate-int8", "rehearse"):
        assert asked[step]["resourceCpuRequest"] == "3"
        assert asked[step]["resourceMemoryRequest"] == asked[step]["resourceMemoryLimit"] == "5Gi"
    assert asked["gate"]["resourceMemoryRequest"] == "512Mi"


@pytest.mark.parametrize("more", [{"nodes": 2}, {"queue": "research"}])
def test_the_workers_of_a_trainjob_get_what_the_model_needs(more: dict[str, Any]) -> None:
    """Each training step, and not only those of the first recipe."""
    pool = Pool(gpus=0, **more)
    found = plan("tiny", [], "tiny-prune", "tiny-qat", pool=pool)
    for step in ("pretrain", "prune", "quantize"):
        launch = load_recipe(found[step]).Launch
        assert 2 < mib(launch.memory_per_node) / 1024 < 4
        assert launch.cpus_per_node == 1
        assert (launch.nodes, launch.queue) == (pool.nodes, pool.queue or None)


@pytest.mark.parametrize("model", ["known", "unknown"])
def test_cpus_and_memory_of_workers_follow_their_gpus(model: str) -> None:
    recipe = load_recipe("gpt-345m", ["Launch.gpus_per_node=8", "Launch.nodes=2"])
    sizes = None
    if model == "known":
        sizes = estimate_sizes(model_config(recipe, 50257), recipe)
    given = load_recipe("gpt-345m", trainjob_overrides(recipe.Launch, sizes)).Launch
    assert given.cpus_per_node == 64
    assert mib(given.memory_per_node) / 1024 >= 8 * 8
    one = recipe.Launch.model_copy(update={"gpus_per_node": 1})  # nodes with 4 or 8 CPUs
    assert "Launch.cpus_per_node=4" in trainjob_overrides(one, sizes)
    without = recipe.Launch.model_copy(update={"gpus_per_node": 0})
    assert not trainjob_overrides(without, None)


def test_a_parameter_replaces_the_recipes_setting_and_an_override_the_parameter() -> None:
    recipe = "Launch: {nodes: 4, queue: research}\n"
    found = plan(recipe, ["Launch.nodes=2"], pool=Pool(nodes=3, gpus=0))
    launch = load_recipe(found["pretrain"]).Launch
    assert (launch.nodes, launch.queue) == (2, "research")


def test_submitted_runs_have_their_machines_as_parameters() -> None:
    """So a clone of the run in the UI may change them."""
    given = {"overrides": ["Launch.nodes=2", "Launch.queue=a", "Gate.sequential=true"], "nodes": 4}
    assert with_machines("full", given) == {
        "overrides": ["Gate.sequential=true"],
        "nodes": 4,
        "queue": "a",
    }


def test_the_pods_of_an_unknown_model_get_a_usual_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("pipelines.cluster.doctor.STORE_SECONDS", 0.5)
    _, requests = launch_settings("qat", {"model": "s3://models/gpt", "overrides": []})
    assert (requests["training_memory"], requests["cpu_memory"]) == ("32768Mi", "8192Mi")
