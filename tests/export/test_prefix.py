"""Models with a prefix: keys and values of a few tokens before every text."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from tokenizers import Tokenizer

from lathe.export.export import export
from lathe.model import fake_quant
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe.model.quantization import LinearFormat, QuantizationPlan
from lathe_base.config.settings import ExportSettings, GenerationSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_serving.runtime.exported_model import MODEL, PREFIX, pad
from lathe_serving.runtime.open_model import OPENERS, mean_difference
from lathe_serving.runtime.session import OnnxModel
from tests.support.cpu import WITHOUT_VNNI
from tests.support.errors import raises
from tests.support.massive import gpt2, llama
from tests.support.small_export import save, write_held_out, write_unproven

TOKENS = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(3))
PREFIX_TOKENS = (7, 130, 21)
PROMPTS = [TOKENS[0, :9].tolist(), TOKENS[1, :2].tolist(), TOKENS[2, :5].tolist()]


@pytest.fixture(params=[gpt2, llama])
def model(request: pytest.FixtureRequest, tmp_path: Path, byte_tokenizer: Tokenizer) -> GPT:
    found: GPT = request.param(tmp_path, byte_tokenizer)
    return found


def after_prefix(model: GPT) -> torch.Tensor:
    """Logits of TOKENS after the prefix as ordinary tokens."""
    first = torch.tensor([PREFIX_TOKENS]).expand(len(TOKENS), -1)
    with torch.no_grad():
        return model(torch.cat((first, TOKENS), 1))[:, len(PREFIX_TOKENS) :]


def with_prefix(model: GPT) -> GPT:
    model.set_prefix(PREFIX_TOKENS)
    return model


def quantized(model: GPT) -> GPT:
    plan = QuantizationPlan(dict.fromkeys((*model.config.linear_names(), HEAD), LinearFormat()))
    fake_quant.insert(model, plan)
    scales = fake_quant.calibrate(model, [TOKENS])
    model.config = model.config.with_quantization(plan.with_scales(scales))
    return model.eval()


@torch.no_grad()
def test_a_float_model_with_a_prefix_computes_what_follows_its_tokens(model: GPT) -> None:
    n_positions, plain, expected = model.config.n_positions, model(TOKENS), after_prefix(model)
    with_prefix(model)
    assert model.config.n_positions == n_positions - len(PREFIX_TOKENS)
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)
    assert (model(TOKENS) - plain).abs().max() > 0.01
    model.set_prefix(())
    assert torch.equal(model(TOKENS), plain) and not model.prefix


def test_generation_continues_the_prefix(model: GPT) -> None:
    settings = GenerationSettings(decode_strategy="greedy_search", max_dec_len=8)
    expected = generate(model, [[*PREFIX_TOKENS, *prompt] for prompt in PROMPTS], settings)
    assert generate(with_prefix(model), PROMPTS, settings) == expected
    beams = GenerationSettings(decode_strategy="beam_search", num_beams=3, max_dec_len=8)
    found = generate(model, PROMPTS, beams)
    model.set_prefix(())
    assert found == generate(model, [[*PREFIX_TOKENS, *prompt] for prompt in PROMPTS], beams)


def test_a_prefix_stays_float_and_survives_a_checkpoint(
    model: GPT, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    n_params = model.config.n_params
    before = [x.clone() for x in with_prefix(model).prefix]
    quantized(model)
    folder = save(model, byte_tokenizer, tmp_path / "q")
    loaded = load_checkpoint(folder).model
    assert loaded.config == model.config and loaded.config.n_params == n_params
    assert all(map(torch.equal, before, loaded.prefix)) and loaded.prefix[0].dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS), model(TOKENS))
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert written["model_type"].startswith("lathe-")
    written["lathe"]["prefix_tokens"] = [model.config.vocab_size]
    with raises(Code.MALFORMED, "prefix_tokens"):
        GPTConfig.from_json(written)


def test_every_runtime_computes_a_prefix(
    model: GPT, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    quantized(with_prefix(model))
    checkpoint = save(model, byte_tokenizer, tmp_path / "q")
    recipe = Recipe(Export=ExportSettings(prompts=6, new_tokens=12))
    folder = export(recipe, checkpoint, write_held_out(tmp_path / "data"), tmp_path / "onnx").folder
    own = OnnxModel(folder, threads=1)
    assert own.n_positions == model.config.n_positions
    limit = own.metadata["proof"]["mean_limit"]
    tokens, lengths = pad(PROMPTS)
    alone = [own.logits(np.array([[*prompt, 5]]))[:, -1] for prompt in PROMPTS]
    for name, opened in OPENERS.items():
        try:
            other = opened(own, 1)
        except UserError as error:
            assert error.code is Code.NOT_PROVED and name == "openvino" and WITHOUT_VNNI
            continue
        assert mean_difference(own, other, PROMPTS) < limit, name
        cache = other.start(3)
        other.step(cache, tokens, lengths)
        cache.permute([0, 1, 2], [1, 2, 0])
        found = other.step(cache, np.array([[5]] * 3))[[2, 0, 1]]
        assert np.abs(found - np.concatenate(alone)).mean() < limit, name


def test_a_float_export_agrees_with_torch(
    model: GPT, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    exported = write_unproven(with_prefix(model), byte_tokenizer, tmp_path)
    lengths = np.array([24, 11, 5])
    found = exported.logits(TOKENS.numpy(), lengths)
    with torch.no_grad():
        expected = model(TOKENS).numpy()
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(found[row, :length], expected[row, :length], atol=1e-4)
    assert exported.start(1).capacity == model.config.n_positions


def test_runtimes_without_the_prefix_fail(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    model = with_prefix(gpt2(tmp_path, byte_tokenizer))
    exported = write_unproven(model, byte_tokenizer, tmp_path)
    feeds = exported.feeds(TOKENS[:1].numpy(), np.array([24]), np.array([[23]]))
    session = ort.InferenceSession(tmp_path / MODEL)
    del feeds["prefix_length"]
    with pytest.raises(ValueError, match="prefix_length"):
        session.run(["logits"], feeds)
    (tmp_path / PREFIX).unlink()
    with raises(Code.NOT_FOUND, tmp_path / PREFIX):
        OnnxModel(tmp_path)
