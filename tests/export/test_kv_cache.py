"""Models whose keys and values are cached in INT8."""

import json
from pathlib import Path

import numpy as np
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
from lathe_base.errors import Code
from lathe_serving.runtime.open_model import open_model
from lathe_serving.runtime.session import OnnxModel
from tests.support.errors import raises
from tests.support.massive import gpt2, llama
from tests.support.small_export import save, write_held_out

TOKENS = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(3))
PROMPTS = [TOKENS[0, :9].tolist(), TOKENS[1, :2].tolist(), TOKENS[2, :5].tolist()]


@pytest.fixture(
    params=[(gpt2, ()), (llama, ()), (llama, (7, 130))], ids=["gpt2", "llama", "prefix"]
)
def model(request: pytest.FixtureRequest, tmp_path: Path, byte_tokenizer: Tokenizer) -> GPT:
    make, prefix = request.param
    found: GPT = make(tmp_path, byte_tokenizer)
    found.set_prefix(prefix)
    plan = QuantizationPlan(
        {name: LinearFormat(activation=None) for name in (*found.config.linear_names(), HEAD)},
        cache_scales=dict.fromkeys(found.config.cached_parts(), 0.0),
    )
    fake_quant.insert(found, plan)
    scales = fake_quant.calibrate(found, [TOKENS])
    found.config = found.config.with_quantization(plan.with_scales(scales))
    return found.eval()


def test_a_scale_is_the_mean_of_the_largest_keys_of_texts(model: GPT) -> None:
    """The rotated keys, as they are cached."""
    plan = model.config.quantization
    assert plan is not None
    plain = fake_quant.without_quantization(model)
    largest = []
    for text in TOKENS:
        with fake_quant.inserted(plain, QuantizationPlan(plan.linears)), torch.no_grad():
            cache = plain.new_cache(1, len(text))
            plain.hidden(text[None], cache=cache)
            largest.append(float(cache.keys[0][:, :, model.config.n_prefix :].abs().max()))
    key = model.config.cached_parts()[0]
    # With a prefix, its keys count as well.
    least = float(np.mean(largest)) / 127
    assert plan.cache_scales[key] >= least * 0.999
    if not model.config.n_prefix:
        assert plan.cache_scales[key] == pytest.approx(least, rel=1e-4)


@torch.no_grad()
def test_cached_keys_and_values_are_integers_times_their_scale(model: GPT) -> None:
    cache = model.new_cache(1, 24)
    model.hidden(TOKENS[:1], cache=cache)
    plan = model.config.quantization
    assert plan is not None
    for layer in range(model.config.n_layer):
        names = model.config.architecture.cached_parts(layer)
        for name, found in zip(names, (cache.keys[layer], cache.values[layer]), strict=True):
            integers = found / plan.cache_scales[name]
            torch.testing.assert_close(integers, integers.round(), atol=1e-3, rtol=0)
            assert integers.abs().max() > 40
    # Text read at once is computed with the same keys as token by token.
    whole = model(TOKENS[:1])
    step = model.new_cache(1, 24)
    parts = [model.head(model.hidden(TOKENS[:1, i : i + 1], cache=step)) for i in range(24)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=0.05, rtol=0.05)
    plain = fake_quant.without_quantization(model)
    assert not torch.equal(plain(TOKENS), model(TOKENS))


def test_the_scales_survive_a_checkpoint(
    model: GPT, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    folder = save(model, byte_tokenizer, tmp_path / "q")
    loaded = load_checkpoint(folder).model
    assert loaded.config == model.config
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS), model(TOKENS))
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    scales = written["lathe"]["quantization"]["cache_scales"]
    name, scale = scales.popitem()
    with raises(Code.MALFORMED, f"lacks {name}"):
        GPTConfig.from_json(written)
    scales |= {name: scale, "h.9.attn.cached_key": 1.0}
    with raises(Code.MALFORMED, "h.9.attn.cached_key"):
        GPTConfig.from_json(written)


def test_an_export_caches_what_torch_caches(
    model: GPT, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    checkpoint = save(model, byte_tokenizer, tmp_path / "q")
    recipe = Recipe(Export=ExportSettings(prompts=6, new_tokens=12))
    folder = export(recipe, checkpoint, write_held_out(tmp_path / "data"), tmp_path / "onnx").folder
    exported, plan = OnnxModel(folder, threads=1), model.config.quantization
    assert plan is not None
    cache = exported.start(1, 24)
    exported.step(cache, TOKENS[:1].numpy())
    assert {buffer.dtype for buffer in cache.buffers} == {np.dtype(np.int8)}
    expected = model.new_cache(1, 24)
    with torch.no_grad():
        model.hidden(TOKENS[:1], cache=expected)
    names = model.config.cached_parts()
    parts = zip((*names[::2], *names[1::2]), (*expected.keys, *expected.values), strict=True)
    wanted = [(cached / plan.cache_scales[name]).round() for name, cached in parts]
    for found, integers in zip(cache.buffers, wanted, strict=True):
        size = integers.shape[-1]  # a padded head ends in zeros
        apart = np.abs(found[..., : integers.shape[2], :size] - integers.numpy())
        # On the edge between two levels either is right; later layers differ more.
        assert apart.max() <= 3 and (apart > 0).mean() < 0.1
    settings = GenerationSettings(decode_strategy="greedy_search", max_dec_len=8)
    assert exported.greedy(PROMPTS, 8, stop_at_eos=False) == generate(model, PROMPTS, settings)
    with raises(Code.UNSUPPORTED, "OpenVINO"):
        open_model(folder, 1, "openvino")
