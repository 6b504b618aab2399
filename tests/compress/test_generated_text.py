"""Text that a model writes for GPTQ."""

from pathlib import Path

import pytest
import torch

from lathe.compress import quantize as quantization
from lathe.compress.quantize import quantize
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.train.loss import next_token_loss
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_run import SMALL

GENERATED = "Compress.Quantization.generated_batches"
UNTRAINED = (*SMALL, "Compress.Quantization.weight_bits=4", "Engine.max_steps=0")


@pytest.fixture(scope="module")
def start(small_dense: Path) -> Checkpoint:
    return load_checkpoint(small_dense)


def write(start: Checkpoint, rows: int, seed: int) -> torch.Tensor:
    return quantization.generated_text(start.model, rows, 32, start.eos_id, seed)


def test_the_model_writes_what_it_expects(start: Checkpoint) -> None:
    """The mean loss on a sample of a distribution is its entropy."""
    rows = write(start, 64, seed=1)
    assert (rows[:, 0] == start.eos_id).all() and torch.equal(rows, write(start, 64, seed=1))
    with torch.no_grad():
        logits = start.model(rows)[:, :-1].log_softmax(-1)
        entropy = -(logits.exp() * logits).sum(-1).mean().item()
        loss = next_token_loss(start.model, rows).mean().item()
    assert loss == pytest.approx(entropy, abs=0.1)


def test_rows_whose_cache_is_too_large_are_generated_in_parts(
    start: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = 8 * 32 * sum(start.model.config.n_kv_head) * start.model.config.head_dim
    monkeypatch.setattr(quantization, "CACHE_BYTES", 2 * row)
    rows = write(start, 5, seed=3)
    assert rows.shape == (5, 32) and len({tuple(row) for row in rows.tolist()}) == 5
    assert torch.equal(rows[2:4], write(start, 2, seed=4))


def test_gptq_reads_it(small_dense: Path, small_data: Path, tmp_path: Path) -> None:
    """It fits what the model writes better, and the rounding depends on nothing else."""
    errors = []
    start = load_checkpoint(small_dense)
    rows = write(start, 64, seed=9)
    for count in (0, 8):
        recipe = load_recipe("tiny", (*UNTRAINED, f"{GENERATED}={count}"))
        quantize(recipe, small_dense, small_data, tmp_path / str(count))
        with torch.no_grad():
            p, q = (
                load_checkpoint(folder).model(rows).log_softmax(-1)
                for folder in (small_dense, tmp_path / str(count))
            )
        errors.append((p.exp() * (p - q)).sum(-1).mean().item())
    assert errors[1] < errors[0]


@pytest.mark.parametrize("bos", [[], [7]])
def test_gptq_reads_as_much_as_the_recipe_says(
    small_dense: Path,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bos: list[int],
) -> None:
    """Every row begins as the tokenizer begins a text, if it does."""
    for module in ("lathe.compress.quantize", "lathe.train.batches"):
        monkeypatch.setattr(f"{module}.bos_ids", lambda _: bos)
    read: list[torch.Tensor] = []
    monkeypatch.setattr("lathe.compress.quantize.gptq", lambda _, batches: read.extend(batches))
    counts = ("Compress.Quantization.gptq_batches=3", f"{GENERATED}=2")
    quantize(load_recipe("tiny", (*UNTRAINED, *counts)), small_dense, small_data, tmp_path / "q")
    assert [tokens.shape for tokens in read] == 5 * [(4, 32)]
    first = bos[0] if bos else load_checkpoint(small_dense).eos_id
    begins = [(tokens[:, 0] == first).all().item() for tokens in read]
    assert begins == [bool(bos)] * 3 + [True] * 2


@pytest.fixture(scope="module")
def quantized(
    small_dense: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output = tmp_path_factory.mktemp("quantized") / "q"
    quantize(load_recipe("tiny", UNTRAINED), small_dense, small_data, output)
    return output


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (f"{GENERATED}=2", "Compress.Quantization.generated_batches"),
        ("Sensitivity.calibration_batches=2", "Sensitivity.calibration_batches"),
        ("Gate.max_perplexity_increase=0.5", "Gate.max_perplexity_increase"),
    ],
)
def test_other_calibration_is_another_run(
    small_dense: Path, small_data: Path, quantized: Path, change: str, what: str
) -> None:
    with raises(Code.STATE_MISMATCH, what, quantized):
        recipe = load_recipe("tiny", (*UNTRAINED, change))
        quantize(recipe, small_dense, small_data, quantized)
