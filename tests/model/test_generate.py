"""Generation against transformers' `generate`."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, GPT2LMHeadModel

from lathe.errors import UserError
from lathe.model.checkpoint import save_checkpoint
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe.settings import GenerationSettings, Recipe

PROMPTS = [[5, 9, 200, 31], [7], [100, 101, 102, 103, 104, 105, 106, 107]]


@pytest.fixture
def hf_model(tmp_path: Path, small_gpt: GPT, byte_tokenizer: Tokenizer) -> GPT2LMHeadModel:
    save_checkpoint(tmp_path, small_gpt, byte_tokenizer, "test", Recipe())
    return GPT2LMHeadModel.from_pretrained(tmp_path).eval()


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_greedy_equals_transformers_token_for_token(
    small_gpt: GPT, hf_model: GPT2LMHeadModel, penalty: float
) -> None:
    settings = GenerationSettings(
        decode_strategy="greedy_search", max_dec_len=24, repetition_penalty=penalty
    )
    ours = generate(small_gpt, PROMPTS, settings)
    for prompt, row in zip(PROMPTS, ours, strict=True):
        config = GenerationConfig(
            max_new_tokens=24, do_sample=False, repetition_penalty=penalty, pad_token_id=0
        )
        theirs = hf_model.generate(torch.tensor([prompt]), generation_config=config)
        assert row == theirs[0, len(prompt) :].tolist()


def test_eos_ends_a_row_and_min_dec_len_holds_it_off(small_gpt: GPT) -> None:
    greedy = {"decode_strategy": "greedy_search", "max_dec_len": 10}
    free = generate(small_gpt, PROMPTS[:1], GenerationSettings(**greedy))[0]
    eos = free[3]
    first = free.index(eos)
    ended = generate(small_gpt, PROMPTS[:1], GenerationSettings(**greedy, min_dec_len=0), eos)[0]
    assert ended == free[:first]
    held = generate(small_gpt, PROMPTS[:1], GenerationSettings(**greedy, min_dec_len=8), eos)[0]
    assert len(held) >= 8 and eos not in held[:8]


def test_sampling_repeats_with_its_seed_and_stays_within_top_k(small_gpt: GPT) -> None:
    settings = GenerationSettings(top_k=1, top_p=1.0, max_dec_len=12, num_return_sequences=2)
    greedy = GenerationSettings(decode_strategy="greedy_search", max_dec_len=12)
    only = generate(small_gpt, PROMPTS, greedy)
    assert generate(small_gpt, PROMPTS, settings, seed=4) == [r for r in only for _ in range(2)]
    wide = GenerationSettings(top_k=0, top_p=1.0, temperature=3.0, max_dec_len=12)
    assert generate(small_gpt, PROMPTS, wide, seed=1) == generate(small_gpt, PROMPTS, wide, seed=1)
    assert generate(small_gpt, PROMPTS, wide, seed=1) != generate(small_gpt, PROMPTS, wide, seed=2)


def test_a_prompt_without_room_is_refused(small_gpt: GPT) -> None:
    with pytest.raises(UserError, match="64 positions"):
        generate(small_gpt, [[1] * 60], GenerationSettings(max_dec_len=10))
