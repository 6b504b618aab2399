import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from lathe.data.tokenizer import train_tokenizer
from lathe.evaluate.evaluate import TorchScorer
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe_base.config.settings import OfflineEvalSettings, Recipe

SENTENCES = [
    "the keeper of the light climbed the stair every night and every night he counted the steps",
    'she asked, "will you count them (all) again tomorrow?" and he said that he would',
    "a storm of 1 @,@ 200 miles broke the glass ; the lamp went out , and no ship saw the rocks",
]


@pytest.fixture(scope="session")
def prose() -> str:
    """Text of 120 words from the tokenizer's training data."""
    return " ".join(random.Random(0).choices(" ".join(SENTENCES).split(), k=120))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(SENTENCES, vocab_size=300)


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    return Recipe(Offline_Eval=OfflineEvalSettings(batch_size=3, overlapping_eval=8))


@pytest.fixture(scope="session")
def model_folder(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, recipe: Recipe
) -> Path:
    vocab_size = tokenizer.get_vocab_size()
    config = GPTConfig(vocab_size, 32, n_embd=24, head_dim=8, n_head=(3, 3), n_inner=(96, 96))
    model = GPT(config)
    model.initialize(std=0.4, seed=5)  # peaked enough for predictions to differ between tokens
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, model, tokenizer, "pretrain", recipe)
    return folder


@pytest.fixture(scope="session")
def scorer(model_folder: Path) -> TorchScorer:
    return TorchScorer(load_checkpoint(model_folder).model)


@pytest.fixture(scope="session")
def reference_logits(model_folder: Path) -> Callable[[list[int]], torch.Tensor]:
    """Function from one token sequence to the logits (T, V) of transformers' GPT-2."""
    from transformers import GPT2LMHeadModel

    reference = GPT2LMHeadModel.from_pretrained(model_folder).eval()

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return reference(torch.tensor([tokens])).logits[0]

    return logits
