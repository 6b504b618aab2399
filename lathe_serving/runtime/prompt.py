"""Tokenizes prompts.

Some tokenizers, such as Llama's, prepend a token like `<s>` to every text, and their models were
trained with it; `post_processor` in `tokenizer.json` defines it.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer


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
    found = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return [ids if ids[: len(bos)] == bos else [*bos, *ids] for ids in found]


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> list[tuple[list[int], list[int]]]:
    """Encode texts and their continuations as one text each, divided after as many tokens as the
    first text has by itself, as lm-eval does. A tokenizer that marks the beginning of a text would
    encode a continuation differently by itself."""
    before = encode_prompts(tokenizer, [text for text, _ in pairs])
    whole = encode_prompts(tokenizer, [text + more for text, more in pairs])
    return [(ids[: len(b)], ids[len(b) :]) for b, ids in zip(before, whole, strict=True)]
