"""Choosing a design: predicted costs, prices, and the integer program."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lathe.compress.criteria import importance
from lathe.compress.plan import formats, named_formats
from lathe.compress.widths import KeptUnits, largest_units, shrink
from lathe.data.tokens import TokenDataset
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.search import prices
from lathe.search.design import Design, Goal
from lathe.search.prices import (
    METRIC_KEYS,
    Costs,
    Prices,
    build_sample,
    design_parts,
    estimate,
    measure_prices,
    write_costs,
    write_sample,
)
from lathe.search.proposals import CLOSE, Problem, propose
from lathe.train.batches import calibration_batches
from lathe_base.artifacts.journal import Journal
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import ExportSettings, QuantizationSettings
from lathe_base.config.settings.types import Format
from lathe_base.errors import Code, StageError
from tests.support.errors import raises
from tests.support.massive import MASSIVE, SCALE, gpt2, massive_reader, plant
from tests.support.small_export import save
from tests.support.small_run import SMALL

SHAPE = GPTConfig(96, 32, 32, 8, (4, 4), (64, 64))
INT4 = QuantizationSettings(weight_bits=4, group_size=32, quantize_embedding=True)
FORMS = formats(INT4)
RECIPE = load_recipe("tiny", (*SMALL, "Sensitivity.calibration_batches=8"))
LINEARS = [*SHAPE.linear_names(), HEAD]
PRICES = {
    "fixed": 0.01, "layers": 0.01, "heads": 0.001, "channels": 0.0001,
    "weights float": 4e-5, "weights static_int8": 1e-5, "weights dynamic_int8": 1.1e-5,
    "weights int4": 5e-6, "linears dynamic_int8": 1e-3, "outputs dynamic_int8": 1e-5,
    "linears static_int8": 1e-3, "linears int4": 1e-3, "outputs static_int8": 1e-5,
    "outputs int4": 2e-5,
    "head float": 0.2, "head static_int8": 0.06, "head dynamic_int8": 0.065, "head int4": 0.03,
}  # fmt: skip


def a_problem(seed: int, width: int = 2, one_layer: bool = True) -> Problem:
    """A problem with few enough designs for brute force."""
    random = np.random.default_rng(seed)
    config = replace(SHAPE, n_head=(width,), n_inner=(width,)) if one_layer else SHAPE
    names = [*config.linear_names(), HEAD]

    def falling(count: int) -> list[float]:
        return [*np.sort(random.gamma(0.5, 0.1, count))[::-1].tolist(), 0.0]

    costs = Costs(
        [falling(n) for n in config.n_head],
        [falling(n) for n in config.n_inner],
        {
            "int4": {name: random.gamma(0.5, 0.1) for name in names},
            "static_int8": {name: random.gamma(0.5, 0.01) for name in names},
            "dynamic_int8": {name: random.gamma(0.5, 0.005) for name in names},
        },
    )
    return Problem(config, costs, Prices(PRICES), dict.fromkeys(names, FORMS), 32)


def every_design(problem: Problem, forms: Sequence[Format]) -> Iterator[Design]:
    """All designs of a problem of one layer with two heads and two channels."""
    names = list(problem.formats)
    for heads, channels in product((1, 2), repeat=2):
        for chosen in product(forms, repeat=len(names)):
            yield Design((heads,), (channels,), dict(zip(names, chosen, strict=True)))


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), limit=st.floats(0.05, 0.4))
def test_no_design_within_the_limit_is_better(seed: int, limit: float) -> None:
    problem = a_problem(seed)
    within = [x for x in every_design(problem, FORMS) if problem.price(x) <= limit]
    found = problem.solve(limit)
    if not within:
        assert found is None and problem.price(problem.cheapest()) > limit
        return
    assert found is not None and problem.price(found) <= limit * (1 + 1e-6)
    assert problem.cost(found) <= min(map(problem.cost, within)) * 1.01 + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_128_designs_is_found(seed: int) -> None:
    """By brute force, for a limit that all meet, that half do, that one does, and that none does.
    The prices are such that every choice counts."""
    forms: list[Format] = ["int4", "dynamic_int8"]
    problem = a_problem(seed)
    parts = PRICES | {"heads": 0.02, "channels": 0.03, "weights int4": 3e-4}
    parts |= {"weights dynamic_int8": 4e-4, "outputs int4": 3e-4, "outputs dynamic_int8": 1e-3}
    problem = replace(problem, prices=Prices(parts), formats=dict.fromkeys(problem.formats, forms))
    priced = sorted(
        (problem.price(design), problem.cost(design)) for design in every_design(problem, forms)
    )
    assert len(priced) == 128
    for count in (128, 64, 1):
        limit = priced[count - 1][0] + 1e-9
        found = problem.solve(limit)
        assert found is not None and problem.price(found) <= limit + 1e-9
        best = min(cost for _, cost in priced[:count])
        assert problem.cost(found) == pytest.approx(best, rel=2e-3)
    assert problem.price(problem.cheapest()) == pytest.approx(priced[0][0])
    assert problem.solve(priced[0][0] - 1e-6) is None


def test_the_parts_of_a_design_are_counted() -> None:
    """A layer with half of its units, whose groups are padded, and a layer that is gone."""
    formats: dict[str, Format] = {
        "h.0.attn.c_attn": "int4",
        "h.0.attn.c_proj": "static_int8",
        "h.0.mlp.c_proj": "int4",
        HEAD: "int4",
    }
    assert design_parts(SHAPE, Design((2, 0), (40, 0), formats), group_size=32) == {
        **{"fixed": 1, "head int4": 1, "layers": 1, "heads": 2, "channels": 40},
        # 32 inputs of queries, keys and values of two heads of 8 features; 40 inputs become 64.
        **{"linears int4": 2, "weights int4": 32 * 48 + 64 * 32, "outputs int4": 48 + 32},
        **{"linears static_int8": 1, "weights static_int8": 16 * 32, "outputs static_int8": 32},
        "weights float": 32 * 40,
    }


def test_prices_are_fitted_to_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that are exactly sums of prices, another sum for each target."""
    size = INT4.group_size

    def measured(_: object, __: object, design: Design, *___: object) -> dict[str, float]:
        parts = design_parts(SHAPE, design, size)
        return {
            target: Prices(
                {n: price * (1 + i * (n != "fixed")) for n, price in PRICES.items()}
            ).total(parts)
            for i, target in enumerate(METRIC_KEYS)
        }

    monkeypatch.setattr(prices, "measure_design", measured)
    checkpoint: Any = SimpleNamespace(model=SimpleNamespace(config=SHAPE))
    found = measure_prices(checkpoint, Path(), FORMS, INT4, ExportSettings())
    mixed = Design((3, 1), (48, 20), dict(zip(LINEARS, FORMS * 3, strict=False)))
    for target, share in measured(None, None, mixed).items():
        assert found[target].total(design_parts(SHAPE, mixed, size)) == pytest.approx(
            share, rel=0.02
        )


