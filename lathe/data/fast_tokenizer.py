"""Encodes documents with fastokens where it produces the ids of `tokenizers`.

fastokens is tens of times as fast, but new. `tokenizers` remains the reference: both encode a
sample of hostile texts before the first document, and then a part of every batch.
"""

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe_base.errors import Code, StageError

if TYPE_CHECKING:
    import fastokens  # type: ignore[import-untyped]

log = logging.getLogger("lathe")


class TokenBatch(NamedTuple):
    """Concatenated token ids of documents.

    Attributes:
        ids: (tokens,), of any integer type.
        sizes: (sequences,) tokens of each.
        sequences: (documents,) number of sequences of each; None if every document is one.
        mask: (tokens,) whether the assistant writes each; None if the text is no conversation.
    """

    ids: NDArray[np.integer[Any]]
    sizes: NDArray[np.int64]
    sequences: NDArray[np.int64] | None = None
    mask: NDArray[np.bool_] | None = None

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.sizes if self.sequences is None else self.sequences)


CHECKED_CHARACTERS = 2048
"""Share of every batch that `tokenizers` encodes too."""
HOSTILE = (
    "",
    " \t\n\r\n  x \n\n\u00a0\u2003\u200b\ufeff",
    " It's  they'LL\t don't I'M we'Ve\u2019s O'Neill's",
    "1 22 333 4444 1,000,000.5e-7 x2y \u0663\u0664 \u00bd \u2167 \u00b2",
    "na\u00efve cafe\u0301 \u00c5 A\u030a \ufb01 \u6f22\u5b57",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \ud55c\uae00 \u0e20\u0e32\u0e29\u0e32",
    "\U0001f917\U0001f469\u200d\U0001f469\u200d\U0001f467 !!?!...///\\\\ #@ \x00\x01\x7f\x85\u2028",
    "a" * 300 + "B" * 9 + "camelCaseABCdef HTTPServer __init__ a_b-c" + " " * 70 + "\n" * 9,
    "<|endoftext|> x<|endoftext|><|im_end|> <|endoftext|</s><unk><0x0A>\u2581\u0120",
)

ONE_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
"""GPT-2's pieces of texts that were cut at every digit before, as SmolLM's are: a run of spaces
before a digit is whole. fastokens takes three times as long for the two steps."""


class Encoder:
    """Encodes documents without the tokens that a tokenizer adds around a text.

    Args:
        special_in_text: whether the names of special tokens in a document are these tokens.
        is_fast: whether to try fastokens.
    """

    def __init__(self, tokenizer: Tokenizer, special_in_text: bool, is_fast: bool = True) -> None:
        tokenizer.encode_special_tokens = not special_in_text
        self.tokenizer, self.splits_special = tokenizer, not special_in_text
        self._fast = self._checked() if is_fast else None

    def __call__(self, texts: Sequence[str]) -> TokenBatch:
        """Token ids of the texts.

        Raises:
            StageError: fastokens gives other ids than `tokenizers` for a part of a text.
        """
        if self._fast is None:
            return self._exact(texts)
        # Of every batch, the middle of the longest text is encoded by both.
        longest = max(texts, key=len)
        begin = max(0, len(longest) - CHECKED_CHARACTERS) // 2
        part = [longest[begin : begin + CHECKED_CHARACTERS]]
        if not _equal(_encode(self._fast, part, self.splits_special), self._exact(part)):
            raise StageError(
                f"fastokens and tokenizers encode {part[0][:40]!r}... differently: set "
                "Prepare.fast_tokenizer=false, and report it",
                Code.MISMATCH,
            )
        return _encode(self._fast, texts, self.splits_special)

    def _exact(self, texts: Sequence[str]) -> TokenBatch:
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return TokenBatch(np.concatenate(ids), np.fromiter(map(len, ids), np.int64, len(ids)))

    def _checked(self) -> "fastokens.Tokenizer | None":
        """fastokens' version of the tokenizer; None if it is unavailable or encodes differently."""
        import fastokens  # which Paddle's environment, where no text is encoded, does not have

        try:
            # Splitting at digits and then as GPT-2 does becomes one regular expression.
            state = json.loads(self.tokenizer.to_str())
            digits = {"type": "Digits", "individual_digits": True}
            steps = (state["pre_tokenizer"] or {}).get("pretokenizers", [])
            if len(steps) == 2 and steps[0] == digits and steps[1].get("use_regex"):
                split = {"type": "Split", "pattern": {"Regex": ONE_REGEX}, "behavior": "Isolated"}
                steps[:] = [{**split, "invert": False}, {**steps[1], "use_regex": False}]
            fast = fastokens.Tokenizer.from_json_str(json.dumps(state))
            if _equal(_encode(fast, HOSTILE, self.splits_special), self._exact(HOSTILE)):
                return fast
            why = "encodes a sample of texts differently"
        except Exception as error:  # of no documented kind
            why = f"does not support it: {error}"
        log.info("using the slower library tokenizers: fastokens %s", why)
        return None


def _encode(fast: "fastokens.Tokenizer", texts: Sequence[str], splits_special: bool) -> TokenBatch:
    raw, bounds = fast.encode_batch_flat(
        list(texts), add_special_tokens=False, split_special_tokens=splits_special
    )
    ends = np.frombuffer(bounds, np.uint64).astype(np.int64)
    return TokenBatch(np.frombuffer(raw, np.uint32), ends[1:] - ends[:-1])


def _equal(actual: TokenBatch, expected: TokenBatch) -> bool:
    return np.array_equal(actual.ids, expected.ids) and np.array_equal(actual.sizes, expected.sizes)
