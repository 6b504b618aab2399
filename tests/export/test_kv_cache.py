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
        kv_cache_bits=8,
    )
    fake_quant.insert(found, plan)
    fake_quant.calibrate(found, [TOKENS])
    found.config = found.config.with_quantization(plan)
    return found.eval()


def scales(model: GPT) -> list[torch.Tensor]:
    """Scales (G, 1, D) of the keys of the first layer, of its values, of the keys of the second."""
    return [scale[:, None] for scale in fake_quant.cache_scales(model).values()]


@torch.no_grad()
def test_scales_are_those_of_the_largest_keys_and_values(model: GPT) -> None:
    plan = model.config.quantization
    assert plan is not None
    plain = fake_quant.without_quantization(model)
    rope, head_dim = model.config.rope, model.config.head_dim
    with fake_quant.inserted(plain, QuantizationPlan(plan.linears)):
        cache = plain.new_cache(len(TOKENS), TOKENS.shape[1])
        plain.hidden(TOKENS, cache=cache)
    largest = cache.values[0].abs().amax((0, 2))
    torch.testing.assert_close(scales(model)[1][:, 0], 1.25 * largest / 127)
    keys = cache.keys[0]
    if rope is None:
        largest = 1.25 * keys.abs().amax((0, 2))
    else:  # rotary positions turn i and i + D / 2 together
        norms = keys.unflatten(-1, (2, head_dim // 2)).square().sum(-2).sqrt().amax((0, 2))
        largest = torch.cat((norms, norms), -1)
    torch.testing.assert_close(scales(model)[0][:, 0], largest / 127)


@torch.no_grad()
def test_keys_far_into_a_text_are_in_the_range_of_its_beginning(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    """One token many times: every key is the first one, turned on."""
    model = llama(tmp_path, byte_tokenizer)
    plan = QuantizationPlan(kv_cache_bits=8)
    fake_quant.insert(model, plan)
    fake_quant.calibrate(model, [torch.full((1, 2), 7)])
    key = model.get_submodule(model.config.cached_parts()[0])
    assert isinstance(key, fake_quant.CacheRounding)
    plain = fake_quant.without_quantization(model)
    cache = plain.new_cache(1, 48)
    plain.hidden(torch.full((1, 48), 7), cache=cache)
    within = cache.keys[0] / key.scale[:, None]
    assert 120 < within.abs().max() <= 127.01
    # In the channel that turns slowest it is not: that is why channels have their pair's range.
    grown = cache.keys[0].abs().amax(2) / cache.keys[0][:, :, :2].abs().amax(2)
    assert grown.max() > 1.5


@torch.no_grad()
def test_cached_keys_and_values_are_integers_times_their_scale(model: GPT) -> None:
    cache = model.new_cache(1, 24)
    model.hidden(TOKENS[:1], cache=cache)
    cached = [x for keys_values in zip(cache.keys, cache.values, strict=True) for x in keys_values]
    for found, scale in zip(cached, scales(model), strict=True):
        integers = found / scale
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
    assert written["lathe"]["quantization"]["kv_cache_bits"] == 8
    first = model.config.cached_parts()[0]
    lacking = fake_quant.without_quantization(model)
    lacking.config = model.config
    with raises(Code.MISMATCH, f"{first}.scale: absent"):
        load_checkpoint(save(lacking, byte_tokenizer, tmp_path / "lacking"))
    scales(model)[0][0] = 0
    with raises(Code.MALFORMED, f"{first}.scale is not positive"):
        load_checkpoint(save(model, byte_tokenizer, tmp_path / "zero"))


def test_an_export_caches_what_torch_caches(
    model: GPT, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    checkpoint = save(model, byte_tokenizer, tmp_path / "q")
    recipe = Recipe(Export=ExportSettings(prompts=6, new_tokens=12))
    folder = export(recipe, checkpoint, write_held_out(tmp_path / "data"), tmp_path / "onnx").folder
    exported = OnnxModel(folder, threads=1)
    cache = exported.start(1, 24)
    exported.step(cache, TOKENS[:1].numpy())
    assert {buffer.dtype for buffer in cache.buffers} == {np.dtype(np.int8)}
    expected = model.new_cache(1, 24)
    with torch.no_grad():
        model.hidden(TOKENS[:1], cache=expected)
    of_parts = scales(model)
    parts = zip((*of_parts[::2], *of_parts[1::2]), (*expected.keys, *expected.values), strict=True)
    wanted = [(cached / scale).round() for scale, cached in parts]
    for found, integers in zip(cache.buffers, wanted, strict=True):
        size = integers.shape[-1]  # a padded head ends in zeros
        apart = np.abs(found[..., : integers.shape[2], :size] - integers.numpy())
        # On the edge between two levels either is right; later layers differ more.
        assert apart.max() <= 3 and (apart > 0).mean() < 0.1
    settings = GenerationSettings(decode_strategy="greedy_search", max_dec_len=8)
    assert exported.greedy(PROMPTS, 8, stop_at_eos=False) == generate(model, PROMPTS, settings)
    with raises(Code.UNSUPPORTED, "OpenVINO"):
        open_model(folder, 1, "openvino")
