from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe.evaluate.latency import measure
from lathe.model.config import GPTConfig
from tests.support.small_export import UNIFORM, make_model, write_unproven


def test_figures_of_two_models_in_one_run(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    wide = GPTConfig(384, 64, 192, 32, (6, 6), (768, 768))
    write_unproven(make_model(wide), byte_tokenizer, tmp_path / "wide")
    write_unproven(make_model(UNIFORM), byte_tokenizer, tmp_path / "small")
    models = {"wide": tmp_path / "wide", "small": tmp_path / "small"}
    # More tokens than positions: the prompt is shortened.
    figures = measure(models, prompt_tokens=128, new_tokens=8, batch=2, rounds=7, threads=1)
    assert list(figures) == ["wide", "small"]
    wide_figures, small = figures.values()
    assert wide_figures["bytes_ratio"] == wide_figures["decode_speedup"] == 1.0
    assert small["bytes"] == (tmp_path / "small" / "model.onnx").stat().st_size
    assert small["bytes_ratio"] == pytest.approx(small["bytes"] / wide_figures["bytes"])
    assert small["prefill_speedup"] > 1  # a sixteenth of the FLOPs
    for own in figures.values():
        assert own["tokens_per_second"] == pytest.approx(2e3 / own["decode_ms"])
        assert 0 < own["decode_ms"] < own["prefill_ms"]
