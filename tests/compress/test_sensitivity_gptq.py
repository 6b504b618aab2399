"""The analysis of weights that GPTQ rounds to 4 bits: what it says of them, and leaves behind."""

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from lathe.compress.gptq import gptq
from lathe.compress.output_hessians import rounding_costs
from lathe.compress.sensitivity.analyze import TorchModel
from lathe.compress.sensitivity.measure import BatchMetric
from lathe.compress.sensitivity.rank import validation_batches
from lathe.data.tokens import TokenDataset
from lathe.model import fake_quant
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.gpt import GPT
from lathe.train.batches import calibration_batches
from lathe_base.artifacts.journal import Journal
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from tests.support.small_models import small_config
from tests.support.small_run import SMALL

INT4 = tuple(
    f"Compress.Quantization.{x}" for x in ("weight_bits=4", "group_size=32", "gptq_batches=8")
)


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """Large random weights, so that 4 bits cost something, and inputs worth smoothing."""
    model = GPT(small_config(n_head=(4, 3), n_inner=(96, 64)))
    model.initialize(0.3, seed=1)
    model.get_parameter("h.0.ln_1.weight").data[:4] = 20
    folder = tmp_path_factory.mktemp("run") / "loud"
    save_checkpoint(folder, model, byte_tokenizer, "pretrain", Recipe())
    return folder


def opened(checkpoint: Path, data: TokenDataset, recipe: Recipe, folder: Path) -> TorchModel:
    journal = Journal(folder / "findings.jsonl", {})
    return TorchModel(recipe, load_checkpoint(checkpoint), data, journal, named=True)


def test_it_measures_the_weights_of_gptq(loud: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = load_recipe("tiny", (*SMALL, *INT4, "Engine.max_steps=0", "Sensitivity.metric=kl"))
    data = TokenDataset.open(small_data)
    analyzed = opened(loud, data, recipe, tmp_path)
    names, rounded = [*analyzed.names], copy.deepcopy(analyzed.model)
    estimates = analyzed.estimates()
    in_float, together = analyzed.measure({}), analyzed.measure(dict.fromkeys(names, "int4"))
    alone = analyzed.measure({names[0]: "int4"})

    validation = validation_batches(recipe, data)
    batches = [torch.from_numpy(validation[i]) for i in range(len(validation))]
    given = fake_quant.without_quantization(load_checkpoint(loud).model)
    metric = BatchMetric("kl", batches, given)
    before = {name: x.clone() for name, x in rounded.state_dict().items()}
    with fake_quant.inserted(rounded, analyzed.plans["int4"]), torch.no_grad():
        texts = [torch.from_numpy(x) for x in calibration_batches(recipe, data, 8)]
        gptq(rounded, texts)
        assert together == pytest.approx(metric(rounded), rel=1e-4)
        weights = {name: rounded.state_dict()[f"{name}.weight"].clone() for name in names}
        rounded.load_state_dict(before, strict=False)
        costs = rounding_costs(rounded, weights, texts)
    assert costs.keys() == set(names) and len(costs) == 8
    for name, cost in costs.items():
        assert estimates["int4"][name] == pytest.approx(cost, rel=1e-4)
    assert 0 < sum(alone) < sum(together)
    # Smoothing has changed weights, as it does before they are quantized, but not the function.
    assert max(in_float) == 0 and max(metric(analyzed.model)) < 1e-6 * sum(together)
    assert not torch.equal(before["h.0.ln_1.weight"], given.state_dict()["h.0.ln_1.weight"])
    # GPTQ's weights are not those of rounding to nearest, and none of them are left behind.
    left = analyzed.model.state_dict()
    assert all(torch.equal(left[name], before[name]) for name in before)
    assert not any(torch.equal(x, before[f"{name}.weight"]) for name, x in weights.items())


def test_before_training_weights_are_rounded_to_nearest(
    loud: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("lathe.compress.sensitivity.analyze.gptq")
    recipe = load_recipe("tiny", (*SMALL, *INT4, "Engine.max_steps=4", "Sensitivity.metric=kl"))
    analyzed = opened(loud, TokenDataset.open(small_data), recipe, tmp_path)
    found = analyzed.estimates()["int4"]
    assert all(found.values()) and analyzed.measure(dict.fromkeys(analyzed.names, "int4"))
