"""Texts that tell tokenizers apart: every reader of a tokenizer has to give them the same ids."""

from collections.abc import Iterator

from tokenizers import Tokenizer

TEXTS = (
    "The strokes of the tool, and the other things; they have turned (twice).",
    "def f(x):\n\tif x != 0x1F:\r\n        return {'a': [1, 2]}  # e.g.\n\n\nclass A_b2: pass\n",
    'SELECT * FROM t WHERE id>=10;\n<div class="x">&amp;</div> https://a.b/c?d=1&e=%20 ../x\\y',
    " It's  they'LL\t don't I'M we'Ve O'Neill's 'tis rock'n'roll\r\n\r\n  x \n",
    "1 22 333 4444 55555 1,000,000.5e-7 x2y 3rd 2026-11-27 \u0663\u0664 \u00bd \u2167",
    "\u6f22\u5b57\u3068\u4eee\u540d\u3001\u4e2d\u6587\u3002 \ud55c\uae00 \u0440\u0443\u0441\u0441"
    "\u043a\u0438\u0439 na\u00efve",
    "\U0001f917\U0001f469\u200d\U0001f467 x\U0001f600\U0001f600 !!?!...///\\\\ #@ HTTPServer",
    "a  b   c    d\t\te \t f\n\n g\n \n\n\nh     ",
    "   leading\u00a0and\u3000wide",
)
"""Prose, code, contractions, digits, CJK, emoji and runs of whitespace. Accents are composed,
because llama.cpp omits Qwen's normalization to NFC."""


def probes(tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """What a text is, for messages, and the text: `TEXTS`, and every added token, alone and inside
    text, where each of its flags changes the ids."""
    for text in TEXTS:
        yield described(text), text
    for token in tokenizer.get_added_tokens_decoder().values():
        name = token.content
        for text in (name, f"one{name}two {name} three  {name}\n\n{name}{name}, 4{name} "):
            yield f"the added token {name!r} in {text[:40]!r}", text


def described(text: str) -> str:
    """A text by its beginning, for messages."""
    return f"the text {text[:40]!r}"
