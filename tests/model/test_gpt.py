"""The GPT against transformers' GPT2LMHeadModel, and with a cache against without."""

import itertools
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.gpt import GPT
from lathe_base.config.settings import Recipe
from tests.support.small_models import small_config


@pytest.fixture
def hf_folder(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=300, n_positions=64, n_embd=48, n_layer=3, n_head=4, initializer_range=0.2
    )
    folder = tmp_path / "hf"
    GPT2LMHeadModel(config).save_pretrained(folder)
    byte_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_logits_equal_transformers(hf_folder: Path) -> None:
    theirs = GPT2LMHeadModel.from_pretrained(hf_folder).eval()
    tokens = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        torch.testing.assert_close(
            load_checkpoint(hf_folder).model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5
        )


def test_saved_checkpoint_is_a_hf_folder(
    tmp_path: Path, small_gpt: GPT, byte_tokenizer: Tokenizer
) -> None:
    save_checkpoint(tmp_path, small_gpt, byte_tokenizer, "test", Recipe())
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    tokens = torch.arange(30)[None]
    with torch.inference_mode():
        torch.testing.assert_close(small_gpt(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_round_trip_is_bitwise_with_pruned_widths(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    model = GPT(small_config(n_head=(3, 2), n_inner=(80, 64)))
    model.initialize(0.1, seed=5)
    save_checkpoint(tmp_path, model, byte_tokenizer, "test", Recipe())
    loaded = load_checkpoint(tmp_path).model
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_n_params_counts_what_torch_holds() -> None:
    for heads, widths in itertools.product([(4, 4), (3, 1)], [(96, 96), (40, 72)]):
        config = small_config(n_head=heads, n_inner=widths)
        assert config.n_params == sum(p.numel() for p in GPT(config).parameters())


def test_cache_gives_the_logits_of_the_whole_sequence(small_gpt: GPT) -> None:
    tokens = torch.randint(384, (2, 20), generator=torch.Generator().manual_seed(1))
    cache = small_gpt.new_cache(2, 20)
    with torch.inference_mode():
        parts = [small_gpt.hidden(tokens[:, :12], cache=cache)]
        parts += [small_gpt.hidden(tokens[:, i : i + 1], cache=cache) for i in range(12, 20)]
        torch.testing.assert_close(
            small_gpt.head(torch.cat(parts, 1)), small_gpt(tokens), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
def test_recompute_gives_the_same_gradients(small_gpt: GPT, granularity: str) -> None:
    tokens = torch.arange(32).view(2, 16)

    def gradients() -> list[torch.Tensor]:
        small_gpt.zero_grad()
        small_gpt(tokens).logsumexp(-1).sum().backward()
        return [p.grad.clone() for p in small_gpt.parameters() if p.grad is not None]

    plain = gradients()
    small_gpt.set_recompute(granularity)  # type: ignore[arg-type]
    for a, b in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(a, b)
