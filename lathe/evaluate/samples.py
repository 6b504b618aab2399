"""Text samples: continuations of a few held-out prompts, for a reader to judge."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from lathe_base.config.settings import GenerationSettings
from lathe_serving.runtime.text import encode_prompts

N_SAMPLES = 4
NEW_TOKENS = 48
PROMPT_CHARACTERS = 80

Generate = Callable[[list[list[int]], GenerationSettings], list[list[int]]]


@dataclass(frozen=True)
class Sample:
    """A prompt and its continuation."""

    prompt: str
    text: str


def held_out_prompts(text: Path) -> list[str]:
    """Prompts: openings of long lines, evenly spread over the file, cut at word boundaries."""
    lines = [line.strip() for line in text.read_text(encoding="utf-8").splitlines()]
    long = [line for line in lines if len(line) > PROMPT_CHARACTERS // 2]
    chosen = long[:: max(1, len(long) // N_SAMPLES)][:N_SAMPLES]
    return [line[:PROMPT_CHARACTERS].rsplit(" ", 1)[0] for line in chosen]


def continue_prompts(
    generate: Generate,
    tokenizer: Tokenizer,
    n_positions: int,
    prompts: list[str],
    settings: GenerationSettings,
) -> list[Sample]:
    """One continuation per prompt, of at most 48 tokens, by the recipe's decoding strategy."""
    limit = min(NEW_TOKENS, settings.max_dec_len, n_positions // 2)
    settings = settings.model_copy(update={"max_dec_len": limit, "num_return_sequences": 1})
    room = n_positions - limit
    encoded = [ids[-room:] for ids in encode_prompts(tokenizer, prompts)]
    return [
        Sample(tokenizer.decode(ids), tokenizer.decode(new))
        for ids, new in zip(encoded, generate(encoded, settings), strict=True)
    ]
