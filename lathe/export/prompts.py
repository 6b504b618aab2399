"""The prompts for verifying an export: excerpts of the held-out text."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lathe.data.tokens import read_data_metadata
from lathe_base.config.settings import ExportSettings
from lathe_base.errors import Code, UserError
from lathe_base.inputs import read_text
from lathe_serving.runtime.text import bos_ids

HELD_OUT = "heldout.txt"
HELD_OUT_CHARACTERS = 1_000_000  # enough prompts, however large the file is
MAX_PROMPT_TOKENS = 64
MIN_PROMPT_TOKENS = 4


def proof_prompts(
    tokenizer: Tokenizer, data: Path, settings: ExportSettings, n_positions: int
) -> tuple[list[list[int]], int]:
    """The prompts for verification, and the number of tokens to continue each by."""
    new_tokens, longest = shares(settings, n_positions)
    return held_out_prompts(tokenizer, data, settings.prompts, longest), new_tokens


def shares(settings: ExportSettings, n_positions: int) -> tuple[int, int]:
    """Number of tokens to generate, and number left for the prompt."""
    new_tokens = min(settings.new_tokens, n_positions // 2)
    return new_tokens, n_positions - new_tokens


def held_out_prompts(tokenizer: Tokenizer, data: Path, n: int, longest: int) -> list[list[int]]:
    """`n` excerpts of the held-out text, of 4 to `min(64, longest)` tokens, each of which begins
    with the token that the tokenizer prepends to a text, if it does.

    Raises:
        UserError: `data` is not the output of prepare, or has too little held-out text; prompts
            shorter than 2 tokens, of which none is predicted.
    """
    read_data_metadata(data)
    path = data / HELD_OUT
    if not path.exists():
        raise UserError(
            f"{path}: no such file", "give the folder written by `lathe prepare`", Code.NOT_FOUND
        )
    text = read_text(path, "give the folder written by `lathe prepare`", HELD_OUT_CHARACTERS)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    longest = min(MAX_PROMPT_TOKENS, longest)
    if longest < 2:
        raise UserError(
            "the model reads too few positions to verify its export: prompts of 2 tokens and a new "
            "one need 3",
            "train a model with a larger Model.max_position_embeddings",
            Code.UNSUPPORTED,
        )
    lengths = np.linspace(min(MIN_PROMPT_TOKENS, longest), longest, n).round().astype(int)
    if len(tokens) < longest + n:
        raise UserError(
            f"{path}: {len(tokens)} tokens are too few for {n} prompts of up to {longest}",
            "lower Export.prompts, or prepare a larger corpus or test split",
            Code.TOO_LITTLE_DATA,
        )
    starts = np.linspace(0, len(tokens) - longest, n).astype(int)
    bos = bos_ids(tokenizer)
    return [
        [*bos, *tokens[a : a + k - len(bos)]]
        for a, k in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
