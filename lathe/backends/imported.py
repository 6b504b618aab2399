"""Writes what is imported from another framework's GPT-2 as a checkpoint folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import save_file

from lathe.data.tokenizer import load_tokenizer
from lathe.model.config import GPTConfig
from lathe.model.families import GPT2
from lathe.model.folder import require_vocabulary, write_folder
from lathe_base.artifacts.kinds import CHECKPOINT
from lathe_base.config.settings import Recipe
from lathe_base.storage import atomic_folder


def write_imported(
    output: Path,
    weights: Mapping[str, NDArray[Any]],
    config: GPTConfig,
    tokenizer: Path,
    recipe: Recipe,
    engine: str,
) -> None:
    """Write a checkpoint folder with these float32 weights, under Hugging Face's names.

    Args:
        tokenizer: `tokenizer.json`, or a folder with GPT-2's BPE.
        engine: the framework that they come from.

    Raises:
        UserError: the tokenizer has more ids than the model.
    """
    vocabulary = load_tokenizer(tokenizer)
    hint = "give the tokenizer that the model was trained with"
    require_vocabulary(vocabulary, config, tokenizer, hint)

    def write_weights(file: Path) -> None:
        save_file({GPT2.prefix + name: a for name, a in weights.items()}, file, {"format": "pt"})

    with atomic_folder(output, CHECKPOINT) as work:
        write_folder(work, write_weights, config, vocabulary, "import", recipe, engine=engine)