def test_layers_go_where_they_cost_nothing() -> None:
    problem = a_problem(0, one_layer=False)
    free = [0.0] * 5, [0.0] * 65
    costs = replace(
        problem.costs,
        heads=[free[0], [9.0] * 4 + [0.0]],
        channels=[free[1], [9.0] * 64 + [0.0]],
    )
    found = replace(problem, costs=costs).solve(0.3)
    assert found is not None
    assert (found.heads, found.channels) == ((0, 4), (0, 64))
    assert {name.split(".")[1] for name in found.formats if name != HEAD} == {"1"}
    assert {name.split(".")[1] for name in found.pruned_formats() if name != HEAD} == {"0"}
    skips = "Compress.Quantization.skip_tensor_map={block_1: [out]}"
    everything = "Compress.Quantization.quantize_embedding=True"
    pruned = replace(SHAPE, n_head=(4,), n_inner=(64,))
    recipe = found.quantization(load_recipe("tiny", (skips, everything)), pruned.architecture)
    assert named_formats(pruned, recipe.Compress.Quantization, None) == found.pruned_formats()
    pruning = found.pruning(recipe).Compress.Prune
    assert (pruning.heads, pruning.layers, pruning.rounds) == ([0, 4], 0, 1)


def test_formats_alone_can_be_chosen() -> None:
    problem = replace(a_problem(1, one_layer=False), prunes=False)
    found = problem.solve(1.1 * problem.price(problem.cheapest()))
    assert found is not None
    assert (found.heads, found.channels) == (SHAPE.n_head, SHAPE.n_inner)
    assert "int4" in found.formats.values()


