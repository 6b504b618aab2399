"""The sensitivity analysis as a stage: its scores match a direct computation with torch's fake
quantization, it finds a spoiled linear and survives a kill, and quantize applies its choice."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

from lathe.compress.quantize import quantize
from lathe.compress.sensitivity import measure, rank
from lathe.compress.sensitivity.analyze import analyze
from lathe.compress.sensitivity.measure import BatchMetric
from lathe.compress.sensitivity.rank import validation_batches
from lathe.data.tokens import TokenDataset
from lathe.model import fake_quant
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.gpt import GPT, Block
from lathe.train.batches import EvalBatches, calibration_batches
from lathe_base.artifacts.journal import Journal
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from tests.support import warm
from tests.support.errors import raises
from tests.support.small_models import small_config
from tests.support.small_run import SMALL

QUANTIZE = (*SMALL, "Compress.Quantization.quantize_embedding=True", "Optimizer.lr.max_lr=2e-4")


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip drawing the page, which takes most of the time; test_activation.py draws one."""
    monkeypatch.setattr(rank, "sensitivity_page", lambda analysis: "")


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """A checkpoint with large random weights, so that INT8 costs more than rounding errors."""
    model = GPT(small_config(n_head=(4, 3), n_inner=(96, 64)))
    model.initialize(0.3, seed=1)
    output = tmp_path_factory.mktemp("run") / "loud"
    save_checkpoint(output, model, byte_tokenizer, "pretrain", Recipe())
    return output


@pytest.fixture(scope="module")
def loud_int8(loud: Path, small_data: Path) -> Path:
    output = loud.parent / "int8"
    quantize(load_recipe("tiny", (*QUANTIZE, "Engine.max_steps=2")), loud, small_data, output)
    return output


@pytest.fixture(scope="module")
def spoiled(small_dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with an outlier: one row's scale is so coarse that INT8 ruins the linear."""
    trained = load_checkpoint(small_dense)
    block = trained.model.h[1]
    assert isinstance(block, Block)
    with torch.no_grad():
        block.mlp.c_fc.weight[:, 0] = 400.0
        block.ln_2.weight[0] = 0.0
        block.ln_2.bias[0] = 0.0
    output = tmp_path_factory.mktemp("run") / "spoiled"
    save_checkpoint(output, trained.model, trained.tokenizer, "pretrain", Recipe())
    return output


def int8_weight(linear: nn.Linear) -> Tensor:
    """INT8 weight by torch's own fake quantization."""
    scales = linear.weight.detach().abs().amax(1) / 127
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(linear.weight, scales, zeros, 0, -127, 127)


def int8(linear: nn.Linear, x: Tensor, scale: float) -> Tensor:
    """Output of an INT8 linear by torch's own fake quantization."""
    read = torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127)
    return F.linear(read, int8_weight(linear), linear.bias)


@contextmanager
def replaced(
    model: GPT, names: list[str], output: Callable[[str, nn.Linear, Tensor], Tensor]
) -> Iterator[None]:
    """Replace the linears' outputs with `output(name, linear, input)` in the block."""
    handles = []
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        handles.append(
            linear.register_forward_hook(lambda m, args, _, n=name: output(n, m, args[0]))
        )
    yield
    for handle in handles:
        handle.remove()


def validation(recipe: Recipe, data: Path) -> Tensor:
    """All tokens (N, T + 1) on which the metric is measured."""
    tokens = TokenDataset.open(data)
    batches = EvalBatches(
        recipe, tokens, recipe.Global.micro_batch_size, recipe.Sensitivity.eval_batches
    )
    return torch.from_numpy(np.concatenate([batches[i] for i in range(len(batches))]))


def transcribed_score(metric: str, before: Tensor, after: Tensor, targets: Tensor) -> float:
    """Score computed from whole logits (N, T, V)."""
    if metric == "loss":
        losses = [F.cross_entropy(x.flatten(0, 1), targets.flatten()) for x in (after, before)]
        return float(losses[0] - losses[1])
    if metric == "accuracy":
        hits = [(x.argmax(-1) == targets).double().mean() for x in (before, after)]
        return float(hits[0] - hits[1])
    p, q = (Categorical(logits=x.double()) for x in (before, after))
    return float(kl_divergence(p, q).mean())


