"""Pruning, quantization, sensitivity and evaluation of families other than GPT-2."""

import copy
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from lathe.compress.criteria import CRITERIA, importance
from lathe.compress.gptq import gptq
from lathe.compress.plan import make_plan
from lathe.compress.prune import cut, prune
from lathe.compress.quantize import quantize
from lathe.compress.reconstruct import RIDGE, reconstruct, reconstruct_layers
from lathe.compress.sensitivity.analyze import analyze
from lathe.compress.smoothing import find_factors, fold
from lathe.compress.widths import KeptUnits, by_rank, keep_layers, shrink, units_from_ranks
from lathe.data.tokens import TokenDataset
from lathe.evaluate.evaluate import evaluate
from lathe.model import fake_quant
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.gpt import GPT
from lathe.train.batches import EvalBatches
from lathe.train.loss import next_token_loss
from lathe.train.pretrain import pretrain
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import PruneSettings, QuantizationSettings, Recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.families import VOCABULARY, make, save
from tests.support.small_run import SMALL, records
from tests.support.tables import quick_only

TOKENS = torch.randint(VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(3))
SHAPE = (
    "Model.architecture=qwen3",
    "Model.num_key_value_heads=2",
    "Model.ffn_hidden_size=64",
    "Model.tie_word_embeddings=False",
)


COMPRESSED = {  # case -> changes
    "qwen2 with a window": {},
    "smollm3 with a window": {},
    "gemma3": {"num_key_value_heads": 2},
    "phi3": {},
    "olmo2": {},
    "starcoder2": {},
    "gpt-neox": {},
    "opt": {},
}
WITH_PARTS_OF_THEIR_OWN = ("gemma3", "phi3", "olmo2", "gpt-neox", "opt")
"""Norms around both halves, fused gates, norms of all heads, parallel halves, and no gates."""


@pytest.fixture(scope="module", params=quick_only(COMPRESSED, WITH_PARTS_OF_THEIR_OWN))
def made_other(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_tokenizer: Tokenizer,
) -> GPT:
    made = make(request.param, **COMPRESSED[request.param])
    folder = tmp_path_factory.mktemp("other") / "hf"
    return load_checkpoint(save(made, folder, byte_tokenizer)).model


@pytest.fixture
def other(made_other: GPT) -> GPT:
    """A model of another family: 80 channels and 4 query heads, in 2 groups or ungrouped."""
    return copy.deepcopy(made_other)