def test_channels_are_multiples() -> None:
    problem = replace(a_problem(1, one_layer=False), multiple=32)
    for limit in (0.1, 0.15, 0.2, 0.3):
        found = problem.solve(limit)
        assert found is None or all(count % 32 == 0 for count in found.channels)


def test_removed_units_cost_the_square_of_their_joint_slope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three units of two sequences of four tokens; the unit of least slopes goes first."""
    model = SimpleNamespace(
        model=None, calibration=[torch.zeros(2, 5)], names=["linear"], estimates=dict
    )
    slopes = torch.tensor([[1.0, -2.0, 0.1], [1.0, 2.0, -0.1]])
    found = SimpleNamespace(heads=[slopes], channels=[slopes[:, :1]])
    monkeypatch.setattr(prices, "TorchModel", lambda *_, **__: model)
    monkeypatch.setattr(prices, "gate_slopes", lambda *_: found)
    nothing: Any = None
    costs = estimate(RECIPE, nothing, nothing, nothing)
    joint = [[0.1, -0.1], [1.1, 0.9], [-0.9, 2.9]]
    expected = [4 / 2 * float(np.square(sums).mean()) for sums in joint]
    assert costs.heads[0] == pytest.approx([*expected[::-1], 0.0])
    assert costs.channels[0] == pytest.approx([2.0, 0.0])
    assert costs.formats == {"float": {"linear": 0.0}}


@pytest.mark.slow
def test_prices_are_those_of_files_that_were_not_measured(
    small_dense: Path, tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(small_dense)
    config = checkpoint.model.config
    dense = size(checkpoint, tmp_path / "dense")
    found = measure_prices(checkpoint, tmp_path / "dense", FORMS, INT4, ExportSettings())
    problem = Problem(config, a_problem(0).costs, found["bytes"], dict.fromkeys(LINEARS), 32)
    parameters = replace(problem, prices=found["parameters"])
    random = np.random.default_rng(0)
    for i in range(3):
        form: dict[str, Format] = {
            name: random.choice(FORMS) for name in (*config.linear_names(), HEAD)
        }
        design = Design(
            tuple(random.integers(1, n + 1) for n in config.n_head),
            tuple(random.integers(1, n + 1) for n in config.n_inner),
            form,
        )
        built = build_sample(checkpoint.model, design, INT4)
        share = size(replace(checkpoint, model=built), tmp_path / str(i)) / dense
        assert problem.price(design) == pytest.approx(share, rel=0.01)
        share = built.config.n_params / config.n_params
        assert parameters.price(design) == pytest.approx(share, rel=1e-3)


def size(checkpoint: Checkpoint, folder: Path) -> float:
    write_sample(checkpoint, checkpoint.model, folder, ExportSettings())
    return (folder / "model.onnx").stat().st_size


def test_costs_are_near_the_divergence_that_removing_units_makes(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    """Measures the model without the removed units."""
    checkpoint, data = load_checkpoint(small_dense), TokenDataset.open(small_data)
    costs = estimate(RECIPE, checkpoint, data, Journal(tmp_path / "journal", {}))
    model = checkpoint.model.eval()
    config = model.config
    batches = [torch.from_numpy(tokens) for tokens in calibration_batches(RECIPE, data)]
    scores = importance(model, "taylor", batches)
    every = [
        KeptUnits(torch.arange(heads), torch.arange(channels))
        for heads, channels in zip(config.n_head, config.n_inner, strict=True)
    ]
    ratios = []
    for i in range(config.n_layer):
        for heads, channels in ((3, 128), (2, 128), (4, 96), (4, 64)):
            kept = list(every)
            kept[i] = KeptUnits(
                largest_units(scores.heads[i], heads), largest_units(scores.channels[i], channels)
            )
            measured = divergence(model, shrink(model, kept), batches)
            ratios.append((costs.heads[i][heads] + costs.channels[i][channels]) / measured)
    assert 0.4 < np.exp(np.mean(np.log(ratios))) < 2.5
    assert min(ratios) > 0.1 and max(ratios) < 10, ratios


@torch.no_grad()
def divergence(model: GPT, other: GPT, batches: list[torch.Tensor]) -> float:
    """KL(model || other) in nats per token."""
    found = []
    for tokens in batches:
        ours, theirs = (m(tokens[:, :-1]).double().log_softmax(-1) for m in (model, other.eval()))
        found.append(float((ours.exp() * (ours - theirs)).sum(-1).mean()))
    return float(np.mean(found))


def test_designs_may_have_dynamic_scales_where_static_ones_alone_cost_too_much(
    small_dense: Path, small_data: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    massive = save(plant(gpt2(tmp_path, byte_tokenizer), MASSIVE, SCALE), byte_tokenizer, tmp_path)
    named = load_recipe("tiny", (*SMALL, "Compress.Quantization.formats={block_0: {qkv: int8}}"))
    for folder, int8 in (
        (small_dense, ["static_int8"]),
        (massive, ["static_int8", "dynamic_int8"]),
    ):
        costs = write_costs(RECIPE, folder, small_data, tmp_path / f"{folder.name}.json")
        assert [*costs.formats] == [*int8, "float"]
        config = load_checkpoint(folder).model.config
        options = Problem.of(config, costs, Prices(PRICES), named, named).formats
        assert options["h.0.attn.c_attn"] == int8 and options["h.1.mlp.c_fc"] == [*int8, "float"]
    worst = max(costs.formats["static_int8"], key=costs.formats["static_int8"].__getitem__)
    assert worst == massive_reader(load_checkpoint(massive).model)
    assert costs.linear_cost(worst, "static_int8") > 2 * costs.linear_cost(worst, "dynamic_int8")


def test_a_design_that_misses_is_corrected_before_it_is_trained() -> None:
    problem, measured = a_problem(0, one_layer=False), list[Design]()

    def measure(design: Design) -> float:
        measured.append(design)
        return 1.06 * problem.price(design)

    (found,) = propose(problem, Goal("bytes", 0.3, "perplexity", 0.1), 2, measure)
    assert len(measured) == 2 and found.design == measured[1]
    assert CLOSE * 0.3 <= 1.06 * problem.price(found.design) <= 0.3
    assert found.predicted == pytest.approx(1.06 * problem.price(found.design))


def test_a_design_near_the_limit_is_not_corrected() -> None:
    problem, measured = a_problem(0, one_layer=False), list[Design]()

    def measure(design: Design) -> float:
        measured.append(design)
        return 0.98 * problem.price(design)

    (found,) = propose(problem, Goal("bytes", 0.2, "perplexity", 0.1), 2, measure)
    assert measured == [found.design] and 0.98 * problem.price(found.design) >= CLOSE * 0.2
    assert problem.solve(0.2 / 0.98) != found.design


def test_trials_for_a_time_aim_below_each_other() -> None:
    problem = a_problem(1, one_layer=False)
    goal = Goal("latency", 0.3, "perplexity", 0.1)
    prices = [p.predicted for p in propose(problem, goal, 3, problem.price)]
    assert len(prices) == 3 and prices == sorted(prices, reverse=True)
    assert all(price <= 0.3 * CLOSE**i for i, price in enumerate(prices))


def test_a_target_that_no_measured_design_reaches_is_refused() -> None:
    problem = a_problem(0, one_layer=False)
    with raises(Code.GATE, "bytes 0.3", kind=StageError):
        propose(problem, Goal("bytes", 0.3, "perplexity", 0.1), 1, lambda design: 20.0)
    with raises(Code.INVALID_VALUE, "trials: 0"):
        propose(problem, Goal("bytes", 0.3, "perplexity", 0.1), 0, problem.price)
