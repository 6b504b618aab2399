"""Checkpoints with which the engines are measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export import SHAPE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lathe.data.tokens import TokenDataset
from lathe.evaluate.tasks.cloze import read_cloze
from lathe.model.checkpoint import save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.families import find_architecture
from lathe.model.folder import checkpoint_digest
from lathe.model.gpt import GPT
from lathe.train.shape import model_config
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe

SHAPES = ("gpt2-124m", "smollm2-135m", "qwen2.5-0.5b")  # recipes, except the first one
CALIBRATION = 32  # number of windows
WINDOW = 512  # maximum number of tokens
PROBE = (8, 64)  # number of windows and their length


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and files of tokens (N, T) for calibration and scoring.

    Attributes:
        heldout: text for perplexity; random tokens if the weights are random.
        cloze: pairs of a passage and its last word as tokens; absent if the weights are random.
    """

    name: str
    model: Path
    calibration: Path
    heldout: Path
    cloze: Path

    @classmethod
    def below(cls, folder: Path, name: str, model: Path | None = None) -> "Subject":
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        files = (place / name for name in ("calibration.npy", "heldout.npy", "cloze.json"))
        return cls(name, (model or place / "model").resolve(), *(f.resolve() for f in files))

    @property
    def has_random_weights(self) -> bool:
        return self.name in SHAPES

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def n_positions(self) -> int:
        family = find_architecture(self.config)
        assert family is not None
        return int(self.config[family.key("n_positions")])

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.model / "config.json").read_text())
        return config


def random_shape(folder: Path, shape: str) -> Subject:
    """Subject with random weights and random tokens."""
    config = SHAPE if shape == SHAPES[0] else model_config(load_recipe(shape), 0)
    subject = Subject.below(folder, shape)
    if not subject.heldout.exists():
        tokenizer = _tokenizer(config.vocab_size)
        save_checkpoint(subject.model, random_model(config), tokenizer, "pretrain", Recipe())
        random = np.random.default_rng(0)
        for file, sizes in ((subject.calibration, (8, 128)), (subject.heldout, PROBE)):
            np.save(file, random.integers(1, config.vocab_size, sizes))
    return subject


def random_model(config: GPTConfig) -> GPT:
    """Make a model with non-uniform attention, nonzero biases and norms other than one, so that any
    mistake of an engine shows."""
    model = GPT(config)
    model.initialize(config.n_embd**-0.5, seed=0, scale_residual=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _tokenizer(size: int) -> Tokenizer:
    """Unused tokenizer: engines get ids, but some do not load without one."""
    words = ["<|endoftext|>", *(f"t{i}" for i in range(size - 4)), "a", "b", "ab"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pretrained(
    folder: Path, model: Path, data: Path, text: Path, cloze: Path, windows: int, passages: int
) -> Subject:
    """Subject with a trained checkpoint.

    Args:
        folder: folder of all subjects.
        data: output of `lathe prepare` for the model, with training documents for calibration.
        text: text for perplexity, cut into at most `windows` windows.
        cloze: LAMBADA-format file of at least `passages` passages.
    """
    subject = Subject.below(folder, checkpoint_digest(model)[:12], model)
    length = min(WINDOW, subject.n_positions)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    heldout = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    ((_, documents), *_) = TokenDataset.open(data).parts
    seen, i = np.empty(0, np.int64), 0
    while len(seen) < CALIBRATION * length:
        seen, i = np.concatenate([seen, documents[i]]), i + 1
    for file, tokens, most in (
        (subject.calibration, seen, CALIBRATION),
        (subject.heldout, np.array(heldout), windows),
    ):
        count = min(most, len(tokens) // length)
        np.save(file, tokens[: count * length].reshape(count, length).astype(np.int64))
    examples = read_cloze(cloze, tokenizer)[:passages]
    pairs = [(e.context, e.label) for e in examples if len(e.context + e.label) <= length]
    subject.cloze.write_text(json.dumps(pairs))
    return subject
