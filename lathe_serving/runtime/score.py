"""Log-likelihoods of given tokens or text with an exported model, without torch."""

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe_base.errors import Code, UserError
from lathe_serving.runtime.exported_model import ExportedModel
from lathe_serving.runtime.protocol import TokenScores
from lathe_serving.runtime.text import TokenLimit, TooManyTokens, encode_pairs, encode_prompts


def score_tokens(
    model: ExportedModel,
    tokens: NDArray[np.int64],
    index: NDArray[np.int64],
    targets: NDArray[np.int64],
) -> TokenScores:
    """Score k targets per row; logits are computed at the targets' positions only.

    Args:
        tokens: (B, T) ids, short rows padded on the right.
        index: (B, k) positions in `tokens` whose next token is the target.
        targets: (B, k) ids.

    Returns:
        (B, k) natural log-likelihoods, and (B, k) whether the target is the argmax.

    Raises:
        UserError: shapes that do not match, or an id or position out of range.
    """
    _check(model, tokens, index, targets)
    logits = model.logits(tokens, index=index)  # (B, k, V)
    chosen = np.take_along_axis(logits, targets[..., None], 2)[..., 0]
    highest = logits.max(2)
    is_greedy = logits.argmax(2) == targets
    logits -= highest[..., None]
    total = np.exp(logits, out=logits).sum(2, dtype=np.float64)
    return (chosen - highest).astype(np.float64) - np.log(total), is_greedy


def score_text(
    model: ExportedModel, tokenizer: Tokenizer, limit: TokenLimit, text: str, continuation: str
) -> TokenScores:
    """Score the tokens of `continuation` given `text`; the space between two words usually belongs
    to `continuation`, as its first character.

    Args:
        limit: positions of the model, and one more for the last target.

    Returns:
        (1, k) for its k tokens, as `score_tokens`.

    Raises:
        UserError: one of them is empty, or together they exceed the model's positions.
    """
    if not text or not continuation:
        raise UserError(
            "text_input or continuation is empty", "give at least one character", Code.INVALID_VALUE
        )
    try:
        limit.require(lambda part: encode_prompts(tokenizer, [part])[0], text + continuation)
    except TooManyTokens:
        raise UserError(
            f"text_input and continuation have more tokens than the model's {model.n_positions} "
            "positions",
            "shorten them",
            Code.TOO_LONG,
        ) from None
    before, after = encode_pairs(tokenizer, [(text, continuation)])[0]
    tokens = np.array([[*before, *after[:-1]]], np.int64)
    index = np.arange(len(before) - 1, tokens.shape[1])[None]
    return score_tokens(model, tokens, index, np.array([after], np.int64))


def _check(
    model: ExportedModel,
    tokens: NDArray[np.int64],
    index: NDArray[np.int64],
    targets: NDArray[np.int64],
) -> None:
    shapes = tokens.shape, index.shape, targets.shape
    if (
        len(tokens.shape) != 2
        or index.shape != targets.shape
        or tokens.shape[:1] != index.shape[:1]
    ):
        raise UserError(
            f"tokens, index and targets have the shapes {shapes}",
            "give (B, T), (B, k) and (B, k)",
            Code.INVALID_VALUE,
        )
    if not all(array.size for array in (tokens, index)):
        raise UserError(
            f"nothing to score in the shapes {shapes}",
            "give at least one target",
            Code.INVALID_VALUE,
        )
    limits = {
        "token": (tokens, model.vocab_size),
        "target": (targets, model.vocab_size),
        "index": (index, tokens.shape[1]),
        "length": (np.array(tokens.shape[1]), model.n_positions + 1),
    }
    for name, (values, limit) in limits.items():
        if values.min() < 0 or values.max() >= limit:
            wrong = values.max() if values.max() >= limit else values.min()
            raise UserError(
                f"{name} {wrong} is out of range", f"give 0 to {limit - 1}", Code.INVALID_VALUE
            )