@pytest.mark.parametrize(
    "metric", ["kl", *(pytest.param(x, marks=pytest.mark.slow) for x in ("loss", "accuracy"))]
)
def test_scores_are_those_of_a_transcription(
    metric: str,
    loud: Path,
    spoiled: Path,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = (
        spoiled if metric == "accuracy" else loud
    )  # random weights have no accuracy to lose
    monkeypatch.setattr(measure, "CHUNK_ELEMENTS", 8 * 384 * 50)  # chunks of 50 tokens
    recipe = load_recipe("tiny", (*SMALL, f"Sensitivity.metric={metric}"))
    result = analyze(recipe, checkpoint, small_data, tmp_path / "s")
    scores = {linear.name: linear.score for linear in result.linears}
    errors = {linear.name: linear.stderr for linear in result.linears}

    model = load_checkpoint(checkpoint).model
    names = model.config.linear_names()
    peaks: dict[str, list[float]] = {name: [] for name in names}

    def observe(name: str, linear: nn.Linear, x: Tensor) -> Tensor:
        peaks[name] += x.abs().amax((1, 2)).tolist()
        return F.linear(x, int8_weight(linear), linear.bias)

    tokens, n = validation(recipe, small_data), recipe.Global.micro_batch_size
    error = 2 / tokens[:, 1:].numel() if metric == "accuracy" else 1e-5
    with torch.no_grad():
        data = TokenDataset.open(small_data)
        with replaced(model, names, observe):
            for batch in map(torch.from_numpy, calibration_batches(recipe, data)):
                model(batch)
        ranges = {name: np.mean(found) for name, found in peaks.items()}
        before = model(tokens[:, :-1])
        for name in names:
            with replaced(model, [name], lambda n, m, x: int8(m, x, ranges[n] / 127)):
                after = model(tokens[:, :-1])
            expected = transcribed_score(metric, before, after, tokens[:, 1:])
            assert scores[name] == pytest.approx(expected, rel=1e-2, abs=error), name
            batches = [
                transcribed_score(metric, *parts)
                for parts in zip(*(x.split(n) for x in (before, after, tokens[:, 1:])), strict=True)
            ]
            stderr = scipy.stats.sem(batches)
            assert errors[name] == pytest.approx(stderr, rel=1e-2, abs=error), name
    assert max(scores.values()) > 1e-3


@pytest.mark.slow
def test_mode_qat_takes_one_linear_back_to_float(
    loud_int8: Path, small_data: Path, tmp_path: Path
) -> None:
    recipe = load_recipe("tiny", (*QUANTIZE, "Sensitivity.mode=qat", "Sensitivity.metric=loss"))
    result = analyze(recipe, loud_int8, small_data, tmp_path / "s")
    assert len(result.linears) == 9
    tokens = validation(recipe, small_data)

    def loss(model: GPT) -> float:
        with torch.no_grad():
            logits = model(tokens[:, :-1])
        return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))

    everything = loss(load_checkpoint(loud_int8).model)
    assert result.baseline == pytest.approx(everything, abs=1e-6)
    for linear in result.linears:
        model = load_checkpoint(loud_int8).model
        if linear.name == "lm_head":
            model.head_input = None
            table = nn.Module.get_parameter(model, "wte.weight")
            model.wte.quantized = lambda _, table=table: table  # type: ignore[assignment]
        else:
            quantized = model.get_submodule(linear.name)
            plain = nn.Linear(quantized.in_features, quantized.out_features)  # type: ignore[arg-type]
            plain.weight, plain.bias = quantized.weight, quantized.bias  # type: ignore[assignment]
            fake_quant.replace_module(model, linear.name, plain)
        assert linear.score == pytest.approx(everything - loss(model), abs=1e-5), linear.name
    assert result.linears[0].score > 1e-3


