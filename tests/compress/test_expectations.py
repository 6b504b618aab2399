"""`lathe quantize --target`: what is chosen, and what is expected of it."""

from pathlib import Path

import pytest
from torch import Tensor
from typer.testing import CliRunner

from lathe.cli import app
from lathe.compress.plan import Expectation, Target, choose_expectation, expectations, expected
from lathe.export.weight_formats import stored_matrices
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.families import LLAMA
from lathe.model.folder import open_folder
from lathe.model.gpt import GPT
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_run import SMALL

SMOLLM2 = GPTConfig(
    *(49152, 8192, 576, 64, (9,) * 30, (1536,) * 30),
    architecture=LLAMA,
    kv_heads=(3,) * 30,
)

LLAMA_7B = GPTConfig(
    *(32000, 4096, 4096, 128, (32,) * 32, (11008,) * 32),
    architecture=LLAMA,
    kv_heads=(32,) * 32,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize("known", expectations(), ids=lambda x: x.name)
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_of_the_stored_integers_scales_and_floats(
    known: Expectation, tied: bool
) -> None:
    config = GPTConfig(
        *(50, 16, 128, 32, (4, 2), (192, 64)),
        architecture=LLAMA,
        kv_heads=(2, 2),
        tie_word_embeddings=tied,
    )
    model = GPT(config)
    model.initialize(0.2, 1)
    model.config = config.with_quantization(known.plan(config))
    total = 0.0
    for _, stored in stored_matrices(model):
        if isinstance(stored, Tensor):
            total += 4 * stored.numel()
        else:
            total += stored.values.numel() * stored.bits / 8 + 4 * stored.scales.numel()
            if stored.zero_points is not None:
                total += stored.zero_points.numel() * stored.bits / 8
    assert known.share(config) == pytest.approx(total / (4 * config.n_params), abs=1e-3)


@pytest.mark.parametrize(
    ("target", "limit", "config", "bits"),
    [
        ("bytes", 0.3, SMOLLM2, 8),
        ("loss", 0.01, SMOLLM2, 8),
        ("bytes", 0.2, SMOLLM2, 4),  # with the embedding, a fifth of its weights, in INT8
        ("loss", 0.5, SMOLLM2, 4),
        ("loss", 0.5, LLAMA_7B, 4),
        ("bytes", 0.2, LLAMA_7B, 4),
    ],
)
def test_the_best_that_meets_the_target(
    target: Target, limit: float, config: GPTConfig, bits: int
) -> None:
    found = choose_expectation(target, limit, config)
    assert found.plan(config).weight_bits == bits
    for other in expectations():
        figures = [(x.share(config), x.perplexity_increase) for x in (found, other)]
        if target == "loss":
            figures = [(loss, share) for share, loss in figures]
        (limited, best), (others, worse) = figures
        assert limited <= limit and (others > limit or best <= worse)


@pytest.mark.parametrize("limit", [0.01, float("nan")])
def test_a_target_that_nothing_meets(limit: float) -> None:
    with raises(Code.GATE, f"bytes={limit:g}"):
        choose_expectation("bytes", limit, SMOLLM2)


def test_quantize_says_what_it_expects_and_makes_it(
    small_dense: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = small_dense, "--data", small_data, "--output", tmp_path / "q"
    settings = (part for override in SMALL for part in ("--override", override))
    arguments = [str(x) for x in ("quantize", *paths, "--target", "loss=0.01", *settings)]
    monkeypatch.setattr("sys.argv", ["lathe", *arguments])
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    known = choose_expectation("loss", 0.01, open_folder(small_dense).config)
    assert known.name in result.output and f"{known.perplexity_increase:+.1%}" in result.output
    made = expected(load_checkpoint(tmp_path / "q").model.config)
    assert made is not None and made.name == known.name
