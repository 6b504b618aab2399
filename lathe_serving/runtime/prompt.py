"""Tokenizes prompts.

Some tokenizers, such as Llama's, prepend a token like `<s>` to every text, and their models were
trained with it; `post_processor` in `tokenizer.json` defines it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

CUT_TOKENS = 64  # that a cut between two pieces of a text adds at most
DENSE = 8  # characters per token: more than most texts have


class TooManyTokens(Exception):
    """A text has more tokens than are allowed."""


@dataclass(frozen=True)
class TokenLimit:
    """A limit on the length of texts, which bounds the time to encode them too.

    Attributes:
        tokens: that a text may have.
        longest: bytes of the tokenizer's longest token.
    """

    tokens: int
    longest: int

    def require(self, encode: Callable[[str], list[int]], text: str, before: int = 0) -> None:
        """Stop if `before` tokens and those of a text cannot be within the limit. The text is
        encoded as far as that takes, in pieces that should exceed the limit, or not at all if it is
        no longer than a piece.

        Raises:
            TooManyTokens: they are not.
        """
        piece = DENSE * self.tokens
        if len(text) <= piece:
            return
        if len(text.encode(errors="replace")) > self.tokens * self.longest:
            raise TooManyTokens
        for start in range(0, len(text), piece):
            before += len(encode(text[start : start + piece])) - CUT_TOKENS
            if before > self.tokens:
                raise TooManyTokens

    def encode(self, encode: Callable[[str], list[int]], parts: Sequence[str]) -> list[int]:
        """Encode the parts of a text, but stop when it cannot be within the limit.

        Raises:
            TooManyTokens: it is not.
        """
        ids: list[int] = []
        for part in parts:
            self.require(encode, part, len(ids))
            ids += encode(part)
            if len(ids) > self.tokens:
                raise TooManyTokens
        return ids


def bos_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer prepends to a text: none or one."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode("a").ids
    starts = range(len(whole) - len(plain) + 1)
    return whole[: next((i for i in starts if whole[i : i + len(plain)] == plain), 0)]


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts, each with the token that the tokenizer prepends, unless the text already begins
    with it, as chat templates' output does."""
    bos = bos_ids(tokenizer)
    token_ids = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return [ids if ids[: len(bos)] == bos else [*bos, *ids] for ids in token_ids]


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> list[tuple[list[int], list[int]]]:
    """Encode texts and their continuations as one text each, divided after as many tokens as the
    first text has by itself, as lm-eval does. A tokenizer that marks the beginning of a text would
    encode a continuation differently by itself."""
    before = encode_prompts(tokenizer, [text for text, _ in pairs])
    whole = encode_prompts(tokenizer, [text + more for text, more in pairs])
    return [(ids[: len(b)], ids[len(b) :]) for b, ids in zip(before, whole, strict=True)]