def test_float_linears_of_the_quantized_checkpoint_stay_float(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    skip = ("Compress.Quantization.skip_tensor_map.block_1=[linear2]", "Engine.max_steps=1")
    recipe = load_recipe("tiny", (*QUANTIZE, *skip, "Sensitivity.mode=qat"))
    quantize(recipe, small_dense, small_data, tmp_path / "q")
    result = analyze(recipe, tmp_path / "q", small_data, tmp_path / "s")
    assert "h.1.mlp.c_proj" in result.skip and len(result.linears) == 8


@pytest.mark.parametrize(
    "settings",
    [
        *("mode=ptq", "mode=fisher"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("metric=kl", "metric=accuracy")),
    ],
)
def test_analysis_finds_the_linear_that_was_spoiled(
    settings: str, spoiled: Path, small_data: Path, tmp_path: Path
) -> None:
    changes = (f"Sensitivity.{settings}", "Sensitivity.budget=5e-5")
    recipe = load_recipe("tiny", (*QUANTIZE, *changes))
    result = analyze(recipe, spoiled, small_data, tmp_path / "s")
    # c_proj reads the output of the spoiled c_fc, whose outliers are in its range: similar cost.
    assert {x.name for x in result.linears[:2]} == {"h.1.mlp.c_fc", "h.1.mlp.c_proj"}
    assert "h.1.mlp.c_fc" in result.skip
    assert result.linears[1].score > 1.5 * result.linears[2].score
    assert len(result.linears) == 9
    assert [x.score for x in result.linears] == sorted(x.score for x in result.linears)[::-1]
    (outlier,) = (x for x in result.linears if x.name == "h.1.mlp.c_fc")
    assert outlier.weights.absmax == 400.0
    written = json.loads((tmp_path / "s" / "sensitivity.json").read_text())
    assert (
        written["skip"] == result.skip and written["linears"][0]["score"] == result.linears[0].score
    )
    assert not list(tmp_path.glob("s.unfinished*"))


def test_quantize_leaves_in_float_what_was_chosen(
    spoiled: Path, small_data: Path, tmp_path: Path
) -> None:
    changes = ("Sensitivity.mode=fisher", "Sensitivity.budget=5e-5", "Engine.max_steps=1")
    recipe = load_recipe("tiny", (*QUANTIZE, *changes))
    result = analyze(recipe, spoiled, small_data, tmp_path / "s")
    quantize(recipe, spoiled, small_data, tmp_path / "q", tmp_path / "s")
    plan = load_checkpoint(tmp_path / "q").model.config.quantization
    assert plan is not None and set(plan.activation_scales).isdisjoint(result.skip)
    assert len(plan.activation_scales) == 9 - len(result.skip) < 9


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ptq", pytest.param("fisher", marks=pytest.mark.slow)])
def test_int4_int8_and_float_beside_each_other(
    mode: str, loud: Path, small_data: Path, tmp_path: Path
) -> None:
    """Each score equals that of an analysis with only that width, and quantize applies the mix."""
    # Smoothed for GPTQ, 8-bit weights would have other scores.
    smoothing = "Compress.Quantization.smoothing=False"
    changes = (*QUANTIZE, f"Sensitivity.mode={mode}", "Engine.max_steps=0", smoothing)
    alone = {
        bits: analyze(
            load_recipe("tiny", (*changes, f"Compress.Quantization.weight_bits={bits}")),
            loud,
            small_data,
            tmp_path / f"s{bits}",
        )
        for bits in (8, 4)
    }
    int4, int8 = (sorted(alone[bits].linears, key=lambda x: x.name) for bits in (4, 8))
    assert [x.scores["static_int8"] for x in int4] == [x.score for x in int8]
    assert [x.scores["int4"] for x in int4] == [x.score for x in int4]
    assert all(x.scores == {} for x in int8)
    assert sum(x.score for x in int4) > 10 * sum(x.score for x in int8)

    budget = sum(x.score for x in int4) / 2
    settings = ("Compress.Quantization.weight_bits=4", f"Sensitivity.budget={budget}")
    recipe = load_recipe("tiny", (*changes, *settings, "Sensitivity.max_skips=1"))
    chosen = analyze(recipe, loud, small_data, tmp_path / "s")
    int8_names = {name for name, form in chosen.formats.items() if form == "static_int8"}
    assert int8_names and chosen.predicted <= budget
    quantize(recipe, loud, small_data, tmp_path / "q", tmp_path / "s")
    plan = load_checkpoint(tmp_path / "q").model.config.quantization
    assert plan is not None and set(plan.linears).isdisjoint(chosen.skip)
    assert {name for name, x in plan.linears.items() if x.weight.bits == 8} == int8_names


def test_the_estimate_ranks_as_the_divergence_does(
    loud: Path, small_data: Path, tmp_path: Path
) -> None:
    recipe = load_recipe("tiny", (*QUANTIZE, "Sensitivity.metric=kl"))
    result = analyze(recipe, loud, small_data, tmp_path / "s")
    assert result.rank_correlation is not None and result.rank_correlation > 0.8
    measured, estimated = (
        sum(getattr(x, name) for x in result.linears) for name in ("score", "estimate")
    )
    assert 0.5 < estimated / measured < 2


def test_estimates_are_scaled_to_what_all_linears_together_cost(
    loud: Path, small_data: Path, tmp_path: Path
) -> None:
    changes = (*SMALL, "Engine.max_steps=0", "Sensitivity.mode=fisher")
    recipe = load_recipe("tiny", changes)
    result = analyze(recipe, loud, small_data, tmp_path / "s")
    quantize(recipe, loud, small_data, tmp_path / "q")
    dense, int8 = (load_checkpoint(path).model for path in (loud, tmp_path / "q"))
    tokens = TokenDataset.open(small_data)
    batches = validation_batches(recipe, tokens)
    measured = fmean(BatchMetric("kl", [torch.from_numpy(x) for x in batches], dense)(int8))
    assert sum(x.score for x in result.linears) == pytest.approx(measured, rel=1e-3)
    estimated = sum(x.estimate for x in result.linears)
    assert estimated != pytest.approx(measured, rel=0.01)
    for linear in result.linears:
        expected = linear.estimate * measured / estimated
        assert linear.score == pytest.approx(expected, rel=1e-3)


COMMAND = ("-m", "lathe", "analyze")


def start(model: Path, data: Path, output: Path, *overrides: str) -> subprocess.Popen[bytes]:
    options = [part for value in (*QUANTIZE, *overrides) for part in ("-o", value)]
    return subprocess.Popen(
        [
            *warm.python(),
            *COMMAND,
            str(model),
            "-r",
            "tiny",
            "--data",
            str(data),
            "--output",
            str(output),
            *options,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> str:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
    return errors.decode()


def kill_after(process: subprocess.Popen[bytes], journal: Path, lines: int) -> None:
    """Send SIGKILL as soon as the journal has this many lines."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()  # until the fork, which has the pipe too, writes no more


@pytest.mark.slow
def test_a_killed_analysis_resumes_bit_identically(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    settings = ("Sensitivity.metric=kl", "Sensitivity.eval_batches=30")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(small_dense, small_data, whole, *settings, "Sensitivity.budget=1e-8"))
    journal = tmp_path / "killed.unfinished.jsonl"
    process = start(small_dense, small_data, killed, *settings)
    kill_after(process, journal, 6)
    assert process.returncode == -signal.SIGKILL and not killed.exists()
    with journal.open("a") as file:
        file.write('{"name": "lm_head", "fin')  # as left by a kill during a write
    # The budget does not affect the scores: it may change.
    errors = finish(start(small_dense, small_data, killed, *settings, "Sensitivity.budget=1e-8"))
    assert "resuming with" in errors
    results = [(folder / "sensitivity.json").read_bytes() for folder in (killed, whole)]
    assert results[0] == results[1] and json.loads(results[0])["skip"]
    assert (killed / "sensitivity.html").is_file() and not journal.exists()


def test_an_unfinished_analysis_of_something_else_is_in_the_way(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    journal = Journal(
        tmp_path / "s.unfinished.jsonl", dict.fromkeys(("settings", "model", "data"), "else")
    )
    journal.recall("baseline", lambda: 1.0)
    recipe = load_recipe("tiny", SMALL)
    with raises(
        Code.STATE_MISMATCH, tmp_path / "s.unfinished.jsonl", "settings and model and data"
    ):
        analyze(recipe, small_dense, small_data, tmp_path / "s")


def test_a_mode_that_is_not_for_the_checkpoint_is_refused(
    small_dense: Path, loud_int8: Path, small_data: Path, tmp_path: Path
) -> None:
    for mode, model in (("qat", small_dense), ("ptq", loud_int8), ("fisher", loud_int8)):
        recipe = load_recipe("tiny", (*SMALL, f"Sensitivity.mode={mode}"))
        with raises(Code.WRONG_KIND, model, f"Sensitivity.mode is {mode}"):
            analyze(recipe, model, small_data, tmp_path / "s")
    with raises(Code.INVALID_VALUE, "fisher", "metric to kl"):
        load_recipe("tiny", ("Sensitivity.mode=fisher", "Sensitivity.metric=accuracy"))
    assert not list(tmp_path.iterdir())
