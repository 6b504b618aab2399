"""Generation against transformers' `generate` and logits processors, token by token."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, GPT2LMHeadModel
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from typer.testing import CliRunner

from lathe.cli import app
from lathe.data.tokenizer import continuation
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.generate import filtered, generate
from lathe.model.gpt import GPT
from lathe_base.artifacts.sampling import SamplingDefaults
from lathe_base.config.settings import GenerationSettings, Recipe
from lathe_base.errors import Code
from lathe_base.progress import Bar
from lathe_serving.runtime.text import encode_prompts
from tests.support.errors import raises
from tests.support.small_models import small_config
from tests.support.tables import quick_only

PROMPTS = [[5, 9, 200, 31], [7], [100, 101, 102, 103, 104, 105, 106, 107]]
PAD, EOS = 1, 2
HF_NAMES = {"min_dec_len": "min_new_tokens", "max_dec_len": "max_new_tokens"}

Make = Callable[[int], tuple[GPT, GPT2LMHeadModel]]


@pytest.fixture
def make(tmp_path: Path, byte_tokenizer: Tokenizer) -> Make:
    """Factory of random GPTs that often generate EOS, with the same model in transformers."""

    def made(seed: int) -> tuple[GPT, GPT2LMHeadModel]:
        model = GPT(small_config())
        model.initialize(0.2, seed)
        model.wte.weight.data[EOS] *= 2.5
        save_checkpoint(tmp_path, model, byte_tokenizer, "test", Recipe())
        return model.eval(), GPT2LMHeadModel.from_pretrained(tmp_path).eval()

    return made


def theirs(
    model: GPT2LMHeadModel, settings: dict[str, Any], eos: int | None = None, seed: int = 0
) -> list[list[int]]:
    """New ids from transformers' `generate` on PROMPTS as one left-padded batch."""
    longest = max(map(len, PROMPTS))
    padded = torch.tensor([[PAD] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    strategy = settings["decode_strategy"]
    values = {HF_NAMES.get(k, k): v for k, v in settings.items() if k != "decode_strategy"}
    config = GenerationConfig(
        **values, do_sample=strategy == "sampling", pad_token_id=PAD, eos_token_id=eos
    )
    torch.manual_seed(seed)
    out = model.generate(padded, attention_mask=mask, generation_config=config)
    rows = [row[longest:].tolist() for row in out]
    return [row[: row.index(eos)] if eos in row else row for row in rows]


def ours(
    model: GPT, settings: dict[str, Any], eos: int | None = None, seed: int = 0
) -> list[list[int]]:
    return generate(model, PROMPTS, GenerationSettings(**settings), eos, seed)


@pytest.mark.parametrize("seed", quick_only(range(4), (0, 1)))
@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_greedy_search_equals_transformers(make: Make, seed: int, penalty: float) -> None:
    model, hf_model = make(seed)
    settings = {"decode_strategy": "greedy_search", "max_dec_len": 24, "min_dec_len": 3}
    settings["repetition_penalty"] = penalty
    free = ours(model, settings)
    assert free == theirs(hf_model, settings)
    ended = ours(model, settings, EOS)
    assert ended == theirs(hf_model, settings, EOS)
    assert 3 <= min(map(len, ended)) < 24


@pytest.mark.parametrize("seed", quick_only(range(4), (0,)))
@pytest.mark.parametrize(
    "extra",
    [
        {"num_beams": 2, "num_return_sequences": 1},
        {"num_beams": 4, "num_return_sequences": 4},
        {"num_beams": 5, "num_return_sequences": 3, "length_penalty": 2.0},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": -1.0},
        {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0, "min_dec_len": 6},
        {"num_beams": 4, "num_return_sequences": 4, "repetition_penalty": 1.4},
    ],
    ids=str,
)
def test_beam_search_equals_transformers(make: Make, seed: int, extra: dict[str, Any]) -> None:
    model, hf_model = make(seed)
    settings = {"decode_strategy": "beam_search", "max_dec_len": 20, "min_dec_len": 0, **extra}
    free = ours(model, settings)
    assert free == theirs(hf_model, settings)
    assert len(free) == len(PROMPTS) * extra["num_return_sequences"]
    ended = ours(model, settings, EOS)
    assert ended == theirs(hf_model, settings, EOS)
    assert min(map(len, ended)) < 20


def test_a_beam_stays_with_its_own_past(make: Make) -> None:
    """Log-probabilities of the results, computed without a cache, decrease with rank."""
    model, _ = make(0)
    settings = {"decode_strategy": "beam_search", "num_return_sequences": 4, "max_dec_len": 12}
    rows = ours(model, settings)
    for i, prompt in enumerate(PROMPTS):
        totals = []
        for row in rows[4 * i : 4 * i + 4]:
            with torch.inference_mode():
                logprobs = model(torch.tensor([prompt + row]))[0].log_softmax(-1)
            positions = range(len(prompt) - 1, len(prompt) + len(row) - 1)
            totals.append(sum(float(logprobs[p, t]) for p, t in zip(positions, row, strict=True)))
        assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("seed", quick_only(range(3), (0,)))
@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 0, "top_p": 1.0},
        {"top_k": 20, "top_p": 0.9, "temperature": 1.5, "num_return_sequences": 3},
        {"top_k": 50, "top_p": 0.75, "temperature": 0.7, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_sampling_equals_transformers(make: Make, seed: int, extra: dict[str, Any]) -> None:
    """Both sample with torch.multinomial, so equal distributions give equal tokens."""
    model, hf_model = make(seed)
    settings = {"decode_strategy": "sampling", "max_dec_len": 16, "min_dec_len": 2, **extra}
    sampled = ours(model, settings, EOS, seed)
    assert sampled == theirs(hf_model, settings, EOS, seed)
    assert sampled != ours(model, settings, EOS, seed + 1)
    assert 2 <= min(map(len, sampled)) < 16


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 50, 0.75), (0.5, 5, 0.9), (2.0, 0, 0.3), (1.3, 1000, 0.999), (1.0, 1, 1.0)],
)
def test_filters_are_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(64, 384, generator=torch.Generator().manual_seed(0))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    settings = GenerationSettings(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = warpers(torch.zeros(64, 1, dtype=torch.long), logits)
    torch.testing.assert_close(filtered(logits, settings), expected)


def test_draws_follow_the_filtered_distribution(make: Make) -> None:
    model, _ = make(0)
    settings = GenerationSettings(
        top_k=6, top_p=0.95, temperature=1.5, max_dec_len=1, num_return_sequences=4000
    )
    drawn = torch.tensor(generate(model, PROMPTS[:1], settings)).flatten().bincount(minlength=384)
    with torch.inference_mode():
        wanted = filtered(model(torch.tensor(PROMPTS[:1]))[:, -1], settings).softmax(-1)[0]
    assert 1 < int((wanted > 0).sum()) <= 6
    error = (wanted * (1 - wanted) / 4000).sqrt()  # standard error of a proportion
    assert ((drawn / 4000 - wanted).abs() <= 4 * error).all()


@pytest.mark.parametrize("strategy", ["sampling", "greedy_search", "beam_search"])
def test_progress_comes_to_its_end(small_gpt: GPT, strategy: str) -> None:
    settings = {"decode_strategy": strategy, "max_dec_len": 9, "min_dec_len": 0}
    for eos in (None, ours(small_gpt, settings)[0][2]):
        progress = Bar("generate", 9, None)
        generate(small_gpt, PROMPTS, GenerationSettings(**settings), eos, progress=progress)
        assert progress.done == 9


@pytest.mark.parametrize(
    ("prompts", "settings", "code", "texts"),
    [
        (
            PROMPTS,
            {"decode_strategy": "greedy_search", "num_return_sequences": 2},
            Code.CONFLICTING_OPTIONS,
            ["greedy_search"],
        ),
        (
            PROMPTS,
            {"decode_strategy": "beam_search", "num_return_sequences": 5},
            Code.CONFLICTING_OPTIONS,
            ["num_return_sequences 5", "num_beams 4", "Generation.num_beams to 5"],
        ),
        ([[1], []], {}, Code.INVALID_VALUE, ["prompt 2"]),
        (
            [[1], [1] * 60],
            {},
            Code.TOO_LONG,
            ["prompt 2 of 60 tokens", "64 positions", "max_dec_len to 4"],
        ),
        ([[1] * 64], {}, Code.TOO_LONG, ["fewer than 64 tokens"]),
    ],
)
def test_refusals(
    small_gpt: GPT,
    prompts: list[list[int]],
    settings: dict[str, Any],
    code: Code,
    texts: list[str],
) -> None:
    with raises(code, *texts):
        generate(small_gpt, prompts, GenerationSettings(max_dec_len=10, **settings))


@pytest.mark.parametrize(
    ("stated", "greedy"),
    [([], True), (["decode_strategy=sampling"], False), (["temperature=0.9"], False)],
)
def test_the_models_own_sampling_is_used_where_the_recipe_sets_none(
    tmp_path: Path, byte_tokenizer: Tokenizer, stated: list[str], greedy: bool
) -> None:
    model = GPT(replace(small_config(), sampling=SamplingDefaults(do_sample=False)))
    model.initialize(0.2, seed=3)
    save_checkpoint(tmp_path, model, byte_tokenizer, "test", Recipe())
    settings = [f"Generation.{pair}" for pair in (*stated, "max_dec_len=12")]
    overrides = [word for setting in settings for word in ("-o", setting)]
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "The day", *overrides])
    assert done.exit_code == 0, done.output
    best = GenerationSettings(  # the recipe `tiny` sets the penalty
        decode_strategy="greedy_search", max_dec_len=12, repetition_penalty=1.2
    )
    prompt = encode_prompts(byte_tokenizer, ["The day"])
    ids = generate(model, prompt, best, load_checkpoint(tmp_path).end_ids)[0]
    text = "The day" + continuation(byte_tokenizer, prompt[0], ids)
    assert (done.stdout == f"{text}\n") == greedy