@pytest.fixture(scope="module")
def made_model(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> GPT:
    folder = tmp_path_factory.mktemp("qwen3") / "hf"
    return load_checkpoint(save(make("qwen3"), folder, byte_tokenizer)).model


@pytest.fixture
def model(made_model: GPT) -> GPT:
    """A Qwen3 model: 4 query heads of size 8 in 2 groups, 80 channels."""
    return copy.deepcopy(made_model)


@pytest.fixture(scope="module")
def dense(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("families") / "dense"
    pretrain(load_recipe("tiny", (*SMALL, *SHAPE)), small_data, output)
    return output


def without(model: GPT, layer: int, heads: Sequence[int], channels: torch.Tensor) -> None:
    """Zero the output linears' weights for query heads and channels."""
    family, D = model.config.architecture, model.config.head_dim
    block = model.blocks[layer]
    with torch.no_grad():
        for head in heads:
            weight = block.get_parameter(f"{family.row('heads').name}.weight")
            weight[:, head * D : (head + 1) * D] = 0
        block.get_parameter(f"{family.row('channels').name}.weight")[:, channels] = 0


@pytest.mark.parametrize(
    ("unit", "kept"),
    [
        ("group", KeptUnits(torch.tensor([1]), torch.arange(0, 80, 2))),
        (
            "query",
            KeptUnits(torch.arange(2), torch.arange(0, 80, 2), torch.tensor([[1], [0]])),
        ),
    ],
)
def test_shrunk_logits_equal_zeroed_ones(model: GPT, unit: str, kept: KeptUnits) -> None:
    pruned = shrink(model, [kept] * 3).eval()
    gone = [0, 1] if unit == "group" else [0, 3]
    heads = ((2, 1),) if unit == "group" else ((2, 2),)
    assert set(zip(pruned.config.n_head, pruned.config.n_kv_head, strict=True)) == set(heads)
    with torch.inference_mode():
        after = pruned(TOKENS)
        for layer in range(3):
            without(model, layer, gone, torch.arange(1, 80, 2))
        torch.testing.assert_close(model(TOKENS), after, atol=1e-5, rtol=1e-5)
    assert pruned.config.n_params == sum(p.numel() for p in pruned.parameters())


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("unit", ["group", "query"])
def test_pruned_units_score_lowest(model: GPT, criterion: str, unit: str) -> None:
    """Units with zero weights get the lowest scores."""
    family = model.config.architecture
    qkv, out, gate_up = (
        model.blocks[1].get_parameter(f"{linear.name}.weight")
        for linear in (family.column("heads"), family.row("heads"), family.column("channels"))
    )
    gone = [2, 3] if unit == "group" else [1, 2]  # a group, or one query head of each group
    with torch.no_grad():
        rows = qkv.view(2, 4, 8, -1)  # per group: two queries, key, value
        if criterion == "fpgm":  # equal to another unit, so redundant
            rows[:, :] = rows[:1, :1] if unit == "query" else rows[1:]
        elif unit == "group":
            rows[1] = 0
        else:
            rows[0, 1] = rows[1, 0] = 0
        for head in gone:
            out[:, head * 8 : (head + 1) * 8] = 0
        gate_up.view(80, 2, -1)[5] = 0
    found = importance(model, criterion, [TOKENS], of_queries=unit == "query")
    assert all(scores.shape == ((4,) if unit == "query" else (2,)) for scores in found.heads)
    if criterion == "fpgm":
        assert len(found.heads[1].unique()) == 1
        return
    if criterion == "activation":  # computed from the output linear's input only
        gone = gone if unit == "group" else []
    lowest = found.heads[1].argsort()
    if unit == "group":
        assert lowest[0] == 1
    elif gone:
        assert set(lowest[:2].tolist()) == set(gone)
    assert found.channels[1].argmin() == 5


def test_what_stays_is_the_least_squares_solution(other: GPT) -> None:
    """numpy's, for what each linear reads in the fitted model."""
    dense, family = copy.deepcopy(other), other.config.architecture
    channels = torch.arange(0, 80, 2)
    kept = KeptUnits(torch.arange(1, other.config.n_kv_head[0]), channels)
    n = other.config.per_group[0] * other.config.head_dim  # features of the group that goes
    stays = {"heads": range(n, sum(other.config.widths("heads")[:1])), "channels": channels}
    reconstruct(other, [kept] * 3, [TOKENS[:2], TOKENS[2:]])
    inputs: dict[torch.nn.Module, torch.Tensor] = {}
    linears = {
        f"{family.block(i)}.{family.row(unit).name}": list(stays[unit])
        for i, unit in product(range(3), ("heads", "channels"))
    }
    for name in linears:
        other.get_submodule(name).register_forward_pre_hook(
            lambda linear, x: inputs.update({linear: x[0]})
        )
    with torch.no_grad():
        other(TOKENS)
    for name, read in linears.items():
        fitted, whole = (x.get_submodule(name) for x in (other, dense))
        assert isinstance(fitted, torch.nn.Linear) and isinstance(whole, torch.nn.Linear)
        x = inputs[fitted].flatten(0, 1).double().numpy()
        weights = [linear.weight.detach().double().numpy().T for linear in (whole, fitted)]
        if whole.bias is not None:
            x = np.concatenate([x, np.ones_like(x[:, :1])], 1)
            biases = [linear.bias.detach().double().numpy()[None] for linear in (whole, fitted)]
            weights = [np.concatenate(pair) for pair in zip(weights, biases, strict=True)]
            read = [*read, x.shape[1] - 1]
        root = math.sqrt(RIDGE * np.square(x).sum(0).mean())
        system = np.concatenate([x[:, read], root * np.eye(len(read))])
        wanted = np.concatenate([x @ weights[0], root * weights[0][read]])
        solution = np.linalg.lstsq(system, wanted)[0]
        np.testing.assert_allclose(weights[1][read], solution, atol=1e-4, rtol=1e-4)
        gone = np.setdiff1d(np.arange(x.shape[1]), read)
        assert len(gone) and not weights[1][gone].any()


def test_the_ffn_before_a_removed_layer_is_the_least_squares_solution(other: GPT) -> None:
    """numpy's, for the FFN's features and what the removed layer adds to its output."""
    dense, family = copy.deepcopy(other), other.config.architecture
    reconstruct_layers(other, [0, 2], [TOKENS[:2], TOKENS[2:]])
    name = f"{family.block(0)}.{family.row('channels').name}"
    changed = {
        module.rpartition(".")[0]
        for (module, x), (_, y) in zip(
            dense.named_parameters(), other.named_parameters(), strict=True
        )
        if not torch.equal(x, y)
    }
    if family.output_norms:
        assert not changed
        return
    assert changed == {name}
    states: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    for block in dense.blocks[:2]:
        block.register_forward_hook(lambda _, __, output: states.append(output))
    dense.get_submodule(name).register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with torch.no_grad():
        dense(TOKENS)
    x, before, after = (y.flatten(0, 1).double().numpy() for y in (*inputs, *states))
    linears = (model.get_submodule(name) for model in (dense, other))
    weights = [linear.weight.detach().double().numpy().T for linear in linears]
    if (bias := dense.get_submodule(name).bias) is not None:
        x = np.concatenate([x, np.ones_like(x[:, :1])], 1)
        biases = (bias, other.get_submodule(name).bias)
        pairs = zip(weights, (b.detach().double().numpy()[None] for b in biases), strict=True)
        weights = [np.concatenate(pair) for pair in pairs]
    root = math.sqrt(RIDGE * np.square(x).sum(0).mean())
    system = np.concatenate([x, root * np.eye(x.shape[1])])
    wanted = np.concatenate([x @ weights[0] + after - before, root * weights[0]])
    solution = np.linalg.lstsq(system, wanted)[0]
    np.testing.assert_allclose(weights[1], solution, atol=1e-4, rtol=1e-4)


def test_a_removed_layer_is_made_up_for(model: GPT) -> None:
    settings = PruneSettings(criterion="l2_norm", heads=[2, 0, 2], channels=[80, 0, 80])
    with torch.no_grad():
        expected = model(TOKENS)
        pruned = cut(copy.deepcopy(model), settings, model.config, 1, [TOKENS])
        errors = [
            (part.eval()(TOKENS) - expected).square().mean()
            for part in (keep_layers(model, [0, 2]), pruned)
        ]
    assert errors[1] < 0.7 * errors[0]


def test_a_copy_of_another_channel_is_made_up_for(model: GPT) -> None:
    family, channels = model.config.architecture, torch.arange(80)
    kept = [KeptUnits(torch.arange(2), channels[channels != 3])] * 3
    with torch.no_grad():
        for block in model.blocks:
            both = block.get_parameter(f"{family.column('channels').name}.weight").view(80, 2, -1)
            both[3] = both[7]
        expected = model(TOKENS)
        errors = []
        for fits in (False, True):
            pruned = copy.deepcopy(model)
            if fits:
                reconstruct(pruned, kept, [TOKENS])
            errors.append((shrink(pruned, kept).eval()(TOKENS) - expected).square().mean())
    assert errors[1] < 0.05 * errors[0]


def test_shrunk_logits_equal_zeroed_ones_in_every_family(other: GPT) -> None:
    groups = other.config.n_kv_head[0]
    channels = torch.arange(0, 80, 2)
    kept = KeptUnits(torch.arange(groups - 1), channels)
    pruned = shrink(other, [kept] * 3).eval()
    heads = list(range(4 - 4 // groups, 4))
    with torch.inference_mode():
        after = pruned(TOKENS)
        for layer in range(3):
            without(other, layer, heads, torch.arange(1, 80, 2))
        before = other(TOKENS)
    assert pruned.config.n_params == sum(p.numel() for p in pruned.parameters())
    if other.config.architecture.norms_whole:  # fewer heads change the normalization
        assert after.isfinite().all()
        return
    torch.testing.assert_close(before, after, atol=1e-5, rtol=1e-5)


def test_a_layer_keeps_its_kind_of_attention(other: GPT) -> None:
    left = keep_layers(other, [1, 2]).eval()
    assert left.config.kinds == other.config.kinds[1:]
    with torch.inference_mode():
        assert left(TOKENS).isfinite().all()


def test_smoothing_and_gptq_leave_what_every_family_computes(other: GPT) -> None:
    plain = copy.deepcopy(other)
    settings = QuantizationSettings(weight_bits=4)
    plan = make_plan(other.config, settings)
    factors = find_factors(other, [TOKENS], plan.linears, True)
    fold(other, factors)
    with torch.no_grad():
        expected = plain(TOKENS)
        torch.testing.assert_close(other(TOKENS), expected, atol=1e-4, rtol=1e-4)
        errors = []
        for rounds in (False, True):
            quantized = copy.deepcopy(plain)
            fake_quant.insert(quantized, plan)
            if rounds:
                gptq(quantized, [TOKENS])
            errors.append(float((quantized(TOKENS) - expected).square().mean()))
    assert errors[1] < errors[0]


def test_transformers_computes_what_is_pruned_in_every_family(
    other: GPT, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    """Layers and channels are pruned; heads only if transformers' class supports it."""
    settings = PruneSettings(ratio=0.5, layers=1)
    pruned = cut(other, settings, other.config, calibration=[TOKENS]).eval()
    save_checkpoint(tmp_path / "own", pruned, byte_tokenizer, "prune", Recipe())
    again = load_checkpoint(tmp_path / "own").model
    with torch.inference_mode():
        expected = pruned(TOKENS)
        assert torch.equal(again(TOKENS), expected)
        if pruned.config.is_uniform:
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "own").eval()
            torch.testing.assert_close(expected, theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_query_heads_go_by_their_rank_within_the_group(model: GPT) -> None:
    scores = importance(model, "l1_norm", [], of_queries=True)
    ranked, order = by_rank(scores, model.config.n_kv_head)
    assert all(means.shape == (2,) and means[0] >= means[1] for means in ranked.heads)
    kept = units_from_ranks([KeptUnits(torch.tensor([0]), torch.arange(80))] * 3, order)
    for layer, found in zip(kept, scores.heads, strict=True):
        assert layer.queries is not None
        assert layer.queries[:, 0].tolist() == found.view(2, 2).argmax(1).tolist()


@pytest.mark.parametrize(
    ("scope", "unit", "criterion"),
    quick_only(
        product(("uniform", "global"), ("group", "query"), CRITERIA),
        [(s, u, c) for s, u in (("uniform", "group"), ("global", "query")) for c in CRITERIA],
    ),
)
def test_every_criterion_prunes(model: GPT, criterion: str, unit: str, scope: str) -> None:
    settings = PruneSettings(criterion=criterion, scope=scope, ratio=0.5, head_unit=unit)
    before = model.config
    pruned = cut(model, settings, before, calibration=[TOKENS])
    config = pruned.config
    if scope == "uniform":
        n = (2, 1) if unit == "group" else (2, 2)
        assert set(zip(config.n_head, config.n_kv_head, strict=True)) == {n}
        assert set(config.n_inner) == {40}
    if unit == "query":
        assert config.n_kv_head == before.n_kv_head
    assert config.n_params < 0.95 * before.n_params
    with torch.inference_mode():
        assert pruned.eval()(TOKENS).isfinite().all()


def test_transformers_computes_a_uniformly_pruned_model(
    model: GPT, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    settings = PruneSettings(ratio=0.5, head_unit="query", layers=1)
    pruned = cut(model, settings, model.config, calibration=[TOKENS]).eval()
    save_checkpoint(tmp_path / "own", pruned, byte_tokenizer, "prune", Recipe())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "own").eval()
    assert theirs.config.num_hidden_layers == 2 and theirs.config.num_attention_heads == 2
    with torch.inference_mode():
        torch.testing.assert_close(pruned(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_heads_without_groups_have_no_query_heads_to_lose(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    recipe = load_recipe("tiny", (*SMALL, "Compress.Prune.head_unit=query"))
    with raises(Code.UNSUPPORTED, "Compress.Prune.head_unit is query"):
        prune(recipe, small_dense, small_data, tmp_path / "p")


@pytest.mark.slow
def test_prune_with_a_teacher_then_quantize(dense: Path, small_data: Path, tmp_path: Path) -> None:
    changes = (
        "Compress.Prune.ratio=0.25",
        "Compress.Prune.scope=global",
        "Compress.Prune.criterion=taylor",
        "Compress.Distill.teacher=parent",
        "Compress.Distill.hidden=0.1",
    )
    recipe = load_recipe("tiny", (*SMALL, *changes))
    result = prune(recipe, dense, small_data, tmp_path / "p")
    assert result.eval_loss < result.first_eval_loss
    pruned = load_checkpoint(tmp_path / "p").model
    assert pruned.config.n_params < load_checkpoint(dense).model.config.n_params
    assert len(records(tmp_path / "p", "loss")) == 20


@pytest.mark.parametrize(
    ("bits", "rounding"), [pytest.param(8, "nearest", marks=pytest.mark.slow), (4, "gptq")]
)
def test_quantized_checkpoint_computes_what_was_trained(
    dense: Path, small_data: Path, tmp_path: Path, bits: int, rounding: str
) -> None:
    recipe = load_recipe(
        "tiny",
        (
            *SMALL,
            "Compress.Quantization.quantize_embedding=True",
            f"Compress.Quantization.weight_bits={bits}",
            f"Compress.Quantization.rounding={rounding}",
            "Optimizer.lr.max_lr=2e-4",
            "Engine.max_steps=6",
        ),
    )
    result = quantize(recipe, dense, small_data, tmp_path / "q")
    model = load_checkpoint(tmp_path / "q").model
    plan = model.config.quantization
    assert plan is not None and not plan.position_embedding
    assert set(plan.linears) == {*model.config.linear_names(), HEAD}
    for table in model.config.tables:  # embedding and head are rounded per row
        weight = model.get_parameter(f"{table}.weight")
        assert not torch.equal(model.get_submodule(table).table(), weight)  # type: ignore[operator]
    tokens = TokenDataset.open(small_data)
    batches = EvalBatches(recipe, tokens, 8, 2)
    with torch.no_grad():
        tensors = [torch.from_numpy(batches[i]) for i in range(len(batches))]
        losses = [float(next_token_loss(model, each)) for each in tensors]
    assert sum(losses) / len(losses) == pytest.approx(result.eval_loss, abs=1e-6)
    assert result.eval_loss < load_checkpoint(dense).meta["metrics"]["eval_loss"] + 0.2


def test_analysis_names_every_linear(dense: Path, small_data: Path, tmp_path: Path) -> None:
    few = ("Sensitivity.eval_batches=1", "Sensitivity.calibration_batches=1")
    recipe = load_recipe("tiny", (*SMALL, *few, "Compress.Quantization.quantize_embedding=True"))
    result = analyze(recipe, dense, small_data, tmp_path / "a")
    config = load_checkpoint(dense).model.config
    assert {x.name for x in result.linears} == {*config.linear_names(), HEAD}


def test_evaluation_measures_the_perplexity_that_transformers_finds(
    dense: Path, small_data: Path, tmp_path: Path
) -> None:
    text = tmp_path / "held-out.txt"
    text.write_text("9 bottles of milk on wall 63.\n\n")  # 31 tokens: one window
    found = evaluate(load_recipe("tiny", SMALL), dense, tmp_path / "e", text=text)
    theirs = AutoModelForCausalLM.from_pretrained(dense).eval()
    ids = torch.tensor([load_checkpoint(dense).tokenizer.encode(text.read_text()).ids])
    with torch.inference_mode():
        loss = theirs(ids, labels=ids).loss
    assert found.figures["perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-4)
