"""A small model with a chat template, and conversations."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lathe.model.checkpoint import save_checkpoint
from lathe.model.families import ARCHITECTURES
from lathe.model.gpt import GPT
from lathe_base.config.settings import Recipe
from tests.support.small_models import small_config

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def write_model(folder: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    """A model with random weights, of the family `family`."""
    changes["architecture"] = ARCHITECTURES[changes.pop("family")]
    model = GPT(small_config(vocab_size=260, **changes).with_chat_template(TEMPLATE))
    model.initialize(0.2, seed=1)
    save_checkpoint(folder, model, tokenizer, "pretrain", Recipe())
    return folder


def write_conversations(path: Path, count: int = 300, longest: int = 15) -> Path:
    """JSON lines with questions and answers of up to `longest` letters."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            ask, answer = (
                "".join(draw.choice("abcd ef") for _ in range(draw.randint(1, longest)))
                for _ in range(2)
            )
            print(json.dumps({"prompt": f"{ask}?", "completion": f"{answer}."}), file=file)
    return path
