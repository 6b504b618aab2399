"""Calibration text: training text and text that the model writes."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lathe.compress import calibration
from lathe.compress.calibration import calibration_text, generated_text
from lathe.compress.quantize import quantize
from lathe.config.recipe import load_recipe
from lathe.data.tokens import TokenDataset
from lathe.errors import UserError
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.train.batches import calibration_batches
from lathe.train.loss import next_token_loss
from tests.support.small_run import SMALL

COUNT = "Sensitivity.calibration_batches=3"


@pytest.fixture(scope="module")
def start(small_dense: Path) -> Checkpoint:
    return load_checkpoint(small_dense)


def text(start: Checkpoint, data: Path, generated: int) -> list[torch.Tensor]:
    recipe = load_recipe("tiny", (*SMALL, COUNT, f"Sensitivity.generated_batches={generated}"))
    return calibration_text(recipe, start.model, TokenDataset.open(data), start.eos_id)


@pytest.mark.parametrize("generated", [0, 2, 5])
def test_batches_of_both_kinds_take_turns(
    start: Checkpoint, small_data: Path, generated: int
) -> None:
    recipe = load_recipe("tiny", (*SMALL, COUNT))
    read = list(map(torch.from_numpy, calibration_batches(recipe, TokenDataset.open(small_data))))
    batches = text(start, small_data, generated)
    assert [batch.shape for batch in batches] == [read[0].shape] * (3 + generated)
    written = [batch for batch in batches if not any(torch.equal(batch, own) for own in read)]
    assert len(written) == generated
    assert all((batch[:, 0] == start.eos_id).all() for batch in written)
    assert not any(torch.equal(first, second) for first, second in pairwise(written))
    both = min(3, generated)
    assert all(torch.equal(batches[2 * i], read[i]) for i in range(both))
    assert all(torch.equal(batches[2 * i + 1], written[i]) for i in range(both))
    again = text(start, small_data, generated)
    assert all(torch.equal(one, two) for one, two in zip(batches, again, strict=True))


def test_rows_whose_cache_is_too_large_are_generated_in_parts(
    start: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = 8 * 32 * sum(start.model.config.n_kv_head) * start.model.config.head_dim
    monkeypatch.setattr(calibration, "CACHE_BYTES", 2 * row)
    rows = generated_text(start.model, 5, 32, start.eos_id, seed=3)
    assert rows.shape == (5, 32) and len({tuple(row) for row in rows.tolist()}) == 5
    assert torch.equal(rows[2:4], generated_text(start.model, 2, 32, start.eos_id, seed=4))


def test_the_model_writes_what_it_expects(start: Checkpoint, small_data: Path) -> None:
    """The mean loss on a sample of a distribution is its entropy."""
    batches = text(start, small_data, 16)
    written = torch.cat([batch for batch in batches if (batch[:, 0] == start.eos_id).all()])
    assert len(written) == 16 * len(batches[0])
    with torch.no_grad():
        logits = start.model(written)[:, :-1].log_softmax(-1)
        entropy = -(logits.exp() * logits).sum(-1).mean().item()
        loss = next_token_loss(start.model, written).mean().item()
    assert loss == pytest.approx(entropy, abs=0.1)


@pytest.mark.parametrize(
    "change",
    [
        "Sensitivity.calibration_batches=2",
        "Sensitivity.generated_batches=2",
        "Gate.max_perplexity_increase=0.5",
    ],
)
def test_other_calibration_is_another_run(
    small_dense: Path, small_data: Path, tmp_path: Path, change: str
) -> None:
    settings = (*SMALL, COUNT, "Engine.max_steps=0")
    quantize(load_recipe("tiny", settings), small_dense, small_data, tmp_path / "q")
    with pytest.raises(UserError, match="contains a run with different calibration"):
        quantize(load_recipe("tiny", (*settings, change)), small_dense, small_data, tmp_path / "q")
