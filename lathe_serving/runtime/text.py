"""Prompts become token ids, and token ids become text again, without incomplete characters.

Some tokenizers, such as Llama's, prepend a token like `<s>` to every text, and their models were
trained with it; `post_processor` in `tokenizer.json` defines it. Detokenization is incremental, for
byte-level BPE and for SentencePiece, whose words begin with U+2581.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tokenizers import AddedToken, Tokenizer

from lathe_base.errors import Code, UserError

CUT_TOKENS = 64  # that a cut between two pieces of a text adds at most
DENSE = 8  # characters per token: more than most texts have

# GPT-2's alphabet: printable bytes stand for themselves, the rest follow from U+0100.
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF_LETTER = {chr(b): b for b in PRINTABLE} | {chr(0x100 + i): b for i, b in enumerate(OTHERS)}

WORD = "\u2581"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's token of one byte


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
        # Encoding takes time and memory in proportion to the text, however absurd its length is.
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
    # What comes before the tokens of a text that every vocabulary has.
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


class TokenBytes:
    """The bytes of every id; empty for special tokens and ids that the tokenizer lacks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._special_ids = {content: i for i, content in self._special.items()}
        self._bytes: dict[int, bytes] = {}
        self._bos = bos_ids(tokenizer)
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
        # Whether U+2581 stands for a space in tokens, and decoding replaces it.
        marks_words = WORD in json.dumps(steps, ensure_ascii=False)
        # Whether decoding drops the space that encoding prepends to a text.
        self._drops_a_space = any(
            (step.get("type") == "Strip" and step.get("start"))
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        for token, i in tokenizer.get_vocab(with_added_tokens=True).items():
            if i in added:
                self._bytes[i] = b"" if added[i].special else token.encode()
            elif marks_words and (match := BYTE.fullmatch(token)):
                self._bytes[i] = bytes.fromhex(match[1])
            elif marks_words:
                self._bytes[i] = token.replace(WORD, " ").encode()
            elif BYTE_OF_LETTER.keys() >= set(token):
                self._bytes[i] = bytes(BYTE_OF_LETTER[letter] for letter in token)
            else:
                raise UserError(
                    f"tokenizer.json: token {token!r} is not byte-level BPE",
                    "use a model with a GPT-2-style or SentencePiece tokenizer",
                    Code.UNSUPPORTED,
                )
        self.longest = max(map(len, self._bytes.values()))

    def __getitem__(self, token: int) -> bytes:
        return self._bytes.get(token, b"")

    def name(self, token: int) -> str:
        """A text for one token alone: its own if it has one, `bytes:\\xf0\\x9f` for a part of a
        character, as in the OpenAI API, and `token_id:300` for an id outside the tokenizer's
        vocabulary."""
        if token in self._special:
            return self._special[token]
        if token not in self._bytes:
            return f"token_id:{token}"
        try:
            return self[token].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self[token])

    def special(self, token: int) -> str:
        """The text of a special token, which texts omit; empty for others."""
        return self._special.get(token, "")

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text, or None."""
        return self._special_ids.get(text)

    def echo(self, tokens: Iterable[int]) -> list[str]:
        """The text of a prompt, in pieces that each token completes, with special tokens except
        those that the tokenizer prepends; bytes that are not UTF-8 become U+FFFD."""
        ids, decoder = list(tokens), codecs.getincrementaldecoder("utf-8")("replace")
        parts = [self.special(token).encode() or self[token] for token in ids]
        if ids[: len(self._bos)] == self._bos:
            parts[: len(self._bos)] = [b""] * len(self._bos)
        pieces = [decoder.decode(part, i == len(parts)) for i, part in enumerate(parts, 1)]
        if self._drops_a_space and "".join(pieces).startswith(" "):
            first = next(i for i, piece in enumerate(pieces) if piece)
            pieces[first] = pieces[first][1:]
        return pieces


class TextStream:
    """Turns a stream of ids into text; a character is emitted with the last of its bytes.

    Bytes that cannot be UTF-8 become U+FFFD, as in `Tokenizer.decode`; a character that is
    incomplete when generation ends is dropped, and so are special tokens.

    Args:
        stop: strings that end the text. They are not emitted, and text that may be the beginning of
            one is held back. They are searched for in the text with its special tokens, so that
            one may consist of these, and in the text without, which the client gets.

    Attributes:
        length: number of characters so far, with those held back.
        stopped: whether a stop string was found.
    """

    def __init__(self, token_bytes: TokenBytes, stop: Sequence[str] = ()) -> None:
        self._token_bytes, self._stop = token_bytes, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[tuple[str, bool]] = []  # characters, and whether they are emitted
        self.length = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """Add an id; returns the text that is certain now."""
        text = self._decoder.decode(self._token_bytes[token])
        self.length += len(text)
        if not self._stop:
            return text
        self._pending += [(character, True) for character in text]
        self._pending += [(character, False) for character in self._token_bytes.special(token)]
        # Search in both views of the text, with special tokens and without. Positions are those in
        # `_pending` throughout, so that the earliest stop of either view cuts both.
        whole = range(len(self._pending))
        emitted = [i for i in whole if self._pending[i][1]]
        longest = max(map(len, self._stop))
        stops: list[int] = []
        partial_stops: list[int] = []
        views: list[Sequence[int]] = [whole]
        if len(emitted) < len(whole):
            views.append(emitted)
        for positions in views:
            view = "".join(self._pending[i][0] for i in positions)
            stops += [positions[i] for stop in self._stop if (i := view.find(stop)) >= 0]
            starts = range(max(len(view) - longest + 1, 0), len(view))
            may_become_stop = (i for i in starts if any(s.startswith(view[i:]) for s in self._stop))
            partial_stops += [positions[i] for i in islice(may_become_stop, 1)]
        self.stopped = bool(stops)
        end = min(stops or partial_stops, default=len(self._pending))
        certain, self._pending = self._pending[:end], [] if stops else self._pending[end:]
        return _emitted(certain)

    def rest(self) -> str:
        """The text held back; call it at the end."""
        pending, self._pending = self._pending, []
        return _emitted(pending)


def _emitted(characters: Iterable[tuple[str, bool]]) -> str:
    return "".join(character for character, is_emitted in characters if is_emitted)
