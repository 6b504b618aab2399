"""Resource requests of steps follow from the model, unless overridden by options."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kfp import compiler

from lathe.model.config import GPTConfig
from lathe.train.shape import model_config
from lathe_base.config.recipe import load_recipe
from pipelines.commands.variants import choose_variant
from pipelines.compiler.compile import build
from pipelines.steps.resources import Pool, Variant
from components.machines import estimate_sizes

NO_GPUS = "Launch.gpus_per_node=0"


def resources(folder: Path, variant: Variant) -> dict[str, dict[str, str]]:
    """Resources by step."""
    path = folder / "full.yaml"
    compiler.Compiler().compile(build("full", variant), str(path))
    executors = next(yaml.load_all(path.read_text(), yaml.CSafeLoader))["deploymentSpec"]
    return {
        name.removeprefix("exec-"): executor["container"]["resources"]
        for name, executor in executors["executors"].items()
    }


def mib(amount: str) -> float:
    value = float(amount.rstrip("MGi"))
    return 1024 * value if amount.endswith("Gi") else value


def test_every_step_of_the_default_run_fits_a_node_of_2_cores_and_8_gb(tmp_path: Path) -> None:
    variant = choose_variant("full", {"overrides": [NO_GPUS]})
    asked = resources(tmp_path, variant)
    assert len(asked) == 16
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


def test_options_replace_the_estimate(tmp_path: Path) -> None:
    overrides = ["Launch.cpus_per_node=3", "Launch.memory_per_node=5Gi", NO_GPUS]
    asked = resources(tmp_path, choose_variant("full", {"overrides": overrides}))
    for step in ("prepare", "pretrain", "evaluate-int8", "rehearse"):
        assert asked[step]["resourceCpuRequest"] == "3"
        assert asked[step]["resourceMemoryRequest"] == asked[step]["resourceMemoryLimit"] == "5Gi"
    assert asked["gate"]["resourceMemoryRequest"] == "512Mi"


def test_the_workers_of_a_trainjob_get_what_the_model_needs() -> None:
    overrides = ["Launch.nodes=2", NO_GPUS]
    variant = choose_variant("full", {"overrides": overrides})
    (memory,) = (o for o in variant.overrides if o.startswith("Launch.memory_per_node="))
    assert 2 < mib(memory.partition("=")[2]) / 1024 < 4
    assert "Launch.cpus_per_node=1" in variant.overrides


def test_an_unknown_model_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("pipelines.commands.variants.STORE_SECONDS", 0.5)
    given = {"model": "s3://models/gpt", "overrides": []}
    variant = choose_variant("qat", given)
    assert variant == Variant(Pool())
    assert "resourceMemoryLimit" not in resources(tmp_path, variant)["pretrain"]
