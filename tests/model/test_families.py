"""All model families against transformers' classes."""

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GlmConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    Qwen2Config,
)
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lathe.model.architecture import Rope, RopeScaling
from lathe.model.block import frequencies, rotate, rotation
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig, read_config
from lathe.model.folder import checkpoint_digest
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe_base.config.settings import GenerationSettings, Recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.families import FAMILIES, LLAMA3, PATHS, POSITIONS, VOCABULARY, make, save
from tests.support.tables import quick_only

TOKENS = torch.randint(VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(3))
every_family = pytest.mark.parametrize("case", FAMILIES)
every_path = pytest.mark.parametrize("case", quick_only(FAMILIES, PATHS))


def save_family(case: str, path: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    return save(make(case, **changes), path / "hf", tokenizer)


@every_family
def test_logits_equal_transformers(case: str, tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    theirs, ours = make(case), load_checkpoint(save_family(case, tmp_path, byte_tokenizer)).model
    with torch.inference_mode():
        expected = theirs(TOKENS).logits
        assert expected.std() > 0.3
        torch.testing.assert_close(ours(TOKENS), expected, atol=1e-5, rtol=1e-5)
        cache = ours.new_cache(2, 60)
        parts = [ours.hidden(TOKENS[:, :40], cache=cache)]
        parts += [ours.hidden(TOKENS[:, i : i + 1], cache=cache) for i in range(40, 60)]
        torch.testing.assert_close(ours.head(torch.cat(parts, 1)), expected, atol=1e-5, rtol=1e-5)
    assert ours.config.n_params == sum(p.numel() for p in theirs.parameters())


@every_path
def test_documents_of_a_row_are_each_alone(
    case: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    theirs, ours = make(case), load_checkpoint(save_family(case, tmp_path, byte_tokenizer)).model
    sizes = ((1, 38, 21), (60,))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in sizes])
    with torch.inference_mode():
        found = ours.head(ours.hidden(TOKENS, positions, sum(sizes, ())))
        for row, logits, of_row in zip(TOKENS, found, sizes, strict=True):
            expected = [theirs(document[None]).logits[0] for document in row.split(of_row)]
            torch.testing.assert_close(logits, torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "padding"),
    quick_only(
        product(FAMILIES, ("left", "right")), [*zip(PATHS, 5 * ("left", "right"), strict=True)]
    ),
)
def test_padded_rows_equal_transformers(
    case: str, padding: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    theirs, ours = make(case), load_checkpoint(save_family(case, tmp_path, byte_tokenizer)).model
    own = torch.ones(2, 60, dtype=torch.bool)
    own[0, slice(0, 13) if padding == "left" else slice(47, 60)] = False
    positions = (own.cumsum(1) - 1).clamp(min=0)
    causal = torch.ones(60, 60, dtype=torch.bool).tril()
    mask = causal & own[:, None, :] | torch.eye(60, dtype=torch.bool)
    with torch.inference_mode():
        expected = theirs(TOKENS, attention_mask=own.long(), position_ids=positions).logits
        found = ours.head(ours.hidden(TOKENS, positions, mask[:, None]))
    torch.testing.assert_close(found[own], expected[own], atol=1e-5, rtol=1e-5)


@every_path
def test_greedy_and_beam_texts_equal_transformers(
    case: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    theirs = make(case)
    ours = load_checkpoint(save(theirs, tmp_path / "hf", byte_tokenizer))
    settings = GenerationSettings(decode_strategy="greedy_search", max_dec_len=12)
    prompts = [TOKENS[0, :7].tolist(), TOKENS[1, :12].tolist()]
    free = generate(ours.model, prompts, settings)
    ends = [free[0][6], free[1][9]]  # both end before the limit
    for strategy, beams in (("greedy_search", 1), ("beam_search", 3)):
        settings = GenerationSettings(
            decode_strategy=strategy, max_dec_len=12, min_dec_len=0, num_beams=max(2, beams)
        )
        found = generate(ours.model, prompts, settings, ends)
        for prompt, row in zip(prompts, found, strict=True):
            expected = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=12,
                do_sample=False,
                num_beams=beams,
                eos_token_id=ends,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            assert row == (expected[:-1] if expected[-1] in ends else expected)


@every_path
def test_transformers_reads_what_lathe_writes(
    case: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    theirs = make(case)
    loaded = load_checkpoint(save(theirs, tmp_path / "hf", byte_tokenizer))
    save_checkpoint(tmp_path / "own", loaded.model, byte_tokenizer, "test", Recipe())
    tensors, original = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("own", "hf")
    )
    assert tensors.keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in tensors.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "own").eval()
    assert type(again) is type(theirs)
    with torch.inference_mode():
        assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)
    config = load_checkpoint(tmp_path / "own").model.config
    assert config == loaded.model.config and config.is_uniform


def test_a_pruned_shape_is_read_back_bit_for_bit(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    plain = read_config(save_family("qwen3", tmp_path, byte_tokenizer))
    values = plain.to_json()
    values["lathe"] |= {"n_head": [4, 2, 3], "n_kv_head": [2, 1, 3], "n_inner": [80, 7, 64]}
    model = GPT(GPTConfig.from_json(values))
    model.initialize(0.2, seed=1)
    assert not model.config.is_uniform and model.config.to_json()["model_type"] == "lathe-qwen3"
    save_checkpoint(tmp_path / "own", model, byte_tokenizer, "prune", Recipe())
    again = load_checkpoint(tmp_path / "own").model
    assert again.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with torch.inference_mode():
        assert again(TOKENS).isfinite().all()


def test_shards_are_read_as_one_file_is(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    whole = save(make("llama"), tmp_path / "whole", byte_tokenizer)
    parts = save(make("llama"), tmp_path / "parts", byte_tokenizer, max_shard_size="80KB")
    shards = sorted(parts.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (parts / "model.safetensors").exists()
    one, many = load_checkpoint(whole), load_checkpoint(parts)
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(many.model.state_dict()[name], tensor)
    before = checkpoint_digest(parts)
    flipped = bytearray(shards[1].read_bytes())
    flipped[-1] ^= 1
    shards[1].write_bytes(flipped)
    assert checkpoint_digest(parts) != before
    shards[1].unlink()
    with raises(Code.INCOMPLETE, shards[1].name):
        load_checkpoint(parts)


@pytest.mark.parametrize("shard", ["../whole/model.safetensors", "/etc/passwd", "a.bin"])
def test_an_index_that_names_a_file_elsewhere(
    shard: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    parts = save(make("llama"), tmp_path / "parts", byte_tokenizer, max_shard_size="80KB")
    index = parts / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(values))
    with raises(Code.UNSAFE, index, shard):
        load_checkpoint(parts)


def test_bfloat16_weights_are_read(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    folder = save(make("qwen2").to(torch.bfloat16), tmp_path / "hf", byte_tokenizer)
    ours = load_checkpoint(folder).model
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(TOKENS).logits
        torch.testing.assert_close(ours(TOKENS), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [None, RopeScaling("linear", 2.5), RopeScaling("llama3", 4.0, 1.0, 4.0, 24)],
    ids=["plain", "linear", "llama3"],
)
def test_rotations_equal_transformers(scaling: RopeScaling | None) -> None:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
    if scaling and scaling.rope_type == "llama3":
        parameters = LLAMA3
    elif scaling:
        parameters = {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    positions = torch.tensor([[0, 1, 5, 400], [7, 300, 2, 90]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    found = rotation(Rope(500.0, 1.0, scaling), 16, torch.device("cpu"), range(401), positions)
    torch.testing.assert_close(found, (cos[:, None], sin[:, None]), atol=5e-5, rtol=1e-5)
    table = rotation(Rope(500.0, 1.0, scaling), 16, torch.device("cpu"), range(3, 9), None)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(3, 9)[None])
    torch.testing.assert_close(table, (cos[0], sin[0]), atol=1e-6, rtol=1e-5)


def test_a_part_of_a_head_is_rotated() -> None:
    config = GlmConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, partial_rotary_factor=0.5
    )
    positions = torch.tensor([[0, 1, 5, 400]])
    cos, sin = GlmRotaryEmbedding(config)(torch.zeros(1), positions)
    rope = Rope(config.rope_parameters["rope_theta"], 0.5)
    by = rotation(rope, 16, torch.device("cpu"), range(401), positions)
    torch.testing.assert_close(by, (cos[:, None], sin[:, None]), atol=1e-5, rtol=1e-5)
    x = torch.randn(1, 3, 4, 16)
    turned = rotate(x, by)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    pairs, before = torch.complex(turned[..., :4], turned[..., 4:8]), x
    expected = torch.complex(before[..., :4], before[..., 4:8]) * torch.polar(
        torch.ones(4, 4), positions[0, :, None] * frequencies(rope, 16)
    )
    torch.testing.assert_close(pairs, expected, atol=1e-5, rtol=1e-5)


REFUSED = {
    "mixtral": ("llama", {"model_type": "mixtral"}, Code.UNSUPPORTED, "model_type is 'mixtral'"),
    "experts": ("qwen3", {"num_experts": 8}, Code.UNSUPPORTED, "num_experts is 8"),
    "local experts": (
        "llama",
        {"num_local_experts": 8},
        Code.UNSUPPORTED,
        "num_local_experts is 8",
    ),
    "no window": ("mistral", {"sliding_window": 0}, Code.MALFORMED, "sliding_window"),
    "chunks": (
        "qwen3",
        {"layer_types": ["chunked_attention", "full_attention", "full_attention"]},
        Code.UNSUPPORTED,
        "layer_types has 'chunked_attention'",
    ),
    "too few layers": (
        "gemma3",
        {"layer_types": ["full_attention"]},
        Code.MALFORMED,
        "layer_types",
    ),
    "local layers without a window": (
        "gemma3",
        {"sliding_window": None},
        Code.MISMATCH,
        "layer_types has 'sliding_attention'",
    ),
    "both ways": (
        "gemma3",
        {"use_bidirectional_attention": True},
        Code.UNSUPPORTED,
        "use_bidirectional_attention is True",
    ),
    "gemma softcap": (
        "gemma3",
        {"final_logit_softcapping": 30.0},
        Code.UNSUPPORTED,
        "softcapping is 30.0",
    ),
    "gemma activation": (
        "gemma3",
        {"hidden_activation": "gelu"},
        Code.UNSUPPORTED,
        "hidden_activation is 'gelu'",
    ),
    "linear attention": (
        "llama",
        {"model_type": "qwen3_5_text"},
        Code.UNSUPPORTED,
        "Gated DeltaNet",
    ),
    "norms behind": (
        "opt",
        {"do_layer_norm_before": False},
        Code.UNSUPPORTED,
        "do_layer_norm_before is False",
    ),
    "projected embeddings": (
        "opt",
        {"word_embed_proj_dim": 16},
        Code.UNSUPPORTED,
        "word_embed_proj_dim is 16",
    ),
    "no biases": ("opt", {"enable_bias": False}, Code.UNSUPPORTED, "enable_bias is False"),
    "starcoder2 activation": (
        "starcoder2",
        {"hidden_act": "relu"},
        Code.UNSUPPORTED,
        "hidden_act is 'relu'",
    ),
    "half rotated": (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        Code.UNSUPPORTED,
        "partial_rotary_factor is 0.5",
    ),
    "layer types": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        Code.MISMATCH,
        "layer_types has 'sliding_attention'",
    ),
    "images": (
        "llama",
        {"vision_config": {"depth": 2}},
        Code.UNSUPPORTED,
        "vision_config is {'depth': 2}",
    ),
    "ntk": (
        "llama",
        {"rope_scaling": {"type": "ntk", "factor": 4.0}},
        Code.UNSUPPORTED,
        "rope_type is 'ntk'",
    ),
    "longrope": (
        "llama",
        {"rope_parameters": {"rope_type": "longrope"}},
        Code.MALFORMED,
        "short_factor",
    ),
    "yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1.0}},
        Code.MALFORMED,
        "beta_fast",
    ),
    "ropes of layers": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        Code.UNSUPPORTED,
        "rope_parameters",
    ),
    "activation": ("llama", {"hidden_act": "gelu"}, Code.UNSUPPORTED, "hidden_act is 'gelu'"),
    "quantized": (
        "llama",
        {"quantization_config": {"bits": 4}},
        Code.UNSUPPORTED,
        "quantization_config",
    ),
    "pretraining tp": ("llama", {"pretraining_tp": 2}, Code.UNSUPPORTED, "pretraining_tp is 2"),
    "softcap": (
        "llama",
        {"attn_logit_softcapping": 50.0},
        Code.UNSUPPORTED,
        "attn_logit_softcapping is 50.0",
    ),
    "no size": ("llama", {"hidden_size": None}, Code.MALFORMED, "hidden_size"),
    "groups": (
        "llama",
        {"num_key_value_heads": 3},
        Code.MALFORMED,
        "4 query heads cannot share 3 key-value",
    ),
    "other weights": (
        "llama",
        {"intermediate_size": 96},
        Code.MISMATCH,
        "gate_proj.weight: (80, 48)",
    ),
    "theta": ("llama", {"rope_parameters": {"rope_theta": -1.0}}, Code.MALFORMED, "rope_theta"),
    "end": ("llama", {"eos_token_id": "</s>"}, Code.MALFORMED, "eos_token_id"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_computations_are_rejected(
    name: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    case, changes, code, text = REFUSED[name]
    folder = save_family(case, tmp_path, byte_tokenizer)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    if name != "other weights":  # others are rejected before weights are read
        (folder / "model.safetensors").write_bytes(b"")
    with raises(code, text):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("case", "key"),
    [
        *(("llama", key) for key in ("intermediate_size", "rms_norm_eps", "rope_parameters")),
        *(("mistral", key) for key in ("num_key_value_heads", "intermediate_size", "head_dim")),
        *(("qwen2", key) for key in ("num_key_value_heads", "intermediate_size")),
        *(("qwen3", key) for key in ("num_key_value_heads", "head_dim", "attention_bias")),
        *((case, "tie_word_embeddings") for case in ("llama", "qwen2")),
    ],
)
def test_an_absent_key_means_what_transformers_takes(case: str, key: str) -> None:
    values = make(case, num_attention_heads=32, hidden_size=64, head_dim=2).config.to_dict()
    del values[key]
    theirs = AutoConfig.for_model(**values)
    own = GPTConfig.from_json(values)
    shape = own.n_kv_head[0], own.n_inner[0], own.head_dim, own.layer_norm_epsilon
    head_dim = getattr(theirs, "head_dim", None) or 64 // 32
    wanted = theirs.num_key_value_heads, theirs.intermediate_size, head_dim, theirs.rms_norm_eps
    assert shape == wanted
    assert own.rope == Rope(theirs.rope_parameters["rope_theta"])
    assert own.tie_word_embeddings == theirs.tie_word_embeddings
    assert bool(own.biases) == bool(getattr(theirs, "attention_bias", False))


def test_a_window_matters_only_to_texts_that_are_longer(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    folder = save_family("mistral", tmp_path, byte_tokenizer)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    with torch.inference_mode():
        expected = load_checkpoint(folder).model(TOKENS)
        for idle in ({"sliding_window": POSITIONS}, {}):  # default: 4,096
            del values["sliding_window"]
            path.write_text(json.dumps(values | idle))
            torch.testing.assert_close(load_checkpoint(folder).model(TOKENS), expected)
            values["sliding_window"] = None
    del values["sliding_window"]
    path.write_text(json.dumps(values))
    assert {kind.window for kind in read_config(folder).kinds} == {4096}


@pytest.mark.parametrize("case", ["qwen2", "gpt2"])
def test_a_tied_head_may_be_there_twice_but_not_be_another_matrix(
    case: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    if case == "gpt2":
        shape = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
        theirs: Any = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape)).eval()
    else:
        theirs = make(case)
    folder = save(theirs, tmp_path / "hf", byte_tokenizer)
    with torch.inference_mode():
        expected = theirs(TOKENS).logits
    path = folder / "model.safetensors"
    tensors = load_file(path)
    table = theirs.get_input_embeddings().weight.detach()
    save_file(tensors | {"lm_head.weight": table.clone()}, path, {"format": "pt"})
    with torch.inference_mode():
        torch.testing.assert_close(load_checkpoint(folder).model(TOKENS), expected)
    save_file(tensors | {"lm_head.weight": table + 0.1}, path, {"format": "pt"})
    with raises(Code.MISMATCH, "lm_head.weight"):
        load_checkpoint(folder)


def test_a_model_that_rotates_half_a_head_is_not_written_as_transformers_llama(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    plain = read_config(save_family("llama", tmp_path, byte_tokenizer))
    half = replace(plain, rope=Rope(10_000.0, 0.5))
    values = half.to_json()
    assert values["model_type"] == "lathe-llama"
    assert GPTConfig.from_json(values) == half


def test_the_keys_of_earlier_versions_of_transformers_are_read(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    folder = save_family("llama with biases, tied, llama3", tmp_path, byte_tokenizer)
    new = read_config(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    form = values.pop("rope_parameters")
    values["rope_theta"] = form.pop("rope_theta")
    path.write_text(json.dumps(values | {"rope_scaling": form}))
    assert read_config(folder) == new
    assert new.rope == Rope(500.0, 1.0, RopeScaling("llama3", 4.0, 1.0, 4.0, 24))


def test_a_text_ends_where_the_generation_config_says(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    folder = save_family("llama", tmp_path, byte_tokenizer, eos_token_id=7)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert load_checkpoint(folder).end_ids == (256, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 256, 11]}')
    loaded = load_checkpoint(folder)
    assert loaded.end_ids == (256, 9, 11)
    save_checkpoint(tmp_path / "own", loaded.model, byte_tokenizer, "test", Recipe())
    assert load_checkpoint(tmp_path / "own").end_ids == (256, 9, 11)
    assert AutoConfig.from_pretrained(tmp_path / "own").eos_token_id == [9, 256, 11]


SHAPES = {
    "smollm2-135m": (
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        ),
        134_515_008,
    ),
    "qwen2.5-0.5b": (
        Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        ),
        494_032_768,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_true_shapes_equal_transformers(
    name: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    config, parameters = SHAPES[name]
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    ours = load_checkpoint(save(theirs, tmp_path / "hf", byte_tokenizer)).model
    assert ours.config.n_params == parameters
    with torch.inference_mode():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)
    os.remove(tmp_path / "hf" / "model.safetensors")
